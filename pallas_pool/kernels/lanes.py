"""What the kernels share: masked loads and stores over lanes, the barrier, and a step's beginning."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_pool import state as s
from pallas_pool.config import INT32_MAX, PoolConfig, saturate_int32, valid_weight
from pallas_pool.kernels import clock as ck
from pallas_pool.state import Plan, PoolState

Ref = Any  # What pallas_call hands to a kernel for an array.

# A step map wider than this is copied in pieces, so that it does not have to fit in registers at once.
MAP_TILE = 1024


def load(ref, index, mask, other):
    """`ref[index]` where the mask is set, `other` elsewhere."""
    return plgpu.load(ref.at[index], mask=mask, other=jnp.asarray(other, ref.dtype))


def store(ref, index, value, mask):
    """`ref[index] = value` where the mask is set.

    A lane that is masked off gets an index out of range: interpreted, it would write back the value
    it found, and undo the store of an active lane with the same index.
    """
    value = jnp.broadcast_to(value, mask.shape).astype(ref.dtype)
    plgpu.store(ref.at[jnp.where(mask, index, ref.shape[0])], value, mask=mask)


def lane_ids(width: int) -> jax.Array:
    return jnp.arange(width, dtype=jnp.int32)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Call(NamedTuple):
    """What a kernel is called with: the static geometry, and refs of its operands."""

    config: PoolConfig
    interpret: bool
    layer: Ref  # [1]
    ids: Ref  # [n]
    weights: Ref | None  # [n]
    state: PoolState  # of refs, updated in place
    plan: Plan  # of refs
    scratch: Ref | None

    def barrier(self) -> None:
        """All warps of the program wait here, and see each other's stores made before it."""
        if not self.interpret:
            plgpu.debug_barrier()


class Lanes(NamedTuple):
    """The lanes of a step. Vectors are [W]."""

    lane: jax.Array
    safe_ids: jax.Array  # -1 for padding and invalid lanes
    valid: jax.Array
    key: jax.Array  # key of the lane's expert, 0 where not valid
    any_invalid: jax.Array  # int32 scalar
    layer_ok: jax.Array
    base: jax.Array  # first key of the layer


class Controls(NamedTuple):
    """The scalars that every step needs, after its tick."""

    clock: ck.Clock
    forwards: ck.Clock
    gate: jax.Array
    error: jax.Array

    def counted(self, misses: jax.Array) -> jax.Array:
        """Miss counts with this step's miss, if the gate is open."""
        return jnp.minimum(misses, INT32_MAX - self.gate) + self.gate


class Rules(NamedTuple):
    """The scalars that decide whether a miss is promoted."""

    may_promote: jax.Array  # the gate is open, and it is this forward's turn
    limit: jax.Array  # promotions of this step, INT32_MAX if without limit
    min_misses: jax.Array
    horizon: ck.Clock  # rows used before it may be victims


def judge_ids(call: Call, lane: jax.Array, layer_ok: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads the ids of some lanes: the id where it is valid, else -1, and whether the lane is invalid.
    Lanes past the ids of the call are padding."""
    given = lane < call.ids.shape[0]
    ids = saturate_int32(load(call.ids, lane, given, 0))
    valid = (ids >= 0) & (ids < call.config.num_experts) & layer_ok & given
    if call.weights is not None:
        valid = valid & valid_weight(load(call.weights, lane, given, 0))
    return jnp.where(valid, ids, -1), given & (ids != -1) & ~valid


def read_lanes(call: Call) -> Lanes:
    """Loads and judges the lanes of the step."""
    config, layer = call.config, call.layer[0]
    layer_ok = (layer >= 0) & (layer < config.num_layers)
    base = jnp.where(layer_ok, layer, 0) * config.num_experts
    lane = lane_ids(config.width)
    safe_ids, invalid = judge_ids(call, lane, layer_ok)
    return Lanes(
        lane=lane,
        safe_ids=safe_ids,
        valid=safe_ids >= 0,
        key=jnp.where(safe_ids >= 0, base + safe_ids, 0),
        any_invalid=jnp.max(invalid.astype(jnp.int32)),
        layer_ok=layer_ok,
        base=base,
    )


def read_controls(call: Call) -> Controls:
    """Loads the scalars and lets the clock tick if the gate is open."""
    scalars = call.state.scalars
    gate = scalars[s.GATE]
    at_layer_0 = (call.layer[0] == 0).astype(jnp.int32)
    return Controls(
        clock=ck.tick((scalars[s.CLOCK_EPOCH], scalars[s.CLOCK]), gate),
        forwards=ck.tick((scalars[s.FORWARDS_EPOCH], scalars[s.FORWARDS]), gate * at_layer_0),
        gate=gate,
        error=scalars[s.ERROR],
    )


def read_rules(call: Call, controls: Controls) -> Rules:
    """Loads the rules of promotion. Only a step with a miss needs them."""
    scalars = call.state.scalars
    interval = scalars[s.PROMOTE_INTERVAL]
    in_turn = ck.remainder(controls.forwards, interval) == (interval > 1).astype(jnp.int32)
    limit = scalars[s.PROMOTE_LIMIT]
    protected = scalars[s.PROTECT_RECENT]
    return Rules(
        may_promote=(controls.gate != 0) & in_turn,
        limit=jnp.where(limit == 0, INT32_MAX, limit),
        min_misses=scalars[s.PROMOTE_MIN_MISSES],
        horizon=ck.minus_product(controls.clock, protected, call.config.num_layers),
    )


def write_scalars(call: Call, lanes: Lanes, controls: Controls) -> None:
    """Stores what the step changed. A barrier must stand between `read_controls` and this."""
    scalars = call.state.scalars
    scalars[s.CLOCK_EPOCH], scalars[s.CLOCK] = controls.clock
    scalars[s.FORWARDS_EPOCH], scalars[s.FORWARDS] = controls.forwards
    scalars[s.ERROR] = controls.error | lanes.any_invalid


def copy_layer_map(call: Call, lanes: Lanes) -> None:
    """Writes this layer's slice of `key_row` to the step map, where the plan has one."""
    if call.plan.step_map is None:
        return
    config = call.config
    tile = min(MAP_TILE, next_power_of_two(config.num_experts))
    for start in range(0, config.num_experts, tile):
        expert = start + lane_ids(tile)
        inside = expert < config.num_experts
        row = load(call.state.key_row, lanes.base + expert, inside & lanes.layer_ok, -1)
        store(call.plan.step_map, expert, row, inside)
