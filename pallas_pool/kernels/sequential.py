"""The planner body that "loop" and "masked" share: misses in order, each victim by a scan of the pool.

One program of a few warps runs a step. Every warp executes every scalar load; a scalar store is made
by one of them. So between a load and a store of one address, and between a store and a load, all
warps must meet: each barrier below says for which addresses it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.config import INT32_MAX
from pallas_pool.kernels import ages
from pallas_pool.kernels import clock as ck
from pallas_pool.kernels import lanes as ln

# Pool rows that one iteration of the victim scan looks at.
SCAN_TILE = 2048


WriteSuffix = Callable[[ln.Call, jax.Array, jax.Array], None]


def plan_step(write_suffix: WriteSuffix, call: ln.Call) -> None:
    """One step.

    Args:
      write_suffix: `write_suffix(call, promoted_count, staged_count)` writes the staged part of the copy
        list behind the promotions, and the staged experts over the step map. The one place where the
        kernels differ.
      call: what the kernel was called with.
    """
    config, state, plan = call.config, call.state, call.plan
    lanes = ln.read_lanes(call)
    controls = ln.read_controls(call)
    rules = ln.read_rules(call, controls)
    rows, lane = config.rows, lanes.lane
    clock, gate_open = controls.clock, controls.gate != 0

    row = ln.load(state.key_row, lanes.key, lanes.valid, -1)
    hit = lanes.valid & (row >= 0) & (row < rows)
    missed = lanes.valid & ~hit
    misses = controls.counted(ln.load(state.miss_count, lanes.key, missed, 0))
    ln.store(state.row_used, row, clock[1], hit & gate_open)
    ln.store(state.row_epoch, row, clock[0], hit & gate_open)
    wants_row = missed & rules.may_promote & (misses >= rules.min_misses)

    everywhere = lane >= 0
    ln.store(plan.safe_ids, lane, lanes.safe_ids, everywhere)
    for ref in (plan.copy_src, plan.copy_dst, plan.staged_expert, plan.staged_row):
        ln.store(ref, lane, -1, everywhere)
    # safe_ids, row_used and row_epoch were stored above and are loaded in the loop; the -1 of the
    # lists must not land after the entries; key_row was loaded above and is stored in the loop.
    call.barrier()

    def place_miss(carry):
        """Gives the first expert that has no row yet a pool row or a staging row."""
        first, routes, promoted, staged = carry
        expert = plan.safe_ids[first]
        wants = jnp.max((wants_row & (lane == first)).astype(jnp.int32)) != 0

        def try_promote():
            victim, age = _oldest_row(call, clock)
            old_enough = ck.before(age, rules.horizon)
            # The scan loaded row_used and row_epoch, and the next line row_key: no warp may store to
            # them before all have loaded.
            old_key = state.row_key[victim]
            call.barrier()

            def promote():
                key = lanes.base + expert
                state.key_row[old_key] = jnp.full((), -1, jnp.int32)
                state.key_row[key] = victim
                state.row_key[victim] = key
                state.row_used[victim] = clock[1]
                state.row_epoch[victim] = clock[0]
                plan.copy_src[promoted] = expert
                plan.copy_dst[promoted] = victim
                return victim

            def keep():
                return victim - victim - 1

            placed = lax.cond(old_enough, promote, keep)
            # The next scan, and the copy of the layer's map, load what was stored here.
            call.barrier()
            return placed

        def do_not():
            return first - first - 1

        victim = lax.cond(wants & (promoted < rules.limit), try_promote, do_not)

        def stage():
            plan.staged_expert[staged] = expert
            plan.staged_row[staged] = rows + staged
            return rows + staged

        place = lax.cond(victim < 0, stage, lambda: victim + 0)
        is_staged = (victim < 0).astype(jnp.int32)
        routes = jnp.where(lanes.safe_ids == expert, place, routes)
        return _first_without_row(lanes, routes), routes, promoted + 1 - is_staged, staged + is_staged

    routes = jnp.where(hit, row, -1)
    zero = controls.gate - controls.gate
    _, routes, promoted, staged = lax.while_loop(
        lambda carry: carry[0] < config.width,
        place_miss,
        (_first_without_row(lanes, routes), routes, zero, zero),
    )

    ln.store(plan.routes, lane, routes, everywhere)
    # Lanes of one expert store the same count. A promoted expert starts again at no misses.
    misses = jnp.where(routes < rows, 0, misses)
    ln.store(state.miss_count, lanes.key, misses, missed & gate_open)
    ln.copy_layer_map(call, lanes)
    plan.promoted_count[0] = promoted
    plan.staged_count[0] = staged
    plan.copy_count[0] = promoted + staged
    # The suffix loads the staged lists, stored in the loop, and stores over the step map. The scalars
    # were loaded at the start, by all warps, and are stored now.
    call.barrier()
    pl.when(staged > 0)(lambda: write_suffix(call, promoted, staged))
    ln.write_scalars(call, lanes, controls)


def _first_without_row(lanes: ln.Lanes, routes: jax.Array) -> jax.Array:
    width = lanes.lane.shape[0]
    return jnp.min(jnp.where(lanes.valid & (routes < 0), lanes.lane, width))


def _oldest_row(call: ln.Call, clock: ck.Clock) -> tuple[jax.Array, ck.Clock]:
    """The pool row with the smallest (row_used, row), and when it was used."""
    config, state = call.config, call.state
    tile = min(SCAN_TILE, ln.next_power_of_two(config.rows))
    tiles = ages.tiles(config, tile)
    offset = ln.lane_ids(tile)
    last_is_whole = config.rows % tile == 0

    def scan(epoch):
        """The least word in the pool and its first row, among the rows of an epoch unless it is None.

        Each offset in a tile keeps the tile of its oldest row. The last tile comes first, so that `<=`
        leaves the first row of its age, and finds a row as young as the initial value too. Only the
        last tile is loaded with a mask: what lies outside is as young as can be, behind all rows.
        """

        def look(tile_index, oldest, inside=None):
            used, at = oldest
            row = tile_index * tile + offset
            new = plgpu.load(
                state.row_used.at[row], mask=inside, other=None if inside is None else INT32_MAX
            )
            older = new <= used
            if epoch is not None:
                older = older & (plgpu.load(state.row_epoch.at[row], mask=inside) == epoch)
            return jnp.where(older, new, used), jnp.where(older, tile_index, at)

        oldest = (jnp.full(tile, INT32_MAX, jnp.int32), jnp.full(tile, tiles, jnp.int32))
        last = jnp.int32(tiles - 1)
        oldest = look(last, oldest, None if last_is_whole else last * tile + offset < config.rows)
        used, at = lax.fori_loop(
            jnp.int32(1), jnp.int32(tiles), lambda i, x: look(last - i, x), oldest
        )
        least = jnp.min(used)
        return least, jnp.min(jnp.where(used == least, at * tile + offset, INT32_MAX))

    def scan_oldest_epoch():
        epoch = ages.oldest_epoch(call, clock, tile)
        return epoch, *scan(epoch)

    # During the clock's first 2**31 steps every epoch is 0.
    epoch, least, row = lax.cond(
        clock[0] > 0, scan_oldest_epoch, lambda: (clock[0] + 0, *scan(None))
    )
    return row, (epoch, least)
