"""Donated state is updated in place: every array aliased from input to output, none copied."""

import re

import jax
import numpy as np
import pytest
from jaxlib.mlir import ir

import pallas_pool as pp
from bench.artifacts import CUSTOM_CALL
from tests.oracle import Oracle
from tests.support import KERNELS, assert_same, lower_for_cuda, plan_dict, step_function

# No two tables of the state, and no field of the plan, have the same shape.
CONFIG = pp.PoolConfig(num_layers=2, num_experts=50, rows_per_layer=11, staging_rows=9, width=8)
CALLS = 2


def chain(name):
    """Steps of layers 0 and 1, unrolled; returns their plans and the last state."""

    def run(state, ids):
        plans = []
        for call in range(CALLS):
            plan, state = step_function(name)(CONFIG, state, call, ids[call])
            plans.append(plan)
        return plans, state

    return run


def arguments():
    ids = np.array([[3, 40, 3, 41, -1, 0, 50, 10], [20, 20, 1, 2, 21, 22, 23, 24]], np.int32)
    return pp.init_state(CONFIG), ids


def operations(module):
    found = []
    module.operation.walk(lambda op: (found.append(op), ir.WalkResult.ADVANCE)[1])
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_lowered_for_cuda_every_array_is_aliased_and_nothing_else_touches_it(name):
    state, ids = arguments()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, ids))
    lowered = lower_for_cuda(chain(name), *shapes, donate_argnums=0)
    module = lowered.compiler_ir("stablehlo")
    arrays = len(jax.tree.leaves(state))

    main = next(op for op in module.body.operations if "main" in str(op.attributes["sym_name"]))
    aliased = [str(x) for x in main.attributes["arg_attrs"] if "tf.aliasing_output" in str(x)]
    assert len(aliased) == arrays

    calls = [
        op
        for op in operations(module)
        if op.name == "stablehlo.custom_call"
        and ir.StringAttr(op.attributes["call_target_name"]).value == CUSTOM_CALL
    ]
    assert calls
    for call in calls:
        aliases = str(call.attributes["output_operand_aliases"])
        assert aliases.count("operand_index") == arrays
    # A table of the state goes from call to call as it is.
    tables = {f"tensor<{'x'.join(map(str, x.shape))}xi32>" for x in jax.tree.leaves(state)}
    carriers = {"func.func", "func.call", "func.return", "stablehlo.custom_call"}
    for op in operations(module):
        # The choice of a platform, with the one branch that is left of it.
        is_chosen = op.name == "stablehlo.case" and len(op.regions) == 1
        if op.name not in carriers and not is_chosen:
            assert not tables & {str(result.type) for result in op.results}, op.name


@pytest.mark.parametrize("name", KERNELS)
def test_donated_arrays_are_reused(name):
    """Compiled for whatever device is here, interpreted or not."""
    state, ids = arguments()
    run = jax.jit(chain(name), donate_argnums=0)
    text = run.lower(state, ids).compile().as_text()
    header = text.splitlines()[0]
    assert header.count("may-alias") + header.count("must-alias") == len(jax.tree.leaves(state))
    plans, after = run(state, ids)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    oracle = Oracle.of(CONFIG)
    for layer in range(CALLS):
        assert_same(plan_dict(plans[layer]), oracle.step(layer, ids[layer]), f"layer {layer}")
    assert_same(pp.snapshot(CONFIG, after), oracle.snapshot())


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_for_the_gpu_no_array_is_copied(name):
    state, ids = arguments()
    text = jax.jit(chain(name), donate_argnums=0).lower(state, ids).compile().as_text()
    assert text.count(f'custom_call_target="{CUSTOM_CALL}"') == CALLS
    copies = re.findall(r"= s32\[([\d,]*)\]\S* copy\(", text)
    tables = {",".join(map(str, x.shape)) for x in jax.tree.leaves(state)}
    assert not tables & set(copies)
