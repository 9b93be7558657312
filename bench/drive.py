"""Drives the planner over a trace, a token at a time, and counts what its plans say."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_pool as pp
from bench.counts import Counts


class Drive(NamedTuple):
    """A trace driven through the planner.

    Attributes:
      counts: of all tokens.
      state: of the pool at the end.
      compile_seconds: that the program took to compile.
      seconds: that all chunks took after that, transfers included.
    """

    counts: Counts
    state: pp.PoolState
    compile_seconds: float
    seconds: float


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _chunk(
    config: pp.PoolConfig, kernel: str, state: pp.PoolState, ids: jax.Array
) -> tuple[pp.PoolState, tuple[jax.Array, jax.Array]]:
    """The steps of tokens [T, L, K]: the state, and promoted and staged experts, [T, L] each."""
    layers = jnp.arange(config.num_layers, dtype=jnp.int32)

    def layer_step(state, x):
        plan, state = pp.step(config, state, *x, kernel=kernel)
        return state, (plan.promoted_count, plan.staged_count)

    def token(state, lanes):
        return lax.scan(layer_step, state, (layers, lanes))

    return lax.scan(token, state, ids)


def drive(
    config: pp.PoolConfig,
    ids: np.ndarray,
    residents: Sequence[Sequence[int]] | None = None,
    controls: Mapping[str, Any] | None = None,
    *,
    kernel: str,
    chunk: int = 16,
    progress: Callable[[int], Any] = lambda tokens: None,
) -> Drive:
    """Plans every step of a trace [T, L, K] by one compiled program, called once for each chunk of
    tokens; `progress` is told how many each has planned. The last chunk is filled up with tokens
    that select nothing.

    Raises:
      pp.PoolError: the state is broken in the end, or a step has recorded an invalid lane.
    """
    tokens = len(ids)
    chunk = min(chunk, tokens)
    chunks = -(-tokens // chunk)
    padded = np.full((chunks * chunk, *ids.shape[1:]), -1, np.int32)
    padded[:tokens] = ids
    state = pp.set_controls(pp.init_state(config, residents), **(controls or {}))
    begin = time.perf_counter()
    program = _chunk.lower(config, kernel, state, padded[:chunk]).compile()
    compiled = time.perf_counter()
    counts = []
    for start in range(0, len(padded), chunk):
        state, counted = program(state, padded[start : start + chunk])
        counts.append(jax.device_get(counted))
        progress(min(chunk, tokens - start))
    seconds = time.perf_counter() - compiled
    pp.check_state(config, state)
    promoted, staged = (np.concatenate(part)[:tokens] for part in zip(*counts, strict=True))
    return Drive(Counts.of(ids, promoted, staged), state, compiled - begin, seconds)
