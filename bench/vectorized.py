"""The planner as a JAX user would write it without Pallas: whole-array jnp operations under jit.

The same state, plan and results as `pallas_pool.step`. A step evicts no row that it has stamped, so
its victims are a prefix of the pool sorted by age, and a cumulative sum tells the misses apart that
get one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_pool import state as s
from pallas_pool.config import (
    INT32_MAX,
    PoolConfig,
    check_lanes,
    check_layer,
    saturate_int32,
    valid_weight,
)
from pallas_pool.kernels import clock as ck
from pallas_pool.state import Plan, PoolState, check_geometry

EPOCH_BITS = 31


def step(
    config: PoolConfig,
    state: PoolState,
    layer: Any,
    expert_ids: Any,
    weights: Any = None,
) -> tuple[Plan, PoolState]:
    """Plans one layer's step; the signature and the results of `pallas_pool.step`, bit for bit."""
    check_geometry(config, state)
    layer = check_layer(config, layer)
    ids, weights = check_lanes(config, expert_ids, weights)
    rows, width, experts = config.rows, config.width, config.num_experts

    layer_ok = (layer >= 0) & (layer < config.num_layers)
    base = jnp.where(layer_ok, layer, 0) * experts
    ids = saturate_int32(ids)
    valid = (ids >= 0) & (ids < experts) & layer_ok
    if weights is not None:
        valid &= valid_weight(weights)
    any_invalid = jnp.any((ids != -1) & ~valid)
    safe_ids = jnp.full(width, -1, jnp.int32).at[: ids.size].set(jnp.where(valid, ids, -1))
    key = jnp.where(safe_ids >= 0, base + safe_ids, config.keys)  # Out of range: reads -1 or 0.

    scalars = state.scalars
    gate = scalars[s.GATE]
    clock = ck.tick((scalars[s.CLOCK_EPOCH], scalars[s.CLOCK]), gate)
    forwards = ck.tick(
        (scalars[s.FORWARDS_EPOCH], scalars[s.FORWARDS]), gate * (layer == 0).astype(jnp.int32)
    )
    horizon = ck.minus_product(clock, scalars[s.PROTECT_RECENT], config.num_layers)
    interval = scalars[s.PROMOTE_INTERVAL]
    in_turn = _remainder(forwards, interval) == (interval > 1)

    # Lanes of one expert follow the first of them, their leader.
    leader = jnp.argmax(safe_ids[:, None] == safe_ids[None, :], axis=1)
    leads = (safe_ids >= 0) & (leader == jnp.arange(width))
    row = state.key_row.at[key].get(mode="fill", fill_value=-1)
    hit, missed = leads & (row >= 0), leads & (row < 0)
    hit_row = jnp.where(hit & (gate != 0), row, rows)
    row_used = state.row_used.at[hit_row].set(clock[1], mode="drop")
    row_epoch = state.row_epoch.at[hit_row].set(clock[0], mode="drop")
    misses = state.miss_count.at[key].get(mode="fill", fill_value=0)
    misses = jnp.minimum(misses, INT32_MAX - gate) + gate

    # The n-th promotion gets the n-th oldest row, as long as that row is old enough.
    wants = missed & (gate != 0) & in_turn & (misses >= scalars[s.PROMOTE_MIN_MISSES])
    rank = _earlier(wants)
    _, _, by_age = lax.sort(
        (row_epoch, row_used, jnp.arange(rows, dtype=jnp.int32)), num_keys=2, is_stable=True
    )
    victims = jnp.sum(ck.before((row_epoch, row_used), horizon))
    limit = scalars[s.PROMOTE_LIMIT]
    promoted = wants & (rank < victims) & ((limit == 0) | (rank < limit))
    staged = missed & ~promoted
    promoted_count, staged_count = jnp.sum(promoted), jnp.sum(staged)
    staged_at = _earlier(staged)
    victim = jnp.where(promoted, by_age[jnp.minimum(rank, rows - 1)], rows)
    place = jnp.where(hit, row, jnp.where(promoted, victim, rows + staged_at))

    old_key = state.row_key.at[victim].get()
    new_key = jnp.where(promoted, key, config.keys)
    key_row = state.key_row.at[jnp.where(promoted, old_key, config.keys)].set(-1, mode="drop")
    key_row = key_row.at[new_key].set(victim, mode="drop")
    missed_key = jnp.where(missed & (gate != 0), key, config.keys)
    state = PoolState(
        key_row=key_row,
        row_key=state.row_key.at[jnp.where(promoted, victim, config.bank_rows)].set(
            key, mode="drop"
        ),
        row_used=row_used.at[victim].set(clock[1], mode="drop"),
        row_epoch=row_epoch.at[victim].set(clock[0], mode="drop"),
        miss_count=state.miss_count.at[missed_key].set(jnp.where(promoted, 0, misses), mode="drop"),
        scalars=scalars.at[
            jnp.array([s.CLOCK_EPOCH, s.CLOCK, s.FORWARDS_EPOCH, s.FORWARDS, s.ERROR])
        ].set(jnp.stack([*clock, *forwards, scalars[s.ERROR] | any_invalid])),
    )

    def compact(mask, at, values):
        """`values` where the mask is set, each at its index; -1 elsewhere."""
        return (
            jnp.full(width, -1, jnp.int32).at[jnp.where(mask, at, width)].set(values, mode="drop")
        )

    copy_at = jnp.where(promoted, rank, promoted_count + staged_at)
    step_map = None
    if config.step_map:
        step_map = jnp.where(layer_ok, lax.dynamic_slice(key_row, (base,), (experts,)), -1)
        step_map = step_map.at[jnp.where(staged, safe_ids, experts)].set(place, mode="drop")
    plan = Plan(
        routes=jnp.where(safe_ids >= 0, place[leader], -1),
        safe_ids=safe_ids,
        copy_src=compact(missed, copy_at, safe_ids),
        copy_dst=compact(missed, copy_at, place),
        copy_count=promoted_count + staged_count,
        promoted_count=promoted_count,
        staged_count=staged_count,
        staged_expert=compact(staged, staged_at, safe_ids),
        staged_row=compact(staged, staged_at, place),
        step_map=step_map,
    )
    return jax.tree.map(lambda x: x.astype(jnp.int32), (plan, state))


def _earlier(mask: jax.Array) -> jax.Array:
    """How many lanes before each are in the mask."""
    return (jnp.cumsum(mask) - mask).astype(jnp.int32)


def _remainder(clock: ck.Clock, n: jax.Array) -> jax.Array:
    """`clock % n` for n >= 1, unrolled: a `while` would be many launches."""

    def add(a, b):
        return jnp.where(a >= n - b, a - (n - b), a + b)

    epoch, word = clock
    shifted = lax.rem(epoch, n)
    for _ in range(EPOCH_BITS):
        shifted = add(shifted, shifted)
    return add(shifted, lax.rem(word, n))
