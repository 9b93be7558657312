"""Kernel "masked": the staging suffix written by masked loads and stores over all lanes at once."""

from __future__ import annotations

import functools

import jax

from pallas_pool.kernels.lanes import Call, lane_ids, load, store
from pallas_pool.kernels.sequential import plan_step


def write_suffix(call: Call, promoted_count: jax.Array, staged_count: jax.Array) -> None:
    plan = call.plan
    lane = lane_ids(call.config.width)
    is_staged = lane < staged_count
    expert = load(plan.staged_expert, lane, is_staged, -1)
    row = load(plan.staged_row, lane, is_staged, -1)
    store(plan.copy_src, promoted_count + lane, expert, is_staged)
    store(plan.copy_dst, promoted_count + lane, row, is_staged)
    if plan.step_map is not None:
        store(plan.step_map, expert, row, is_staged)


kernel = functools.partial(plan_step, write_suffix)
