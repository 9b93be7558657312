"""`step` as the semantics state it, one lane after another. Slow, jittable, and the judge of the kernels."""

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
from pallas_pool.state import Plan, PoolState, check_geometry, vary_alike

# A clock in two words: epoch * 2**31 + word.
Clock = tuple[jax.Array, jax.Array]


def _tick(clock: Clock, by: jax.Array) -> Clock:
    """The clock `by` (0 or 1) later."""
    epoch, word = clock
    wraps = (word == INT32_MAX) & (by > 0)
    return epoch + wraps, jnp.where(wraps, 0, word + by)


def _back(clock: Clock, by: jax.Array, times: int) -> Clock:
    """The clock `times * by` earlier; an epoch below 0 is before all time."""

    def once(_, clock: Clock) -> Clock:
        epoch, word = clock
        return epoch - (word < by), jnp.where(word < by, word - by + INT32_MAX + 1, word - by)

    return lax.fori_loop(0, times, once, clock)


def _before(a: Clock, b: Clock) -> jax.Array:
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def _remainder(clock: Clock, n: jax.Array) -> jax.Array:
    """(epoch * 2**31 + word) % n, by doubling the epoch's remainder 31 times."""

    def add(a, b):
        return jnp.where(a >= n - b, a - (n - b), a + b)

    epoch, word = clock
    shifted = lax.fori_loop(0, 31, lambda _, r: add(r, r), epoch % n)
    return add(shifted, word % n)


def _victim(state: PoolState, horizon: Clock) -> tuple[jax.Array, jax.Array]:
    """The pool row with the smallest (row_used, row), and whether it was used before the horizon."""
    oldest_epoch = jnp.min(state.row_epoch)
    used = jnp.where(state.row_epoch == oldest_epoch, state.row_used, INT32_MAX)
    # A row of that epoch may itself have the word INT32_MAX: look among that epoch's rows alone.
    oldest = (state.row_epoch == oldest_epoch) & (state.row_used == jnp.min(used))
    row = jnp.argmax(oldest).astype(jnp.int32)
    return row, _before((oldest_epoch, state.row_used[row]), horizon)


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
    state, layer, ids, weights = vary_alike((state, layer, ids, weights))
    experts, width, rows = config.num_experts, config.width, config.rows

    # Lanes: padding, invalid, valid.
    lanes = ids.size
    ids = saturate_int32(ids)
    in_range = (ids >= 0) & (ids < experts)
    valid = in_range
    if weights is not None:
        valid = valid & valid_weight(weights)
    layer_ok = (layer >= 0) & (layer < config.num_layers)
    valid = valid & layer_ok
    invalid = (ids != -1) & ~valid
    safe_ids = jnp.pad(jnp.where(valid, ids, -1), (0, width - lanes), constant_values=-1)
    base = jnp.where(layer_ok, layer, 0) * experts

    # Clock and forwards.
    scalars = state.scalars
    gate = scalars[s.GATE]
    clock = _tick((scalars[s.CLOCK_EPOCH], scalars[s.CLOCK]), gate)
    forwards = _tick(
        (scalars[s.FORWARDS_EPOCH], scalars[s.FORWARDS]), gate * (layer == 0)
    )
    horizon = _back(clock, scalars[s.PROTECT_RECENT], config.num_layers)
    interval = scalars[s.PROMOTE_INTERVAL]
    may_promote = (gate != 0) & (_remainder(forwards, interval) == 1 % interval)
    scalars = scalars.at[
        jnp.array([s.CLOCK_EPOCH, s.CLOCK, s.FORWARDS_EPOCH, s.FORWARDS, s.ERROR])
    ].set(jnp.stack([*clock, *forwards, scalars[s.ERROR] | jnp.any(invalid)]))
    state = state.stepped(scalars=scalars)

    # This layer's residents; the misses are overlaid as they are placed.
    step_map = lax.dynamic_slice(state.key_row, (base,), (experts,))
    step_map = jnp.where(layer_ok, step_map, -1)

    def stamp_hit(lane, state: PoolState) -> PoolState:
        row = jnp.where(safe_ids[lane] >= 0, step_map[safe_ids[lane]], -1)
        at = jnp.where((row >= 0) & (gate != 0), row, rows)  # Out of range: nothing is written.
        return state.stepped(
            row_used=state.row_used.at[at].set(clock[1], mode="drop"),
            row_epoch=state.row_epoch.at[at].set(clock[0], mode="drop"),
        )

    state = lax.fori_loop(0, lanes, stamp_hit, vary_alike(state))

    none = jnp.full(width, -1, jnp.int32)
    plan = Plan(
        routes=none,
        safe_ids=safe_ids,
        copy_src=none,
        copy_dst=none,
        copy_count=jnp.int32(0),
        promoted_count=jnp.int32(0),
        staged_count=jnp.int32(0),
        staged_expert=none,
        staged_row=none,
        step_map=step_map,
    )

    def promote(expert, victim, plan: Any, state: PoolState):
        old_key, new_key, at = state.row_key[victim], base + expert, plan.promoted_count
        old_expert = old_key - base
        same_layer = (old_expert >= 0) & (old_expert < experts)
        plan = plan._replace(
            copy_src=plan.copy_src.at[at].set(expert),
            copy_dst=plan.copy_dst.at[at].set(victim),
            promoted_count=at + 1,
            step_map=plan.step_map.at[jnp.where(same_layer, old_expert, experts)]
            .set(-1, mode="drop")
            .at[expert]
            .set(victim),
        )
        state = state.stepped(
            key_row=state.key_row.at[old_key].set(-1).at[new_key].set(victim),
            row_key=state.row_key.at[victim].set(new_key),
            row_used=state.row_used.at[victim].set(clock[1]),
            row_epoch=state.row_epoch.at[victim].set(clock[0]),
            miss_count=state.miss_count.at[new_key].set(0),
        )
        return plan, state

    def stage(expert, plan: Any, state: PoolState):
        at = plan.staged_count
        plan = plan._replace(
            staged_expert=plan.staged_expert.at[at].set(expert),
            staged_row=plan.staged_row.at[at].set(rows + at),
            staged_count=at + 1,
            step_map=plan.step_map.at[expert].set(rows + at),
        )
        return plan, state

    def place(lane, carry):
        """Gives the lane's expert a row if it has none yet, then routes the lane."""
        plan, state = carry
        expert = safe_ids[lane]

        def miss(plan: Plan, state: PoolState):
            key = base + expert
            misses = jnp.minimum(state.miss_count[key], INT32_MAX - gate) + gate
            state = state.stepped(miss_count=state.miss_count.at[key].set(misses))
            limit = scalars[s.PROMOTE_LIMIT]
            victim, old_enough = _victim(state, horizon)
            promoted = (
                may_promote
                & ((limit == 0) | (plan.promoted_count < limit))
                & (misses >= scalars[s.PROMOTE_MIN_MISSES])
                & old_enough
            )
            return lax.cond(
                promoted,
                lambda: promote(expert, victim, plan, state),
                lambda: stage(expert, plan, state),
            )

        is_miss = (expert >= 0) & (plan.step_map[expert] < 0)
        plan, state = lax.cond(is_miss, miss, lambda *carry: carry, plan, state)
        route = jnp.where(expert >= 0, plan.step_map[expert], -1)
        return plan._replace(routes=plan.routes.at[lane].set(route)), state

    plan, state = lax.fori_loop(0, lanes, place, vary_alike((plan, state)))

    # The staging suffix: the staged part of the copy list, behind the promotions.
    lane = jnp.arange(width, dtype=jnp.int32)
    suffix = jnp.where(lane < plan.staged_count, plan.promoted_count + lane, width)
    plan = plan._replace(
        step_map=plan.step_map if config.step_map else None,
        copy_src=plan.copy_src.at[suffix].set(plan.staged_expert, mode="drop"),
        copy_dst=plan.copy_dst.at[suffix].set(plan.staged_row, mode="drop"),
        copy_count=plan.promoted_count + plan.staged_count,
    )
    return plan, state
