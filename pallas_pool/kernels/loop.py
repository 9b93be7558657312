"""Kernel "loop", the baseline: the staging suffix written by loops over the staged experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_pool.kernels.lanes import Call
from pallas_pool.kernels.sequential import plan_step


def write_suffix(call: Call, promoted_count: jax.Array, staged_count: jax.Array) -> None:
    plan = call.plan

    def append_copy(i, carry):
        plan.copy_src[promoted_count + i] = plan.staged_expert[i]
        plan.copy_dst[promoted_count + i] = plan.staged_row[i]
        return carry

    def overlay(i, carry):
        plan.step_map[plan.staged_expert[i]] = plan.staged_row[i]
        return carry

    for body in (append_copy,) if plan.step_map is None else (append_copy, overlay):
        lax.fori_loop(jnp.int32(0), staged_count, body, jnp.int32(0))


kernel = functools.partial(plan_step, write_suffix)
