"""Kernel "fused": all misses of a step at once, victims from a queue of the oldest rows.

The cost of a step follows the lanes. Misses are counted and ranked lane by lane in registers, and the
j-th promotion takes the j-th live entry of the victim queue (`victims.py`), so that the pool is
scanned once in some hundreds of promotions instead of once in each.

One program of a few warps runs a step, and every warp may hold a copy of a lane. So between a load
and a store of one address, and between a store and a load, all warps must meet: each barrier says for
which addresses it stands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_pool.kernels import lanes as ln
from pallas_pool.kernels import victims

# Pairs of lanes that are compared at once, to find the first lane of each expert.
PAIR_TILE = 4096


def plan_step(call: ln.Call) -> None:
    """One step."""
    config, state, plan = call.config, call.state, call.plan
    lanes = ln.read_lanes(call)
    controls = ln.read_controls(call)
    queue = victims.read_queue(state)
    head_rows = victims.load_rows(call, queue)
    lane, clock, gate_open = lanes.lane, controls.clock, controls.gate != 0
    everywhere = lane >= 0

    row = ln.load(state.key_row, lanes.key, lanes.valid, -1)
    misses = ln.load(state.miss_count, lanes.key, lanes.valid, 0)
    hit = lanes.valid & (row >= 0) & (row < config.rows)
    missed = lanes.valid & ~hit
    missed_lanes = jnp.sum(missed.astype(jnp.int32), dtype=jnp.int32)
    ln.store(state.row_used, row, clock[1], hit & gate_open)
    ln.store(state.row_epoch, row, clock[0], hit & gate_open & (clock[0] > 0))
    ln.store(plan.safe_ids, lane, lanes.safe_ids, everywhere)
    ln.copy_layer_map(call, lanes)
    # Scalars, key_row and miss_count were loaded above and are stored below; the stamps of the hits
    # must be seen by the search for victims; the layer's map must not land on what is laid over it.
    call.barrier()
    ln.write_scalars(call, lanes, controls)

    @pl.when(missed_lanes == 0)
    def _():
        ln.store(plan.routes, lane, row, everywhere)
        for ref in (plan.copy_src, plan.copy_dst, plan.staged_expert, plan.staged_row):
            ln.store(ref, lane, -1, everywhere)
        for ref in (plan.copy_count, plan.promoted_count, plan.staged_count):
            ref[0] = jnp.int32(0)

    @pl.when(missed_lanes != 0)
    def _():
        # Loaded before they are needed, so that the ranking hides their latency.
        span = victims.first_span(config, queue, missed_lanes)
        window = victims.load_window(call, clock, queue, head_rows, span)
        _place_misses(call, lanes, controls, queue, window, row, missed, misses, missed_lanes)


def _place_misses(
    call: ln.Call, lanes, controls, queue, window, row, missed, misses, missed_lanes
) -> None:
    """Ranks the missed experts, evicts for those to be promoted, and writes tables and plan."""
    config, state, plan, lane = call.config, call.state, call.plan, lanes.lane
    gate_open = controls.gate != 0
    # A missed lane that is the only one needs no comparison with others.
    leader = lax.cond(missed_lanes > 1, lambda: _first_lane(call, lanes), lambda: lane + 0)
    first = missed & (leader == lane)
    misses = controls.counted(misses)
    rules = ln.read_rules(call, controls)
    wants = first & rules.may_promote & (misses >= rules.min_misses)

    # Two ranks in one scan: of the missed experts, and of those that want a pool row.
    packed = first.astype(jnp.int32) + (wants.astype(jnp.int32) << 16)
    ranks = lax.cumsum(packed) - packed
    total = jnp.sum(packed, dtype=jnp.int32)
    first_rank, wants_rank = ranks & 0xFFFF, ranks >> 16
    promoted_count = victims.evict(
        call, lanes.base, controls.clock, rules, queue, window, total >> 16
    )

    promoted = wants & (wants_rank < promoted_count)
    staged = first & ~promoted
    staged_rank = first_rank - jnp.minimum(wants_rank, promoted_count)
    staged_count = (total & 0xFFFF) - promoted_count
    copy_count = promoted_count + staged_count
    # `evict` left the victims, oldest first, at the head of copy_dst.
    victim = ln.load(plan.copy_dst, wants_rank, promoted, -1)
    place = jnp.where(promoted, victim, config.rows + staged_rank)
    copy_at = jnp.where(promoted, wants_rank, promoted_count + staged_rank)

    ln.store(state.key_row, lanes.key, place, promoted)
    ln.store(state.row_key, place, lanes.key, promoted)
    ln.store(state.miss_count, lanes.key, jnp.where(promoted, 0, misses), first & gate_open)
    # The entries and the -1 behind them are at different places: their order does not matter.
    ln.store(plan.copy_src, copy_at, lanes.safe_ids, first)
    ln.store(plan.copy_dst, copy_at, place, staged)
    ln.store(plan.staged_expert, staged_rank, lanes.safe_ids, staged)
    ln.store(plan.staged_row, staged_rank, place, staged)
    for ref, count in (
        (plan.copy_src, copy_count),
        (plan.copy_dst, copy_count),
        (plan.staged_expert, staged_count),
        (plan.staged_row, staged_count),
    ):
        ln.store(ref, lane, -1, lane >= count)
    plan.copy_count[0] = copy_count
    plan.promoted_count[0] = promoted_count
    plan.staged_count[0] = staged_count
    if plan.step_map is not None:
        ln.store(plan.step_map, lanes.safe_ids, place, first)

    repeated = missed & ~first
    ln.store(plan.routes, lane, jnp.where(first, place, row), ~repeated)

    @pl.when(missed_lanes != total & 0xFFFF)
    def _():
        # The routes of the leaders, stored above, are loaded by the lanes that follow them.
        call.barrier()
        ln.store(plan.routes, lane, ln.load(plan.routes, leader, repeated, -1), repeated)


def _first_lane(call: ln.Call, lanes: ln.Lanes) -> jax.Array:
    """The first lane with the same expert, of each valid lane."""
    width = call.config.width
    columns = min(width, max(1, PAIR_TILE // width))

    def look(i, first):
        column = i * columns + ln.lane_ids(columns)
        safe_ids, _ = ln.judge_ids(call, column, lanes.layer_ok)
        same = lanes.safe_ids[:, None] == safe_ids[None, :]
        return jnp.minimum(first, jnp.min(jnp.where(same, column[None, :], width), axis=1))

    none = jnp.full_like(lanes.lane, width)
    return lax.fori_loop(jnp.int32(0), jnp.int32(width // columns), look, none)
