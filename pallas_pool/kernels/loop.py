"""Kernel "loop", the baseline: the staging suffix written by loops over the staged experts."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from pallas_pool.config import PoolConfig
from pallas_pool.kernels.sequential import Staged, plan_step


def write_suffix(config: PoolConfig, staged: Staged) -> None:
    plan = staged.plan

    def append_copy(i, carry):
        plan.copy_src[staged.promoted_count + i] = plan.staged_expert[i]
        plan.copy_dst[staged.promoted_count + i] = plan.staged_row[i]
        return carry

    def overlay(i, carry):
        plan.step_map[plan.staged_expert[i]] = plan.staged_row[i]
        return carry

    for body in (append_copy, overlay) if config.step_map else (append_copy,):
        lax.fori_loop(jnp.int32(0), staged.staged_count, body, jnp.int32(0))


kernel = functools.partial(plan_step, write_suffix)
