"""What Pallas makes of the kernels for a GPU, read from the lowered program; no GPU is needed."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir

import pallas_pool as pp
from bench.artifacts import CUSTOM_CALL, planner_kernels, ttir_loops
from tests.support import CONFIG, KERNELS, lower_for_cuda

# The geometry of the figures, and the smallest and the largest of every size.
FIGURES = pp.PoolConfig(48, 512, 258, 64, 64)
GEOMETRIES = {
    "figures": FIGURES,
    "tiny": pp.PoolConfig(1, 2, 1, 1, 1),
    "small": CONFIG,
    "odd": pp.PoolConfig(3, 1023, (0, 1023, 77), 5, 16),
    "wide": pp.PoolConfig(4, 1100, 900, 256, 256),
    "widest": pp.PoolConfig(2, 2000, 1500, 1024, 1024),
    "large": pp.PoolConfig(128, 1024, 513, 16, 16),
    "most layers": pp.PoolConfig(32768, 4, 1, 8, 8),
}


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def lowered(config, kernel, lanes, id_dtype=jnp.int32, weight_dtype=None):
    """The custom calls of a step that is lowered for CUDA, by their targets."""
    step = functools.partial(pp.step, config, kernel=kernel)
    state = jax.eval_shape(lambda: pp.init_state(config))
    weights = None if weight_dtype is None else shape(weight_dtype, lanes)
    arguments = state, shape(jnp.int32), shape(id_dtype, lanes), weights
    return custom_calls(step, *arguments)


def custom_calls(function, *arguments):
    module = lower_for_cuda(function, *arguments).compiler_ir("stablehlo")
    targets = []

    def visit(op):
        if op.name == "stablehlo.custom_call":
            targets.append(ir.StringAttr(op.attributes["call_target_name"]).value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return targets


@pytest.mark.parametrize("step_map", [True, False])
def test_loop_has_the_suffix_loops_and_masked_has_none(step_map):
    """All else is shared: one loop more for the copy list, and one for the step map if any."""
    config = pp.PoolConfig(2, 24, 14, 8, 8, step_map)
    loop, masked = (
        ttir_loops(planner_kernels(config, kernel)[0].ttir) for kernel in ("loop", "masked")
    )
    assert loop - masked == 1 + step_map


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_is_one_kernel(kernel, geometry):
    config = GEOMETRIES[geometry]
    lanes = min(config.width, config.staging_rows)
    assert lowered(config, kernel, lanes) == [CUSTOM_CALL]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "id_dtype, weight_dtype",
    [
        (np.int16, np.float32),
        (np.uint8, np.float16),
        (np.uint32, ml_dtypes.bfloat16),
        (np.int64, np.float64),
    ],
)
def test_every_dtype_lowers_and_so_do_64_bit_types(kernel, id_dtype, weight_dtype):
    wide = np.dtype(id_dtype).itemsize == 8
    with jax.enable_x64(wide):
        assert lowered(CONFIG, kernel, 3, id_dtype, weight_dtype) == [CUSTOM_CALL]


@pytest.mark.parametrize("kernel", KERNELS)
def test_pools_side_by_side_are_one_kernel_too(kernel):
    step = jax.vmap(functools.partial(pp.step, CONFIG, kernel=kernel))
    state = jax.eval_shape(lambda: pp.init_state(CONFIG))
    states = jax.tree.map(lambda x: shape(x.dtype, 3, *x.shape), state)
    arguments = states, shape(jnp.int32, 3), shape(jnp.int32, 3, CONFIG.width)
    assert custom_calls(step, *arguments) == [CUSTOM_CALL]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_barriers_stand_in_the_compiled_kernel(kernel):
    """Interpreted there are none; compiled, stores must not overtake the loads of slower warps."""
    assert "barrier" in planner_kernels(CONFIG, kernel)[0].ttir
