"""Prefill: the experts of more lanes than one step plans, each copied at most once a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_pool.config import INT32_MAX, PoolConfig, check_layer, saturate_int32, valid_weight
from pallas_pool.copy_rows import Copies, copy_rows
from pallas_pool.counters import count
from pallas_pool.grouped_ffn import Experts, combine, make_tiles, tile_lanes, zeros_for
from pallas_pool.kernels.grouped import Tiles
from pallas_pool.planner import step
from pallas_pool.pool import Pool
from pallas_pool.state import ERROR, PoolState, vary_alike


class Turns(NamedTuple):
    """The order in which the experts of a call take their turn, and what it is made of.

    Attributes:
      experts: int32 [E] expert ids: first the `ready` ones, then the `waiting` ones, each in the order of
        their first lane; what stands behind is not selected.
      rows: int32 [E] bank row of each of them where it is ready, else -1.
      ready: int32 scalar; experts that need no copy.
      waiting: int32 scalar; experts that take their turn in blocks.
    """

    experts: jax.Array
    rows: jax.Array
    ready: jax.Array
    waiting: jax.Array


def prefill(
    config: PoolConfig,
    pool: Pool,
    experts: Any,
    layer: Any,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *,
    activation: Any,
    kernel: str,
    updates: bool,
    interpret: bool | None,
) -> tuple[jax.Array, Pool]:
    """The FFN of any number of lanes, in passes over blocks of experts: copy a block into bank rows, then run
    all lanes of the call that it serves. The bank is carried by the loop, in place.

    Without `updates` the first pass serves the resident experts too, and a block is as many others as there
    are staging rows. With `updates` a block is planned by `step`, gate and controls as they are.

    Args:
      layer: as `step` takes it.
      x: [T, d]
      ids, weights: [T, k], T * k >= 1.

    Returns:
      y [T, d], and the pool.
    """
    index_of_layer, x, ids, weights, pool = vary_alike((check_layer(config, layer), x, ids, weights, pool))
    safe_ids, any_invalid = _judge(config, index_of_layer, ids.reshape(-1), weights.reshape(-1))
    state = pool.state
    state = state.stepped(scalars=jnp.asarray(state.scalars).at[ERROR].max(any_invalid.astype(jnp.int32)))
    turns = _take_turns(config, state, index_of_layer, safe_ids, updates)
    block = min(config.staging_rows, config.num_experts)
    if updates:
        block = min(block, config.width)

    # Lanes in the order of their expert's turn: each pass serves some tiles of them.
    n, top_k, num_experts = safe_ids.size, weights.shape[1], config.num_experts
    turn_of = jnp.zeros(num_experts, jnp.int32).at[turns.experts].set(_range(num_experts))
    turn = jnp.where(safe_ids >= 0, turn_of[safe_ids], INT32_MAX)
    order = jnp.argsort(turn, stable=True).astype(jnp.int32)
    turn = turn[order]
    lanes = tile_lanes(n, num_experts)
    start, end = make_tiles(turn, num_experts, lanes)
    tile_turn = turn.at[start].get(mode="fill", fill_value=INT32_MAX)

    def passes_left(carry):
        return carry[0] < passes

    def one_pass(carry):
        index, state, bank, out, counts = carry
        first = turns.ready + index * block  # The turn of the block's first expert.
        if updates:
            src = _block_experts(turns, first, block)
            plan, state = step(config, state, layer, src, kernel=kernel, interpret=interpret)
            copies = Copies(plan.copy_src, plan.copy_dst, plan.copy_count)
            rows = plan.routes[:block]
            hits = jnp.sum(src >= 0, dtype=jnp.int32) - plan.copy_count
            more = (hits, plan.promoted_count, plan.staged_count)
        else:
            copies = _stage(config, turns, first, block)
            rows = copies.copy_dst
            more = (jnp.where(index == 0, turns.ready, 0), jnp.zeros_like(first), copies.copy_count)
        bank = copy_rows(bank, experts, layer, copies, interpret=interpret)
        served = _rows_of_turns(turns, tile_turn, first, rows, index)
        ffn = Experts.of(bank, x.shape[1], activation)
        out = ffn.run(x, order, Tiles(start, end, served), out, top_k, lanes, interpret)
        return index + 1, state, bank, out, counts + jnp.stack(more)

    # The resident experts need a pass even where nothing else is selected.
    passes = jnp.maximum(-(-turns.waiting // block), jnp.minimum(turns.ready, 1))
    carry = (
        jnp.int32(0),
        state,
        pool.bank,
        zeros_for(x, passes, n),
        jnp.zeros(3, jnp.int32),
    )
    carry = vary_alike((carry, passes))[0]
    _, state, bank, out, counts = lax.while_loop(passes_left, one_pass, carry)
    y = combine(out, safe_ids >= 0, weights, x.dtype)
    counters = count(pool.counters, index_of_layer, (1, counts[0], counts[1], counts[2]))
    return y, Pool(state, bank, counters)


def _range(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)


def _judge(config, layer, ids, weights):
    """As `step` judges lanes: the id where it is valid, else -1; and whether a lane is invalid."""
    ids = saturate_int32(ids)
    layer_ok = (layer >= 0) & (layer < config.num_layers)
    valid = (ids >= 0) & (ids < config.num_experts) & layer_ok & valid_weight(weights)
    return jnp.where(valid, ids, -1), jnp.any((ids != -1) & ~valid)


def _take_turns(
    config: PoolConfig, state: PoolState, layer: jax.Array, safe_ids: jax.Array, updates: bool
) -> Turns:
    n, experts = safe_ids.size, config.num_experts
    lane = jnp.where(safe_ids >= 0, safe_ids, experts)
    first_lane = jnp.full(experts, n, jnp.int32).at[lane].min(_range(n), mode="drop")
    selected = first_lane < n
    # A layer out of range has no valid lanes: what is read for it does not matter.
    row = lax.dynamic_slice_in_dim(state.key_row, layer * experts, experts)
    is_ready = jnp.zeros_like(selected) if updates else selected & (row >= 0)
    # By two keys: ready, waiting, not selected; then the first lane.
    group = jnp.where(is_ready, 0, jnp.where(selected, 1, 2))
    order = jnp.lexsort((first_lane, group)).astype(jnp.int32)
    return Turns(
        experts=order,
        rows=jnp.where(is_ready, row, -1)[order],
        ready=jnp.sum(is_ready, dtype=jnp.int32),
        waiting=jnp.sum(selected & ~is_ready, dtype=jnp.int32),
    )


def _block_experts(turns: Turns, first: jax.Array, block: int) -> jax.Array:
    """[block] the experts whose turn it is from `first` on, -1 past the last."""
    turn = first + _range(block)
    is_there = turn < turns.ready + turns.waiting
    return jnp.where(is_there, turns.experts.at[turn].get(mode="clip"), -1)


def _stage(config: PoolConfig, turns: Turns, first: jax.Array, block: int) -> Copies:
    """The copies of a block of experts into the staging rows."""
    src = _block_experts(turns, first, block)
    dst = jnp.where(src >= 0, config.rows + _range(block), -1)
    return Copies(src, dst, jnp.sum(src >= 0, dtype=jnp.int32))


def _rows_of_turns(turns, turn, first, rows, index):
    """The bank row of each turn in this pass, -1 where it is not served: ready ones in the first pass."""
    place = turn - first  # INT32_MAX, a turn that there is not, stays out of range.
    in_block = (place >= 0) & (place < rows.size)
    row = jnp.where(in_block, rows.at[place].get(mode="clip"), -1)
    is_ready = (turn < turns.ready) & (index == 0)
    return jnp.where(is_ready, turns.rows.at[turn].get(mode="clip"), row)
