"""`moe`: the experts of one layer for any number of tokens, from a pool."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_pool.config import PoolConfig, check_ids, check_layer, check_weights
from pallas_pool.copy_rows import copy_rows
from pallas_pool.counters import COUNTED, count_step
from pallas_pool.expert_ffn import check_options, expert_ffn
from pallas_pool.experts import check_experts
from pallas_pool.kernels import KERNELS
from pallas_pool.planner import step
from pallas_pool.pool import Pool
from pallas_pool.prefill import prefill
from pallas_pool.state import PoolState, check_geometry

PATHS = ("auto", "decode", "prefill")


def moe(
    config: PoolConfig,
    pool: Pool,
    experts: Any,
    layer: Any,
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    kernel: str = "fused",
    path: str = "auto",
    prefill_updates: bool = False,
    interpret: bool | None = None,
) -> tuple[jax.Array, Pool]:
    """Runs the chosen experts of one layer: plans, copies what is missing from the host, and computes.

    Up to W lanes, and S, go by the *decode* path: `step`, `copy_rows`, `expert_ffn`. More go by the
    *prefill* path: experts that are resident are used where they are, the other selected ones are streamed
    through the staging rows in blocks, each once, whatever the number of lanes that select it. Both give
    the same result up to rounding; and the result of either does not depend, bit for bit, on which experts
    are resident.

    Pure; usable under `jit`, in `lax.scan` over layers and under `shard_map`. Donate the pool, and its
    bank and tables are updated in place.

    Args:
      config: the geometry of the pool; static.
      pool: from `init_pool`, or the call before.
      experts: the pytree of arrays [L, E, ...] in host memory that the pool was made of, or the sequence of L
        pytrees [E, ...], which needs a `layer` that is an int. The leaves are those that `expert_ffn` reads.
      layer: the layer, an int in [0, L) or an integer scalar on the device.
      x: [..., d] hidden states; float32, bfloat16 or float16.
      expert_ids: [..., k] integers: the experts that the router chose for each token. -1 is padding. Any
        other id outside [0, E) is invalid: it sets the sticky error and counts as padding.
      weights: [..., k] router weights, floats. One that is NaN, infinite or negative makes its lane
        invalid. Lanes that are padding or invalid contribute nothing.
      activation: as for `expert_ffn`.
      kernel: of the planner, a name in `pallas_pool.KERNELS`.
      path: "auto", or "decode" or "prefill" to insist on one. "decode" refuses more lanes than it has
        staging rows for.
      prefill_updates: False: the prefill path leaves placement, clock and miss counts alone. True: it plans
        as decoding does: the selected experts, in the order of their first lane, go through `step` in
        blocks of min(W, S, E), so that they may be promoted, gate and controls permitting; each block is a
        step to the clock. The decode path always does.
      interpret: None compiles the kernels for a GPU and interprets them on any other device; True always
        interprets, False always compiles.

    Returns:
      y: [..., d] in the dtype of `x`: for each token the sum over its experts of weight times FFN.
      The pool after the call.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, its value and what is allowed.
    """
    _check_static(config, pool, kernel, path, prefill_updates)
    activation = check_options(activation, interpret)
    shapes = check_experts(config, experts)
    _check_bank(config, shapes, pool)
    check_geometry(config, pool.state)
    x, ids, weights = _check_tokens(x, expert_ids, weights)
    top_k, d = ids.shape[-1], x.shape[-1]
    most = min(config.width, config.staging_rows)
    if not 1 <= top_k <= most:
        raise ValueError(
            f"expert_ids has top_k={top_k} experts a token, and the config has width={config.width}, "
            f"staging_rows={config.staging_rows}: both must be at least top_k, for every expert of a token "
            "may be missing at once; make the config with more, PoolConfig.from_budget does"
        )
    tokens = math.prod(x.shape[:-1])
    flat = (x.reshape(tokens, d), ids.reshape(tokens, top_k), weights.reshape(tokens, top_k))
    if not tokens:
        return x, pool
    if path == "decode" and ids.size > most:
        raise ValueError(
            f'path="decode" takes at most {most} lanes, the smaller of width={config.width} and '
            f"staging_rows={config.staging_rows}, got {ids.size} in expert_ids; by the prefill path "
            'path="auto" takes more, or make the config for more tokens'
        )
    by_decode = path == "decode" or (path == "auto" and ids.size <= most)
    run = _decode if by_decode else functools.partial(prefill, updates=prefill_updates)
    options: dict[str, Any] = {"activation": activation, "kernel": kernel, "interpret": interpret}
    y, pool = run(config, pool, experts, layer, *flat, **options)
    return y.reshape(x.shape), pool


def _decode(config, pool, experts, layer, x, ids, weights, *, activation, kernel, interpret):
    plan, state = step(config, pool.state, layer, ids, weights, kernel=kernel, interpret=interpret)
    bank = copy_rows(pool.bank, experts, layer, plan, interpret=interpret)
    y = expert_ffn(x, bank, plan.routes, weights, activation=activation, interpret=interpret)
    counters = count_step(pool.counters, check_layer(config, layer), plan, ids.size, interpret)
    return y, Pool(state, bank, counters)


def _check_static(config, pool, kernel, path, prefill_updates):
    if not isinstance(config, PoolConfig):
        raise TypeError(f"config must be a PoolConfig, got {type(config).__name__}")
    if not isinstance(pool, Pool):
        raise TypeError(f"pool must be a Pool, as init_pool makes it, got {type(pool).__name__}")
    if not isinstance(pool.state, PoolState):
        raise TypeError(f"pool.state must be a PoolState, got {type(pool.state).__name__}")
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")
    if not isinstance(prefill_updates, bool):
        raise TypeError(f"prefill_updates must be True or False, got {prefill_updates!r}")
    shape = (config.num_layers, len(COUNTED), 2)
    counters = pool.counters
    if counters is not None and _differs(counters, shape, jnp.int32):
        raise ValueError(
            f"pool.counters must be int32{list(shape)} for this config, as init_counters(config) makes it, "
            f"got {_summary(counters)}"
        )


def _check_bank(config, shapes, pool):
    leaves, tree = jax.tree.flatten(pool.bank)
    if tree != shapes.tree:
        raise ValueError(
            f"pool.bank has the structure {tree}, but a layer of experts has {shapes.tree}: give the experts "
            "that init_pool was given"
        )
    for leaf, row in zip(leaves, shapes.rows, strict=True):
        shape = (config.bank_rows, *row.shape)
        if _differs(leaf, shape, row.dtype):
            raise ValueError(
                f"pool.bank{row.name} must be {row.dtype}{list(shape)} for these experts and this config, "
                f"got {_summary(leaf)}: make the pool by init_pool(config, experts)"
            )


def _differs(array, shape, dtype):
    return getattr(array, "shape", None) != shape or array.dtype != dtype


def _summary(array):
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "shape") else type(array).__name__


def _check_tokens(x, expert_ids, weights):
    x = jnp.asarray(x)
    ids, weights = check_ids(expert_ids), check_weights(weights)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if not x.ndim or not ids.ndim or ids.shape[:-1] != x.shape[:-1] or weights.shape != ids.shape:
        raise ValueError(
            "x, expert_ids and weights must be [..., d], [..., k] and [..., k] with the same leading axes, "
            f"got {list(x.shape)}, {list(ids.shape)} and {list(weights.shape)}"
        )
    return x, ids, weights
