"""The age of pool rows: the clock of their last selection, in two words, loaded tile by tile.

During the clock's first 2**31 steps every epoch is 0, and its load is masked off.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_pool.config import INT32_MAX, PoolConfig
from pallas_pool.kernels import lanes as ln
from pallas_pool.kernels.clock import Clock


def load_epoch(call: ln.Call, clock: Clock, row: jax.Array, mask: jax.Array) -> jax.Array:
    return ln.load(call.state.row_epoch, row, mask & (clock[0] > 0), 0)


def oldest_epoch(call: ln.Call, clock: Clock, tile: int) -> jax.Array:
    """The smallest epoch in the pool: the rows of that epoch come before all others."""

    config = call.config

    def scan():
        def look(i, least):
            row = i * tile + ln.lane_ids(tile)
            epoch = ln.load(call.state.row_epoch, row, row < config.rows, INT32_MAX)
            return jnp.minimum(least, epoch)

        none = jnp.full(tile, INT32_MAX, jnp.int32)
        return jnp.min(lax.fori_loop(jnp.int32(0), jnp.int32(tiles(config, tile)), look, none))

    return lax.cond(clock[0] > 0, scan, lambda: clock[0] + 0)


def tiles(config: PoolConfig, tile: int) -> int:
    return -(-config.rows // tile)
