"""Body of the kernel that counts what a step of one layer did: one launch, where XLA would make four."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_pool.config import INT32_MAX
from pallas_pool.kernels.lanes import Ref, lane_ids, load, next_power_of_two, store

# Lanes that all lanes are compared with at once.
COMPARED = 32


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


def count_kernel(step: Step, lanes: int, counters: Ref) -> None:
    """Adds to the layer's counts; of one warp, so that no load waits for another warp's store.

    Args:
      lanes: n; the routes behind are not looked at.
      counters: [L * 8] in the order of [L, 4, 2]: calls, hits, promoted, staged; low and high word.
    """
    ids = lane_ids(next_power_of_two(lanes))
    route = load(step.routes, ids, ids < lanes, -1)

    def compare(i, seen):
        other = i * COMPARED + lane_ids(COMPARED)
        others = load(step.routes, other, other < lanes, -1)
        same = (route[:, None] == others[None, :]) & (other[None, :] < ids[:, None])
        return jnp.maximum(seen, jnp.max(same.astype(jnp.int32), axis=1))

    turns = jnp.int32(-(-lanes // COMPARED))
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
    store(counters, at, low & INT32_MAX, inside)
    store(counters, at + 1, high + (low < 0).astype(jnp.int32), inside)  # The sign bit is the carry.
