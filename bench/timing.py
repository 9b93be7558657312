"""Times a case: replays of chains, taking turns, and the durations of single kernels by CUPTI."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.mosaic.gpu import profiler

import pallas_pool as pp
from bench import artifacts
from bench.cases import Case
from bench.chain import Carry, Chain, Stream, check_counts, copy_for, make_stream, settle, walk
from bench.correctness import first_difference
from bench.implementations import IMPLEMENTATIONS

WARM_UP_CALLS = 3


class Effort(NamedTuple):
    """Batches that are timed, and calls in each that are in flight at once."""

    batches: int
    replays: int


def replay(
    chains: dict[str, Chain],
    carries: dict[str, Carry],
    stream: Stream,
    efforts: dict[str, Effort],
) -> Iterator[dict[str, Any]]:
    """Yields one record a batch; updates `carries`.

    In every round each chain that has batches left has one, and each round begins with another.
    """
    for batch in range(max(effort.batches for effort in efforts.values())):
        names = [name for name in chains if batch < efforts[name].batches]
        first = batch % len(names)
        for order, name in enumerate(names[first:] + names[:first]):
            call, carry = chains[name].call, carries[name]
            begin = time.perf_counter()
            for _ in range(efforts[name].replays):
                carry = call(carry, stream)
            jax.block_until_ready(carry)
            seconds = time.perf_counter() - begin
            carries[name] = carry
            yield {
                "implementation": name,
                "batch": batch,
                "order": order,
                "seconds": seconds,
                "replays": efforts[name].replays,
            }


def time_case(
    config: pp.PoolConfig,
    case: Case,
    chains: dict[str, Chain],
    efforts: dict[str, Effort],
) -> Iterator[dict[str, Any]]:
    """Times every chain on a case in its steady state; yields a record a batch, one of the checks.

    Before and after the timing all chains that ran as often must have left the same state, and
    every step of the case's circle must have the counts that the case states.

    Raises:
      AssertionError: they have not.
    """
    stream = make_stream(config, case)
    baseline = next(iter(chains))
    settled = settle(config, IMPLEMENTATIONS[baseline], case, stream)
    counted = check_counts(config, IMPLEMENTATIONS[baseline], case, settled, stream)

    def begin(name: str) -> Carry:
        return copy_for(config, IMPLEMENTATIONS[name], settled)

    carries = {name: begin(name) for name in chains}
    for name, chain in chains.items():
        for _ in range(WARM_UP_CALLS):
            carries[name] = chain.call(carries[name], stream)
    check_same_state(config, case, carries)

    for effort in dict.fromkeys(efforts.values()):
        group = {name: chain for name, chain in chains.items() if efforts[name] == effort}
        ran = {name: carries[name] for name in group}
        for record in replay(group, ran, stream, dict.fromkeys(group, effort)):
            yield {"kind": "batch"} | record
        carries |= ran
        if baseline not in ran:
            carry = begin(baseline)
            for _ in range(WARM_UP_CALLS + effort.batches * effort.replays):
                carry = chains[baseline].call(carry, stream)
            ran = {baseline: carry} | ran
        check_same_state(config, case, ran)
    counted += check_counts(config, IMPLEMENTATIONS[baseline], case, carries[baseline], stream)
    yield {
        "kind": "checks",
        "promoted": case.promoted,
        "staged": case.staged,
        "counted_steps": counted,
        "same_states": list(chains),
    }


def check_same_state(config: pp.PoolConfig, case: Case, carries: dict[str, Carry]) -> None:
    snapshots = {name: pp.snapshot(config, carry.state) for name, carry in carries.items()}
    first, *others = snapshots
    for name in others:
        found = first_difference(snapshots[name], snapshots[first])
        if found:
            raise AssertionError(
                f"{case.name}, width {config.width}: state of {name}, against {first}: {found}"
            )


def kernel_durations(config: pp.PoolConfig, case: Case, kernel: str, turns: int) -> list[float]:
    """Microseconds of every step of `turns` forwards in the steady state, by CUPTI."""
    implementation, stream = IMPLEMENTATIONS[kernel], make_stream(config, case)
    carry = settle(config, implementation, case, stream)
    return durations_of_walk(config, kernel, turns, carry, stream)


@functools.cache
def jitted_walk(config: pp.PoolConfig, kernel: str, turns: int) -> Any:
    """The walk as a function of its own, compiled once for all cases of a geometry."""
    return jax.jit(functools.partial(walk, config, IMPLEMENTATIONS[kernel], turns))


@functools.cache
def _kernel_names(config: pp.PoolConfig, kernel: str) -> tuple[str, ...]:
    return tuple(each.name for each in artifacts.planner_kernels(config, kernel))


def durations_of_walk(
    config: pp.PoolConfig, kernel: str, turns: int, carry: Carry, stream: Stream
) -> list[float]:
    """Microseconds of every step of `turns` forwards from `carry` on, by CUPTI.

    Where a step launches several kernels, theirs are added up.
    """
    function = jitted_walk(config, kernel, turns)
    _, launches = profiler.measure(function, aggregate=False)(carry, stream)
    names = _kernel_names(config, kernel)
    milliseconds = [each for name, each in launches or () if name.startswith(names)]
    steps = turns * config.num_layers
    if len(milliseconds) != steps * len(names):
        seen = sorted({name for name, _ in launches or ()})
        raise RuntimeError(
            f"CUPTI saw {len(milliseconds)} launches of {names} in {steps} steps, among {seen}"
        )
    return (1e3 * np.reshape(milliseconds, (steps, len(names))).sum(axis=1)).tolist()
