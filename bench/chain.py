"""Forwards of a case as jitted programs: the chain that is timed, and the walk that counts.

The ids of all turns lie on the device, and the program itself counts the turns, so that it is
replayed by calling it again on what it returned.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_pool as pp
from bench.cases import Case
from bench.implementations import Implementation

# XLA dumps, among much else, what it launches; a thunk inside a command buffer is indented.
DUMP = "*.thunk_sequence_after_thunk_passes.txt"
LAUNCH = re.compile(r"^\d+: (k\w+)", re.MULTILINE)


class Stream(NamedTuple):
    """A case on the device.

    Attributes:
      ids: [T, L, W]; the cases of a geometry have the same T, so that all need one compilation.
      turns: [] how many of the T are the case's.
    """

    ids: jax.Array
    turns: jax.Array


class Carry(NamedTuple):
    """What one forward hands to the next.

    Attributes:
      state: of the pool.
      turn: [] the stream's next turn.
      plan: the last step's, or () for a kernel. A kernel writes its plan whether it is read or not;
        of any other planner XLA would leave out what nobody reads.
    """

    state: pp.PoolState
    turn: jax.Array
    plan: pp.Plan | tuple[()]


class Counts(NamedTuple):
    """Of every step of a walk, [turns, L]: experts promoted and staged, and lanes with a route."""

    promoted: jax.Array
    staged: jax.Array
    routed: jax.Array


class Chain(NamedTuple):
    """A compiled chain.

    Attributes:
      call: (carry, stream) -> carry; the carry is donated.
      launches: what a call launches on the GPU, by XLA's names, once `kCommandBuffer` if all is one
        CUDA graph; empty where XLA does not say.
    """

    call: Callable[[Carry, Stream], Carry]
    launches: dict[str, int]


def make_stream(config: pp.PoolConfig, case: Case, room: int | None = None) -> Stream:
    """Uploads a case, with room for so many turns: by default for as many as a layer has experts,
    and no case has more."""
    room = config.num_experts if room is None else room
    ids = np.full((room, config.num_layers, config.width), -1, np.int32)
    ids[: case.turns] = case.ids
    return Stream(jnp.asarray(ids), jnp.int32(case.turns))


def start(config: pp.PoolConfig, case: Case) -> Carry:
    """The carry before the first forward."""
    return Carry(case.initial_state(config), jnp.int32(0), ())


def copy_for(config: pp.PoolConfig, implementation: Implementation, carry: Carry) -> Carry:
    """A copy of a carry for an implementation to start from, which may donate it."""
    carry = jax.tree.map(jnp.copy, carry)
    if implementation.is_kernel:
        return carry._replace(plan=())
    shapes = jax.eval_shape(
        functools.partial(implementation.step, config), carry.state, 0, np.zeros(1, np.int32)
    )[0]
    return carry._replace(plan=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def _forward(
    config: pp.PoolConfig, implementation: Implementation, carry: Carry, stream: Stream
) -> Carry:
    """The steps of all layers: unrolled for a kernel, a scan for any other planner. Of those each
    layer launches tens of kernels: unrolled they compile for a minute, and a scan adds little."""
    ids = lax.dynamic_index_in_dim(stream.ids, carry.turn, keepdims=False)
    plan, state = carry.plan, carry.state
    if implementation.is_kernel:
        for layer in range(config.num_layers):
            _, state = implementation.step(config, state, layer, ids[layer])
    else:

        def step(carry, layer):
            return implementation.step(config, carry[1], layer, ids[layer]), None

        layers = jnp.arange(config.num_layers, dtype=jnp.int32)
        (plan, state), _ = lax.scan(step, (plan, state), layers)
    return Carry(state, (carry.turn + 1) % stream.turns, plan)


def compile_chain(
    config: pp.PoolConfig,
    implementation: Implementation,
    carry: Carry,
    stream: Stream,
    forwards: int,
) -> Chain:
    """Compiles `forwards` forwards as one program, and finds out what it launches."""

    def chain(carry: Carry, stream: Stream) -> Carry:
        for _ in range(forwards):
            carry = _forward(config, implementation, carry, stream)
        return carry

    lowered = jax.jit(chain, donate_argnums=0).lower(carry, stream)
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        dumps = [path.read_text() for path in Path(folder).glob(DUMP)]
    return Chain(compiled, dict(Counter(LAUNCH.findall("\n".join(dumps)))))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def walk(
    config: pp.PoolConfig,
    implementation: Implementation,
    turns: int,
    carry: Carry,
    stream: Stream,
) -> tuple[Carry, Counts]:
    """Runs `turns` forwards, a step at a time, and counts what each step's plan says."""

    def step(carry: Carry, layer: jax.Array) -> tuple[Carry, Counts]:
        ids = stream.ids[carry.turn, layer]
        plan, state = implementation.step(config, carry.state, layer, ids)
        turn = (carry.turn + (layer == config.num_layers - 1)) % stream.turns
        counts = Counts(plan.promoted_count, plan.staged_count, jnp.sum(plan.routes >= 0))
        return carry._replace(state=state, turn=turn), counts

    layers = jnp.tile(jnp.arange(config.num_layers, dtype=jnp.int32), turns)
    carry, counts = lax.scan(step, carry, layers)
    return carry, jax.tree.map(lambda x: x.reshape(turns, config.num_layers), counts)


def settle(
    config: pp.PoolConfig, implementation: Implementation, case: Case, stream: Stream
) -> Carry:
    """Walks a case into its steady state."""
    carry, _ = walk(config, implementation, len(stream.ids), start(config, case), stream)
    return carry


def check_counts(
    config: pp.PoolConfig, implementation: Implementation, case: Case, carry: Carry, stream: Stream
) -> int:
    """Walks at least once round the case, and returns the number of steps.

    Raises:
      AssertionError: a step had other counts than the case states.
    """
    _, counts = walk(config, implementation, len(stream.ids), carry, stream)
    expected = (case.promoted, case.staged, config.width)
    for name, got, want in zip(Counts._fields, counts, expected, strict=True):
        wrong = np.argwhere(np.asarray(got) != want)
        if len(wrong):
            turn, layer = wrong[0]
            raise AssertionError(
                f"{case.name}, width {config.width}, turn {turn}, layer {layer}: "
                f"{name} {got[turn, layer]}, not {want}; so in {len(wrong)} of {got.size} steps"
            )
    return counts.promoted.size
