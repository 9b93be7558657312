"""Data that only the device sees: extreme ids and weights of every dtype, layers out of range."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_pool as pp
from tests.oracle import Oracle
from tests.support import (
    CONFIG,
    IMPLEMENTATIONS,
    KERNELS,
    MOST,
    aged,
    assert_same,
    check_all,
    one_step,
    plan_dict,
)

# 199 is the last expert: uint8 holds ids that are no experts.
WIDE = pp.PoolConfig(num_layers=2, num_experts=200, rows_per_layer=3, staging_rows=32, width=32)

IDS = {
    np.int16: [199, 200, 256, 2**15 - 1, -(2**15), -2],
    np.int32: [199, 200, 2**16 + 3, MOST, -(2**31), -2],
    np.uint8: [199, 200, 254, 255],
    np.uint32: [199, 200, 2**31, 2**31 + 3, 2**32 - 2, 2**32 - 1],
}


def extreme_weights(dtype):
    """Weights of invalid lanes, and of valid ones.

    NaN with any payload and sign, infinite or negative are invalid; minus zero and positive
    subnormals are not.
    """
    info, word = ml_dtypes.finfo(dtype), np.dtype(f"u{np.dtype(dtype).itemsize}")
    infinity, sign = int(np.array(np.inf, dtype).view(word)), 1 << (8 * word.itemsize - 1)
    payloads = [1, 1 << (info.nmant - 1), (1 << info.nmant) - 1]
    nans = [infinity | payload | s for payload in payloads for s in (0, sign)]
    nans = np.array(nans, word).view(dtype)
    bad = [np.inf, -np.inf, -info.smallest_subnormal, -info.tiny, -1.0, info.min]
    good = [0.0, -0.0, info.smallest_subnormal, info.tiny, info.max]
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN with a payload.
        assert np.isnan(nans).all()
        return np.concatenate([nans, np.array(bad, dtype)]), np.array(good, dtype)


@pytest.mark.parametrize(
    "id_dtype, weight_dtype",
    [
        (np.int32, np.float32),
        (np.int16, np.float16),
        (np.uint8, ml_dtypes.bfloat16),
        (np.uint32, None),
    ],
)
def test_extremes_of_every_dtype(id_dtype, weight_dtype):
    """The first lanes have extreme ids; the next are experts whose weights alone are bad; then good
    ones; and a lane of padding, where ids have a sign, with the worst of weights."""
    extremes, ids = IDS[id_dtype], list(range(25))
    bad, good = np.zeros(0), np.zeros(0)
    if weight_dtype is not None:
        bad, good = extreme_weights(weight_dtype)
        ids = list(range(len(bad) + len(good)))
    padding = [-1] if np.iinfo(id_dtype).min < 0 else []
    rest = WIDE.width - len(extremes) - len(ids) - len(padding)
    ids = np.array([*extremes, *padding, *ids, *[3] * rest], id_dtype)
    weights = None
    if weight_dtype is not None:
        worst = [np.array(np.nan, weight_dtype)] * len(padding)
        ones = [np.ones(n, weight_dtype) for n in (len(extremes), rest)]
        weights = np.concatenate([ones[0], worst, bad, good, ones[1]], dtype=weight_dtype)

    oracle, want = check_step(ids, weights)
    # By hand, which lanes are valid: 199, the experts less those of bad weights, and the rest.
    valid = np.ones(WIDE.width, bool)
    valid[1 : len(extremes) + len(padding) + len(bad)] = False
    assert np.array_equal(want["safe_ids"] >= 0, valid) and oracle.error == 1
    # Each lane alone, all others padding or a good expert: which of them set the error?
    for lane in range(WIDE.width - rest):
        others = np.full(WIDE.width, -1 if padding else 3, id_dtype)
        others[lane] = ids[lane]
        oracle, _ = check_step(
            others, weights if padding or weights is None else weights[[lane] * 32]
        )
        assert oracle.error == (not valid[lane] and int(ids[lane]) != -1)


def check_step(ids, weights):
    """One step of layer 1 by every implementation; returns the oracle and its plan."""
    oracle = Oracle.of(WIDE)
    want = oracle.step(1, ids, weights)
    for name in IMPLEMENTATIONS:
        plan, state = one_step(name, WIDE)(pp.init_state(WIDE), jnp.int32(1), ids, weights)
        assert_same(plan_dict(plan), want, name)
        assert_same(pp.snapshot(WIDE, state), oracle.snapshot(), name)
    return oracle, want


@pytest.mark.parametrize(
    "values",
    [
        np.array([3, 2**32 + 5, -(2**32) + 6, 2**32 - 1, -(2**32) - 1, 2**63 - 1, -(2**63)]),
        np.array([3, 2**32 + 5, 2**32 - 1, 2**64 - 1, 2**63], np.uint64),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_host_ids_of_64_bits_do_not_wrap(kernel, values):
    """Modulo 2**32, as JAX would take them without 64-bit types, they are experts or padding."""
    ids = np.full(WIDE.width, 3, values.dtype)
    ids[: len(values)] = values
    oracle = Oracle.of(WIDE)
    want = oracle.step(1, ids)
    assert want["safe_ids"][: len(values)].tolist() == [3] + [-1] * (len(values) - 1)
    assert oracle.error == 1
    plan, state = pp.step(WIDE, pp.init_state(WIDE), jnp.int32(1), ids, kernel=kernel)
    assert_same(plan_dict(plan), want, kernel)
    assert_same(pp.snapshot(WIDE, state), oracle.snapshot(), kernel)
    if values.dtype == np.int64:
        plan, _ = pp.step(WIDE, pp.init_state(WIDE), jnp.int32(1), ids.tolist(), kernel=kernel)
        assert_same(plan_dict(plan), want, "a list")


def test_an_invalid_lane_changes_nothing_but_the_error():
    """The step is that of -1 in its place: the state the same, the error aside."""
    rng = np.random.default_rng(0)
    shape = (72, 4)
    layers = np.arange(72) % 3
    ids = rng.integers(0, CONFIG.num_experts, shape, np.int32)
    bad = rng.random(shape) < 0.2
    invalid = np.where(bad, rng.choice([-2, 8, MOST, -(2**31)], shape), ids).astype(np.int32)
    state, oracle = aged(CONFIG, 0, 0)
    twin = oracle.copy()
    with_error = check_all(CONFIG, state, oracle, layers, invalid)
    without = check_all(CONFIG, state, twin, layers, np.where(bad, -1, ids).astype(np.int32))
    for name in IMPLEMENTATIONS:
        snapshot = pp.snapshot(CONFIG, with_error[name])
        assert snapshot["error"] == 1
        assert_same(snapshot | {"error": 0}, pp.snapshot(CONFIG, without[name]), name)


OUTSIDE = [-1, 3, MOST, -(2**31)]


@pytest.mark.parametrize("gate", [0, 1])
def test_a_traced_layer_out_of_range(gate):
    """Every lane is invalid, every table of the plan -1; the clock ticks, the forwards do not."""
    state, oracle = aged(CONFIG, 6, 2)
    oracle.set_controls(gate=gate)
    state = pp.set_controls(state, gate=gate)
    layers = np.array([0, *OUTSIDE, 1], np.int32)
    ids = np.array([[7, 0, 7, 1]] * len(layers), np.int32)
    before = oracle.snapshot()
    states = check_all(CONFIG, state, oracle, layers, ids)
    assert oracle.error == 1
    assert oracle.clock - before["clock"] == 6 * gate
    assert oracle.forwards - before["forwards"] == gate
    for name in IMPLEMENTATIONS:
        for layer in OUTSIDE:
            plan, _ = one_step(name, CONFIG)(states[name], jnp.int32(layer), ids[0], None)
            for field, array in plan_dict(plan).items():
                assert (array == (0 if field.endswith("count") else -1)).all(), field


def test_a_layer_out_of_range_is_no_error_where_all_is_padding():
    state, oracle = aged(CONFIG, 0, 0)
    check_all(CONFIG, state, oracle, np.array([-1, 3]), np.full((2, 4), -1, np.int32))
    assert oracle.error == 0 and oracle.clock == 2


@pytest.mark.parametrize("layer", [jnp.uint32(2**32 - 1), jnp.uint32(2**31), jnp.uint8(3)])
def test_unsigned_layers_out_of_range_do_not_wrap(layer):
    ids = np.array([7, 0, 7, 1], np.int32)
    want = Oracle.of(CONFIG).step(int(layer), ids)
    for name in IMPLEMENTATIONS:
        plan, state = one_step(name, CONFIG)(pp.init_state(CONFIG), layer, ids, None)
        assert_same(plan_dict(plan), want, name)
        assert pp.snapshot(CONFIG, state)["error"] == 1
