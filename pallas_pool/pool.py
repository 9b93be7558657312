"""`Pool`: all that a model carries from step to step, as one pytree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pallas_pool.bank import init_bank
from pallas_pool.config import PoolConfig
from pallas_pool.counters import init_counters
from pallas_pool.state import PoolState, init_state


class Pool(NamedTuple):
    """The tables, the bank, and what was counted: one pytree, to be donated to each step.

    Attributes:
      state: the planner's tables, see `PoolState`. `pool._replace(state=pp.set_controls(pool.state, ...))`
        sets controls.
      bank: the pytree of one layer's experts, with leaves [R+S, ...] on the device.
      counters: int32 [L, 4, 2], see `init_counters`; None where nothing is counted.
    """

    state: PoolState
    bank: Any
    counters: jax.Array | None = None


def init_pool(
    config: PoolConfig,
    experts: Any,
    residents: Sequence[Sequence[int]] | None = None,
    *,
    counters: bool = False,
) -> Pool:
    """Makes a pool in which nothing was selected yet, its bank filled with the residents.

    Of a state that was saved, `pp.Pool(state, pp.init_bank(config, experts, state))` makes a pool again.

    Args:
      config: the geometry.
      experts: a pytree of arrays [L, E, ...], or a sequence of L pytrees of arrays [E, ...], in host
        memory: see `pin`.
      residents: as for `init_state`, such as what `warm_start` gives; by default each layer's first
        experts.
      counters: whether `moe` shall count hits, misses and copies: see `read_counters`.

    Raises:
      TypeError, ValueError: `experts` or `residents` do not fit the geometry.
    """
    if not isinstance(counters, bool):
        raise TypeError(f"counters must be True or False, got {counters!r}")
    state = init_state(config, residents)
    bank = init_bank(config, experts, state)
    return Pool(state, bank, init_counters(config) if counters else None)
