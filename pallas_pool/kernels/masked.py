"""Kernel "masked": the staging suffix written by masked loads and stores over all lanes at once."""

from __future__ import annotations

import functools

from pallas_pool.config import PoolConfig
from pallas_pool.kernels.lanes import lane_ids, load, store
from pallas_pool.kernels.sequential import Staged, plan_step


def write_suffix(config: PoolConfig, staged: Staged) -> None:
    plan = staged.plan
    lane = lane_ids(config.width)
    is_staged = lane < staged.staged_count
    expert = load(plan.staged_expert, lane, is_staged, -1)
    row = load(plan.staged_row, lane, is_staged, -1)
    store(plan.copy_src, staged.promoted_count + lane, expert, is_staged)
    store(plan.copy_dst, staged.promoted_count + lane, row, is_staged)
    if config.step_map:
        store(plan.step_map, expert, row, is_staged)


kernel = functools.partial(plan_step, write_suffix)
