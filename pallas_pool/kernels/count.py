"""Body of the kernel that counts what a step of one layer did: one launch, where XLA would make four."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_pool.config import INT32_MAX
from pallas_pool.kernels.lanes import Ref, lane_ids, load, next_power_of_two, store

# Lanes that all lanes are compared with at once, at most, and the comparisons of a warp. More would not fit
# in registers: with 1024 lanes the compiler then takes minutes.
COMPARED = 32
PAIRS = 64 * COMPARED


class Step(NamedTuple):
    """What is counted of a step, refs.

    Attributes:
      layer: [1]; out of range nothing is counted.
      routes: [n or more] bank rows.
      copied, promoted, staged: [1]
    """

    layer: Ref
    routes: Ref
    copied: Ref
    promoted: Ref
    staged: Ref


def num_warps(lanes: int) -> int:
    """Warps of the one program."""
    return min(max(next_power_of_two(lanes) // 64, 1), 8)


def count_kernel(step: Step, lanes: int, interpret: bool, counters: Ref) -> None:
    """Adds to the layer's counts.

    Args:
      lanes: n; the routes behind are not looked at.
      interpret: whether the kernel is interpreted.
      counters: [L * 8] in the order of [L, 4, 2]: calls, hits, promoted, staged; low and high word.
    """
    ids = lane_ids(next_power_of_two(lanes))
    route = load(step.routes, ids, ids < lanes, -1)
    warps = num_warps(lanes)
    compared = min(COMPARED, PAIRS * warps // ids.size)

    def compare(i, seen):
        other = i * compared + lane_ids(compared)
        others = load(step.routes, other, other < lanes, -1)
        same = (route[:, None] == others[None, :]) & (other[None, :] < ids[:, None])
        return jnp.maximum(seen, jnp.max(same.astype(jnp.int32), axis=1))

    turns = jnp.int32(-(-lanes // compared))
    seen = lax.fori_loop(jnp.int32(0), turns, compare, jnp.zeros_like(ids))
    distinct = jnp.sum(((route >= 0) & (seen == 0)).astype(jnp.int32), dtype=jnp.int32)

    what = lane_ids(4)
    layer = step.layer[0]
    inside = (layer >= 0) & (layer < counters.shape[0] // 8) & (what >= 0)
    at = jnp.where(inside, layer, 0) * 8 + 2 * what
    low, high = load(counters, at, inside, 0), load(counters, at + 1, inside, 0)
    low += jnp.where(
        what == 0,
        1,
        jnp.where(
            what == 1, distinct - step.copied[0], jnp.where(what == 2, step.promoted[0], step.staged[0])
        ),
    )
    if warps > 1 and not interpret:
        plgpu.debug_barrier()  # Each warp has loaded the counts before any stores them.
    store(counters, at, low & INT32_MAX, inside)
    store(counters, at + 1, high + (low < 0).astype(jnp.int32), inside)  # The sign bit is the carry.
