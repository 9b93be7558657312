"""The parts of a decode step alone: row copies beside a plain pinned copy, and the FFN beside a device copy.

Each case is a chain of all layers in one program, as a decode step has them, every layer with rows of
its own, so that no cache serves a row twice. The cases take turns.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_pool as pp
from bench import decode_models, decode_profile, decode_routing
from bench.decode_models import Shape
from pallas_pool.copy_rows import Copies

ROWS = (0, 1, 8)  # To copy, a layer.
LEAST_CALLS = 4  # In a batch, so that most calls are dispatched while another runs.
PROFILED_CALLS = 5
IN_FLIGHT = 2  # Calls that hand on nothing, beside the one that is waited for.
DEVICE_COPY_BYTES = 2**32


class Case(NamedTuple):
    """Something that is timed.

    Attributes:
      key: what its records say of it.
      call: carry -> carry; it donates the carry if it has one.
      carry: the name of the carry that it takes and returns.
      launches: of library calls in one call, one a layer, or 0.
      bytes: that one call moves: over the bus, or from the bank, or on the device, read and written.
      part: the part of the step that its kernels belong to, or None: it is not profiled.
    """

    key: dict[str, Any]
    call: Callable[[Any], Any]
    carry: str
    launches: int
    bytes: int
    part: str | None


def lanes_of(shape: Shape, batch: int) -> int:
    return shape.top_k * batch


def width_of(lanes: int) -> int:
    """The planner's lanes: a power of two."""
    return 1 << (lanes - 1).bit_length()


def bank_rows(shape: Shape, batches: Sequence[int]) -> int:
    """So many that each layer has rows of its own."""
    return shape.layers * max(*ROWS, *(lanes_of(shape, batch) for batch in batches))


def make_bank(shape: Shape, rows: int) -> dict[str, jax.Array]:
    return {
        name: decode_models.make((rows, *size), 77_000 + i)
        for i, (name, size) in enumerate(shape.leaves.items())
    }


def _by_layer(array: Any) -> tuple[jax.Array, ...]:
    """Each layer's as an array of its own, as a decode step has them: no kernel slices them."""
    return tuple(jnp.asarray(each) for each in array)


def _copy_cases(
    shape: Shape, experts: Sequence[Any], batches: Sequence[int], rows: int
) -> Iterator[Case]:
    rng = np.random.default_rng(0)

    def chain(bank, experts, src, dst, count):
        for layer in range(shape.layers):
            bank = pp.copy_rows(bank, experts, layer, Copies(src[layer], dst[layer], count))
        return bank

    compiled = jax.jit(chain, donate_argnums=0)
    for batch in batches:
        width = width_of(lanes_of(shape, batch))
        entries = min(width, shape.experts)
        src = np.full((shape.layers, width), -1, np.int32)
        dst = src.copy()
        share = rows // shape.layers
        for layer in range(shape.layers):
            src[layer, :entries] = rng.permutation(shape.experts)[:entries]
            dst[layer, :share] = layer * share + rng.permutation(share)[:width]
        lists = _by_layer(src), _by_layer(dst)
        for count in ROWS:
            if count > min(entries, share):
                continue

            arguments = *lists, jnp.int32(count)

            def call(bank, arguments=arguments):
                return compiled(bank, experts, *arguments)

            key: dict[str, Any] = {"case": "copy_rows", "batch_size": batch, "lanes": width, "rows": count}
            moved = shape.layers * count * shape.expert_bytes
            yield Case(key, call, "bank", shape.layers, moved, "copies")


def _routes(ids: np.ndarray, share: int) -> tuple[np.ndarray, int]:
    """Rows [L, batch, k] of experts [L, batch, k], each layer in its own share of the bank, and how many
    distinct ones there are in all."""
    routes, distinct = np.full(ids.shape, -1, np.int32), 0
    for layer, own in enumerate(ids):
        found, place = np.unique(own[own >= 0], return_inverse=True)
        routes[layer][own >= 0] = layer * share + place.reshape(-1)
        distinct += len(found)
    return routes, distinct


def _ffn_cases(
    shape: Shape, batches: Sequence[int], rows: int, routing: np.ndarray
) -> Iterator[Case]:
    def chain(bank, x, routes, weights):
        y = jnp.zeros_like(x[0])
        for layer in range(shape.layers):
            # Each layer's input needs the output of the one before, so that no two run at once.
            y = pp.expert_ffn(x[layer] + 1e-3 * y, bank, routes[layer], weights)
        return y

    compiled = jax.jit(chain)
    share = rows // shape.layers
    for batch in batches:
        lanes = lanes_of(shape, batch)
        rng = np.random.default_rng(1)
        distinct = np.stack([rng.permutation(share)[:lanes] for _ in range(shape.layers)])
        asked = {"all distinct": distinct.reshape(shape.layers, batch, -1)}
        steps = decode_routing.for_batch(routing, batch)
        if batch > 1:
            asked["as routed"] = steps[len(steps) // 2]
        for name, ids in asked.items():
            routes, count = _routes(ids, share)
            x = decode_models.make((shape.layers, batch, shape.d), 88_000, std=1.0)
            weights = jnp.full(ids.shape[1:], 1 / ids.shape[2], jnp.float32)
            arguments = _by_layer(x), _by_layer(routes), weights

            def call(carry, arguments=arguments):
                bank, _ = carry
                return bank, compiled(bank, *arguments)

            key = {"case": "expert_ffn", "batch_size": batch, "lanes": ids[0].size, "rows": count}
            key |= {"routing": name}
            yield Case(key, call, "ffn", shape.layers, count * shape.expert_bytes, "ffn")


def _plain_cases(shape: Shape, experts: Sequence[Any], device_bytes: int) -> Iterator[Case]:
    layer, device = experts[0], decode_models.device_sharding()

    def eager(_):
        return jax.tree.map(lambda leaf: jax.device_put(leaf, device), layer)

    yield Case({"case": "plain pinned copy"}, eager, "none", 0, shape.layer_bytes, None)
    large = jnp.zeros(device_bytes // 4, jnp.int32)
    copy, add = jax.jit(jnp.copy), jax.jit(lambda x: x + 1)
    for name, function in (("device copy", copy), ("device add", add)):

        def call(_, function=function):
            return function(large)

        yield Case({"case": name}, call, "none", 0, 2 * large.nbytes, None)


def micro(
    shape: Shape,
    experts: Sequence[Any],
    batches: Sequence[int],
    routing: np.ndarray,
    batch_s: float,
    repeats: int,
    device_bytes: int = DEVICE_COPY_BYTES,
) -> Iterator[dict[str, Any]]:
    """Checks, then times, then profiles the cases; yields records.

    Args:
      shape: of the model.
      experts: of its layers, in pinned host memory.
      batches: sequences that decode at once.
      routing: [tokens, L, k] experts.
      batch_s: seconds that a timed batch takes, about.
      repeats: batches of each case.
      device_bytes: of the array that is copied on the device.
    """
    rows = bank_rows(shape, batches)
    bank = make_bank(shape, rows)
    yield _check_copies(shape, experts, bank)
    cases = [
        *_copy_cases(shape, experts, batches, rows),
        *_ffn_cases(shape, batches, rows, routing),
        *_plain_cases(shape, experts, device_bytes),
    ]
    carries: dict[str, Any] = {"bank": bank, "ffn": None, "none": None}
    del bank

    def run(case: Case, calls: int) -> float:
        if case.carry == "ffn":  # Reads the bank that the copies write.
            carries["ffn"] = (carries["bank"], None)
        carry = carries[case.carry]
        pending: collections.deque[Any] = collections.deque()
        begin = time.perf_counter()
        for _ in range(calls):
            carry = case.call(carry)
            if case.carry == "none":
                # Transfers need not end in the order in which they began: the last does not stand for all.
                pending.append(carry)
                if len(pending) > IN_FLIGHT:
                    jax.block_until_ready(pending.popleft())
        jax.block_until_ready((carry, list(pending)))
        seconds = time.perf_counter() - begin
        carries[case.carry] = None if case.carry != "bank" else carry
        return seconds

    calls = []
    for case in cases:
        run(case, 1)  # Compiles.
        calls.append(max(LEAST_CALLS, round(batch_s / run(case, 2) * 2)))
    for batch in range(repeats):
        first = batch % len(cases)
        turn = list(zip(cases, calls, strict=True))
        for order, (case, count) in enumerate(turn[first:] + turn[:first]):
            yield {
                "kind": "micro",
                **case.key,
                "batch": batch,
                "order": order,
                "seconds": run(case, count),
                "calls": count,
                "launches": count * case.launches,
                "bytes": count * case.bytes,
            }
    if jax.default_backend() != "gpu":
        return
    for case in cases:
        if case.part is not None:
            yield _profile(shape, case, run)


def _check_copies(shape: Shape, experts: Sequence[Any], bank: Any) -> dict[str, Any]:
    """Copies a row of each of two layers, and compares them with what the host holds.

    Raises:
      AssertionError: they differ.
    """
    copy = jax.jit(pp.copy_rows, static_argnums=2)  # Not donated: the bank is needed still.
    last = shape.layers - 1
    for layer, expert, row in ((0, 1, 3), (last, shape.experts - 1, 0)):
        plan = Copies(jnp.array([expert]), jnp.array([row]), jnp.int32(1))
        small = {name: leaf[:4] for name, leaf in bank.items()}
        moved = copy(small, tuple(experts), layer, plan)
        for name, leaf in moved.items():
            expected = np.array(small[name])
            expected[row] = np.asarray(experts[layer][name])[expert]
            if not np.array_equal(np.asarray(leaf), expected):
                raise AssertionError(f"copy_rows: layer {layer}, expert {expert}: {name} differs")
    return {"kind": "check", "what": "rows copied by copy_rows, bit by bit", "equal": True}


def _profile(shape: Shape, case: Case, run: Callable[[Case, int], float]) -> dict[str, Any]:
    assert case.part is not None
    per_layer = 2 if case.part == "ffn" else 1  # The FFN is two kernels.
    expected = {case.part: PROFILED_CALLS * per_layer * shape.layers}

    def prepare() -> Callable[[], Any]:
        run(case, 1)  # The device was idle.
        return lambda: run(case, PROFILED_CALLS)

    try:
        name, launches = decode_profile.profile(prepare, expected)
    except decode_profile.NoProfile as error:
        return {"kind": "left_out", "what": f"profile of {case.key}", "why": str(error)}
    return {
        "kind": "micro_profile",
        **case.key,
        "profiler": name,
        "calls": PROFILED_CALLS,
        "bytes": case.bytes,
        "microseconds": decode_profile.durations(launches, case.part),
        "by_name": decode_profile.by_name(launches),
    }
