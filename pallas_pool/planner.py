"""`step`: checks its arguments, picks a kernel, and makes the one pallas_call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.config import PoolConfig, check_lanes, check_layer
from pallas_pool.kernels import KERNELS
from pallas_pool.kernels.lanes import Call
from pallas_pool.state import (
    Plan,
    PoolState,
    check_geometry,
    check_is_state,
    plan_shapes,
    vary_alike,
)


def step(
    config: PoolConfig,
    state: PoolState,
    layer: Any,
    expert_ids: Any,
    weights: Any = None,
    *,
    kernel: str = "fused",
    interpret: bool | None = None,
) -> tuple[Plan, PoolState]:
    """Plans one decode step of one layer: which bank row serves each lane, what to copy in, what to evict.

    Pure, and usable under `jit`, in `lax.scan` and under `shard_map`. Where the caller donates the
    state, its arrays are updated in place and nothing is copied.

    Args:
      config: the geometry of the pool; static.
      state: the state from `init_state` or the step before, of that geometry.
      layer: the layer, an int in [0, L) or an integer scalar on the device. One out of range on the
        device makes every lane invalid.
      expert_ids: the experts that the router chose, integers of any dtype and shape, n of them
        flattened lane by lane; n <= W and n <= S. -1 is padding. Any other id outside [0, E) is
        invalid: it sets the sticky error and counts as padding.
      weights: optional router weights, float16, bfloat16, float32 or float64, n of them. A lane whose
        id is in range and whose weight is NaN, infinite or negative is invalid too.
      kernel: a name in `pallas_pool.KERNELS`. All give the same bits, and may take turns on a state.
      interpret: None compiles the kernel for a GPU and interprets it on any other device; True
        always interprets, False always compiles.

    Returns:
      The plan, and the state after the step.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, its value and what is allowed.
    """
    if not isinstance(config, PoolConfig):
        raise TypeError(f"config must be a PoolConfig, got {type(config).__name__}")
    check_is_state(state)
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    if interpret not in (None, True, False):
        raise TypeError(f"interpret must be None, True or False, got {interpret!r}")
    check_geometry(config, state)
    layer = check_layer(config, layer)
    ids, weights = check_lanes(config, expert_ids, weights)
    return _step(config, kernel, interpret, layer, ids, weights, state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(config, kernel, interpret, layer, ids, weights, state):
    if not ids.size:  # An array without elements is no operand of a kernel.
        ids, weights = jnp.full(1, -1, jnp.int32), None
    call = functools.partial(_call, config, kernel)
    if interpret is not None:
        return call(interpret, layer, ids, weights, state)
    return lax.platform_dependent(
        layer,
        ids,
        weights,
        state,
        cuda=functools.partial(call, False),
        default=functools.partial(call, True),
    )


def _call(config, kernel, interpret, layer, ids, weights, state) -> tuple[Plan, PoolState]:
    body, num_warps, scratch_words = KERNELS[kernel]
    layer, ids, weights, state = vary_alike((layer, ids, weights, state))
    shapes = plan_shapes(config)

    def planner(layer_ref, ids_ref, weights_ref, state_in, plan_refs, state_refs, scratch_ref):
        del state_in  # Aliased to state_refs, which hold the state before the step, then after it.
        refs = (layer_ref, ids_ref, weights_ref, state_refs, plan_refs, scratch_ref)
        body(Call(config, interpret, *refs))

    planner.__name__ = f"pool_step_{kernel}"
    varying = jax.typeof(layer).manual_axis_type

    def out(shape) -> Any:
        if shape is None:
            return None
        # A kernel's scalars are arrays of one element.
        return jax.ShapeDtypeStruct(shape or (1,), jnp.int32, manual_axis_type=varying)

    plan_out = Plan(*map(out, shapes.values()))
    state_out = jax.tree.map(lambda x: out(x.shape), state)
    words = scratch_words(config)
    scratch_out = out((words,)) if words else None
    first_in = 2 if weights is None else 3
    first_out, arrays = len(jax.tree.leaves(plan_out)), len(jax.tree.leaves(state))
    plan, state, _ = pl.pallas_call(
        planner,
        out_shape=(plan_out, state_out, scratch_out),
        input_output_aliases={first_in + i: first_out + i for i in range(arrays)},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps(config.width), num_stages=1),
        interpret=interpret,
        name=planner.__name__,
    )(layer.reshape(1), ids, weights, state)
    scalars = {name: getattr(plan, name).reshape(()) for name, shape in shapes.items() if shape == ()}
    return plan._replace(**scalars), state
