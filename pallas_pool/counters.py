"""Counters of a pool: what its layers hit, missed and copied, added up on the device."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.config import INT32_MAX, PoolConfig
from pallas_pool.experts import bit_width
from pallas_pool.kernels.count import Step, count_kernel, num_warps
from pallas_pool.state import Plan, vary_alike

if TYPE_CHECKING:
    from pallas_pool.pool import Pool

# What is counted, in the order of the counters' second axis. The rest follows: misses and copied rows
# are promotions + staged, bytes are rows times the bytes of an expert.
COUNTED = ("calls", "hits", "promotions", "staged")


def init_counters(config: PoolConfig) -> jax.Array:
    """Counters at zero, to count anew with `pool._replace(counters=pp.init_counters(config))`.

    Returns:
      int32 [L, 4, 2]: of each layer, calls, hits, promotions and staged experts, each in two words,
      `high * 2**31 + low`, both >= 0: no count runs over.
    """
    if not isinstance(config, PoolConfig):
        raise TypeError(f"config must be a PoolConfig, got {type(config).__name__}")
    return jnp.zeros((config.num_layers, len(COUNTED), 2), jnp.int32)


def count(counters: jax.Array | None, layer: jax.Array, counts: tuple[Any, ...]) -> jax.Array | None:
    """Adds what one call of a layer counted, in the order of `COUNTED`; None stays None.

    A layer out of range counts nowhere. Elementwise work on some words, and one update in place.
    """
    if counters is None:
        return None
    layers = counters.shape[0]
    inside = (layer >= 0) & (layer < layers)
    at = jnp.where(inside, layer, 0)
    more = jnp.stack([jnp.asarray(x, jnp.int32) for x in counts])
    old = jax.lax.dynamic_index_in_dim(counters, at, keepdims=False)
    low = old[:, 0] + jnp.where(inside, more, 0)
    carry = (low < 0).astype(jnp.int32)  # The sign bit of a sum of two words is its carry.
    new = jnp.stack([low & INT32_MAX, old[:, 1] + carry], axis=1)
    return jax.lax.dynamic_update_index_in_dim(counters, new, at, 0)


def count_step(
    counters: jax.Array | None, layer: jax.Array, plan: Plan, lanes: int, interpret: bool | None
) -> jax.Array | None:
    """Adds what a step of `lanes` lanes planned: one small kernel, the counters updated in place."""
    if counters is None:
        return None
    scalars = (plan.copy_count, plan.promoted_count, plan.staged_count)
    operands = Step(layer.reshape(1), plan.routes, *(x.reshape(1) for x in scalars)), counters.reshape(-1)
    call = functools.partial(_call, lanes)
    if interpret is None:
        counted = lax.platform_dependent(
            *operands, cuda=functools.partial(call, False), default=functools.partial(call, True)
        )
    else:
        counted = call(interpret, *operands)
    return counted.reshape(counters.shape)


def _call(lanes: int, interpret: bool, step: Step, counters: jax.Array) -> jax.Array:
    step, counters = vary_alike((step, counters))

    def pool_count(step, before, after):
        del before  # Aliased to `after`.
        count_kernel(step, lanes, interpret, after)

    varying = jax.typeof(counters).manual_axis_type
    return pl.pallas_call(
        pool_count,
        out_shape=jax.ShapeDtypeStruct(counters.shape, jnp.int32, manual_axis_type=varying),
        input_output_aliases={len(step): 0},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps(lanes), num_stages=1),
        interpret=interpret,
        name=pool_count.__name__,
    )(step, counters)


def read_counters(pool: Pool) -> dict[str, np.ndarray]:
    """What a pool counted since its counters were made, by layer. Waits for the device.

    An expert that several lanes of a call select counts once.

    Args:
      pool: made by `init_pool(..., counters=True)`. Pools stacked along leading axes, as for
        `shard_map`, give results with the same leading axes.

    Returns:
      A dict of int64 arrays [L]: calls (of `moe`), hits, misses, promotions, staged (misses =
      promotions + staged), and bytes_copied (from the host into the bank).

    Raises:
      TypeError: not a pool, or one without counters.
    """
    counters = getattr(pool, "counters", None)
    if counters is None:
        what = "a pool without counters" if hasattr(pool, "counters") else type(pool).__name__
        raise TypeError(
            f"pool must be a Pool that counts, got {what}; make it by init_pool(..., counters=True), or "
            "start counting with pool._replace(counters=pp.init_counters(config))"
        )
    words = np.asarray(counters).astype(np.int64)
    values = words[..., 1] * 2**31 + words[..., 0]
    read = {name: values[..., i] for i, name in enumerate(COUNTED)}
    misses = read["promotions"] + read["staged"]
    row_axis = words.ndim - 3  # 0, but for stacked pools.
    row_bits = sum(
        math.prod(leaf.shape[row_axis + 1 :]) * bit_width(leaf.dtype) for leaf in jax.tree.leaves(pool.bank)
    )
    return {
        "calls": read["calls"],
        "hits": read["hits"],
        "misses": misses,
        "promotions": read["promotions"],
        "staged": read["staged"],
        "bytes_copied": misses * -(-row_bits // 8),
    }


def counters_table(counters: Pool | dict[str, np.ndarray]) -> str:
    """A pool's counters as a table of text: a line a layer, and a last one for all of them.

    Args:
      counters: a pool, or what `read_counters` gave for one (of stacked pools, sum or pick one first).
    """
    read = counters if isinstance(counters, dict) else read_counters(counters)
    names = tuple(read)
    head = ("layer", *(name.replace("_", " ") for name in names), "hit rate")
    if read["calls"].ndim != 1:
        raise ValueError(
            f"counters must be those of one pool, arrays [L], got {list(read['calls'].shape)}; "
            "sum over the leading axes, or pick one pool"
        )
    total = {name: values.sum(keepdims=True) for name, values in read.items()}
    labelled = [(str(i), read, i) for i in range(len(read["calls"]))] + [("all", total, 0)]
    lines = [head]
    for label, values, i in labelled:
        selected = values["hits"][i] + values["misses"][i]
        rate = f"{values['hits'][i] / selected:.1%}" if selected else "-"
        lines.append((label, *(f"{values[name][i]:,}" for name in names), rate))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
