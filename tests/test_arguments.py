"""What `step` takes and refuses, at trace time, by every kernel and the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_pool as pp
from tests.support import IMPLEMENTATIONS, KERNELS, assert_same, one_step, plan_dict, step_function

CONFIG = pp.PoolConfig(num_layers=2, num_experts=8, rows_per_layer=3, staging_rows=6, width=8)
IDS = np.array([1, 5, 2, 6], np.int32)


@pytest.fixture(scope="module")
def state():
    return pp.init_state(CONFIG)


def results(name, *args):
    plan, state = one_step(name, CONFIG)(*args)
    return plan_dict(plan) | pp.snapshot(CONFIG, state)


REFUSED = [
    # layer, ids, weights
    ((-1, IDS), ValueError, r"layer must be in \[0, 1\], got -1"),
    ((2, IDS), ValueError, r"layer must be in \[0, 1\], got 2"),
    ((np.int64(2**32), IDS), ValueError, r"layer must be in \[0, 1\], got 4294967296"),
    ((1.0, IDS), TypeError, r"layer must be an int, got 1\.0 \(float\)"),
    ((True, IDS), TypeError, "layer must be an int, got the bool True"),
    ((None, IDS), TypeError, "layer must be an int, got None"),
    ((jnp.float32(1), IDS), TypeError, r"layer must be an integer scalar, got float32\[\]"),
    ((jnp.bool_(1), IDS), TypeError, r"layer must be an integer scalar, got bool\[\]"),
    ((jnp.zeros(1, int), IDS), TypeError, r"layer must be an integer scalar, got int32\[1\]"),
    ((0, IDS.astype(np.float32)), TypeError, "expert_ids must have an integer dtype, got float32"),
    ((0, [1.5]), TypeError, "expert_ids must have an integer dtype, got float32"),
    ((0, IDS > 2), TypeError, "expert_ids must have an integer dtype, got bool"),
    ((0, IDS + 1j), TypeError, "expert_ids must have an integer dtype, got complex64"),
    ((0, np.zeros(9, int)), ValueError, "expert_ids has 9 lanes, more than the width 8 of the"),
    ((0, np.zeros((3, 3), int)), ValueError, "expert_ids has 9 lanes, more than the width 8"),
    ((0, np.zeros(7, int)), ValueError, "expert_ids has 7 lanes, more than the 6 staging_rows"),
    ((0, IDS, np.ones(4, int)), TypeError, "weights must be float16, bfloat16, .* got int32"),
    ((0, IDS, [True] * 4), TypeError, "weights must be float16, bfloat16, .* got bool"),
    ((0, IDS, np.ones(4, ml_dtypes.float8_e5m2)), TypeError, "weights must be .* got float8_e5m2"),
    ((0, IDS, np.ones(3, np.float32)), ValueError, r"as many elements as expert_ids \(4\), got 3"),
    ((0, IDS, np.ones((4, 2), np.float32)), ValueError, r"as expert_ids \(4\), got 8"),
    ((0, IDS, 1.0), ValueError, r"as many elements as expert_ids \(4\), got 1"),
]


@pytest.mark.parametrize("args, error, message", REFUSED)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_refused(state, name, args, error, message):
    with pytest.raises(error, match=message):
        step_function(name)(CONFIG, state, *args)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_refused_under_jit(state, name):
    step = jax.jit(step_function(name), static_argnums=0)
    for ids, weights, error, message in (
        (np.zeros(9, np.int32), None, ValueError, "expert_ids has 9 lanes, more than the width 8"),
        (np.zeros(7, np.int32), None, ValueError, "more than the 6 staging_rows"),
        (IDS.astype(np.float16), None, TypeError, "must have an integer dtype, got float16"),
        (IDS, IDS, TypeError, "weights must be float16"),
        (IDS, np.ones(5, np.float32), ValueError, r"as expert_ids \(4\), got 5"),
    ):
        with pytest.raises(error, match=message):
            step(CONFIG, state, 0, ids, weights)


def test_wrong_types(state):
    with pytest.raises(TypeError, match="config must be a PoolConfig, got dict"):
        pp.step({}, state, 0, IDS)
    with pytest.raises(TypeError, match="state must be a PoolState, got NoneType"):
        pp.step(CONFIG, None, 0, IDS)
    with pytest.raises(TypeError, match="state must be a PoolState, got tuple"):
        pp.step(CONFIG, (pp.Plan, state), 0, IDS)
    with pytest.raises(TypeError, match="interpret must be None, True or False, got 'no'"):
        pp.step(CONFIG, state, 0, IDS, interpret="no")
    with pytest.raises(TypeError, match="positional"):
        pp.step(CONFIG, state, 0, IDS, None, "loop")


def test_an_unknown_kernel_is_refused_and_the_known_ones_named(state):
    with pytest.raises(ValueError, match=r"kernel must be one of .*, got 'triton'") as caught:
        pp.step(CONFIG, state, 0, IDS, kernel="triton")
    assert all(name in str(caught.value) for name in KERNELS)
    assert {"loop", "masked"} <= set(KERNELS)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_state_of_another_geometry_is_refused(state, name):
    other = pp.PoolConfig(2, 8, (3, 4), 6, 8)
    with pytest.raises(ValueError, match=r"state\.row_key must be int32\[13\] .*got int32\[12\]"):
        step_function(name)(other, state, 0, IDS)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_any_shape_is_flattened_lane_by_lane(state, name):
    weights = np.array([1.0, -1.0, 0.5, 2.0], np.float32)
    for weight in (None, weights):
        want = results(name, state, 1, IDS, weight)
        assert want["safe_ids"].tolist() == [1, 5 if weight is None else -1, 2, 6, -1, -1, -1, -1]
        for shape in ((2, 2), (4, 1), (1, 2, 2))[: 1 if name == "reference" else 3]:
            both = None if weight is None else weight.reshape(shape)
            assert_same(results(name, state, 1, IDS.reshape(shape), both), want, f"{shape}")
        if weight is not None:
            assert_same(results(name, state, 1, IDS.reshape(2, 2), weight), want, "shapes differ")


@pytest.mark.parametrize("name", KERNELS)
def test_lists_scalars_and_arrays_are_alike(state, name):
    want = results(name, state, 1, IDS)
    for ids in (IDS.tolist(), tuple(IDS.tolist()), jnp.asarray(IDS), IDS.astype(np.int64)):
        assert_same(results(name, state, np.int16(1), ids), want)
    assert_same(results(name, state, jnp.uint8(1), jnp.asarray(IDS)), want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_lanes_at_all(state, name):
    want = results(name, state, 0, np.full(4, -1, np.int32))
    none, no_weights = np.zeros((0, 4), np.int32), np.zeros(0, np.float32)
    assert_same(results(name, state, 0, none, no_weights), want)
    assert_same(results(name, state, 0, [], np.zeros((4, 0), np.float32)), want, "an empty list")


def test_a_plan_without_the_step_map():
    """Everything else is the same, for every implementation."""
    bare = dataclasses.replace(CONFIG, step_map=False)
    for name in IMPLEMENTATIONS:
        whole = bare_state = pp.set_controls(pp.init_state(CONFIG), promote_limit=1)
        for layer, ids in ((0, [7, 6, 0, 7]), (1, [1, 5, 4, -1]), (0, [2, 2, 6, 3])):
            ids = np.array(ids, np.int32)
            plan, whole = one_step(name, CONFIG)(whole, layer, ids)
            bare_plan, bare_state = one_step(name, bare)(bare_state, layer, ids)
            assert bare_plan.step_map is None
            want = plan_dict(plan)
            assert want["promoted_count"] and want["staged_count"]
            del want["step_map"]
            assert_same(plan_dict(bare_plan), want, name)
        assert_same(pp.snapshot(bare, bare_state), pp.snapshot(CONFIG, whole), name)
