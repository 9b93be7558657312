"""Garbage in: random bits as ids, weights, layers and controls, through all kernels on one state.

Every step draws a kernel and dtypes, and lanes of three kinds: random bits, the extremes of the
dtype and their neighbours, and plain experts. The oracle, which takes Python ints and floats, says
what must come out. How much is compiled depends on `DTYPES` alone, whatever the number of steps,
which POOL_FUZZ_STEPS sets.
"""

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_pool as pp
from pallas_pool import state as fields
from tests.invariants import Bank, check_step
from tests.support import EDGE, KERNELS, aged, assert_same, one_step, plan_dict
from tests.test_bad_data import WIDE

STEPS = int(os.environ.get("POOL_FUZZ_STEPS", "500"))

# The geometries and most dtypes are those of other tests: what is compiled there is not again.
CONFIG_64 = pp.PoolConfig(num_layers=2, num_experts=40, rows_per_layer=3, staging_rows=32, width=32)
# Of ids and weights, and the kernels that take them. Two pairs have one kernel each: they differ
# from the others in a cast alone, which all kernels share.
DTYPES = [
    (np.int32, np.float32, KERNELS),
    (np.int16, np.float16, KERNELS),
    (np.uint8, ml_dtypes.bfloat16, KERNELS),
    (np.uint32, None, KERNELS),
    (np.int8, np.float32, ("loop",)),
    (np.uint16, np.float16, ("masked",)),
]
DTYPES_64 = [
    (np.int64, np.float64, KERNELS),
    (np.uint64, np.float64, ("masked",)),
]


def bits(rng, dtype, size):
    """Random bits; of floats that is every payload of NaN, and subnormals."""
    return np.frombuffer(rng.bytes(size * np.dtype(dtype).itemsize), dtype)


def garbage_ints(rng, dtype, size, low, high):
    """[size] ints: random bits, the edges of the dtype and of [low, high), and values inside."""
    info = np.iinfo(dtype)
    edges = [info.min, info.max, 0, -1, low, high - 1, high, EDGE, 2 * EDGE, -EDGE]
    edges = [x + by for x in edges for by in (-1, 0, 1) if info.min <= x + by <= info.max]
    inside = rng.integers(low, min(high, info.max + 1), size, dtype)
    kind = rng.choice(3, size, p=rng.dirichlet([1, 1, 2]))
    return np.select(
        [kind == 0, kind == 1],
        [bits(rng, dtype, size), rng.choice(np.array(edges, dtype), size)],
        inside,
    )


def garbage_weights(rng, dtype, size):
    """[size] weights: random bits, every kind of special value with either sign, and good ones."""
    word, info = np.dtype(f"u{np.dtype(dtype).itemsize}"), ml_dtypes.finfo(dtype)
    infinity = np.array(np.inf, dtype).view(word)
    special = [0.0, 1.0, info.smallest_subnormal, info.tiny, info.max, np.inf]
    special = np.array([*special, *(-x for x in special)], dtype).view(word)
    # The least and the largest payload behind infinity's bits: both are NaN.
    special = np.append(special, [infinity + word.type(1), word.type(np.iinfo(word).max)])
    kind = rng.choice(3, size, p=rng.dirichlet([1, 1, 3]))
    good = rng.random(size).astype(dtype).view(word)
    drawn = [bits(rng, word, size), rng.choice(special.astype(word), size)]
    return np.select([kind == 0, kind == 1], drawn, good).view(dtype)


def garbage_controls(rng):
    """Some controls, each anywhere in its range, often at an end; and the same with one refused."""
    names = rng.permutation(list(fields.CONTROLS))[: rng.integers(1, 6)].tolist()
    good = {}
    for name in names:
        _, low, high = fields.CONTROLS[name]
        small, anywhere = rng.integers(low, min(high, 3) + 1), rng.integers(low, high + 1)
        good[name] = int(rng.choice([small, low, high, anywhere], p=[0.4, 0.4, 0.1, 0.1]))
    _, low, high = fields.CONTROLS[names[0]]
    outside = [low - 1, high + 1, -EDGE, 2**63, 2**70, -(2**64), float(low), np.nan, 1j, "1", [1]]
    return good, good | {names[0]: outside[rng.integers(len(outside))]}


def fuzz(config, dtypes, seed, steps, clock):
    rng = np.random.default_rng(seed)
    used = clock - rng.integers(0, min(clock, 5) + 1, config.rows)
    state, oracle = aged(config, clock, clock // 2, used)
    before = oracle.snapshot()
    bank = Bank(config, before, seed)
    seen = dict.fromkeys(("promoted_count", "staged_count"), 0)
    for t in range(steps):
        if rng.random() < 0.05:
            good, bad = garbage_controls(rng)
            with pytest.raises((TypeError, ValueError)):
                pp.set_controls(state, **bad)
            state = pp.set_controls(state, **good)
            oracle.set_controls(**good)
        id_dtype, weight_dtype, kernels = dtypes[rng.integers(len(dtypes))]
        kernel = kernels[rng.integers(len(kernels))]
        ids = garbage_ints(rng, id_dtype, config.width, 0, config.num_experts)
        # Few experts, so that they come again, and padding where the dtype has a sign.
        ids = np.where(rng.random(ids.shape) < rng.choice([0, 0.5, 0.9]), ids % 8, ids)
        padding = np.array(-1 if np.iinfo(id_dtype).min < 0 else ids[0]).astype(id_dtype)
        ids = np.where(rng.random(ids.shape) < rng.choice([0, 0.2, 0.95]), padding, ids)
        ids = ids.astype(id_dtype)
        weights = None
        if weight_dtype is not None:
            weights = garbage_weights(rng, weight_dtype, config.width)
        layer_type = [np.int8, np.int32, np.uint8, np.uint32, id_dtype][rng.integers(5)]
        layer = jnp.asarray(garbage_ints(rng, layer_type, 1, 0, config.num_layers)[0])
        assert layer.dtype == layer_type

        where = f"seed {seed}, step {t}, {kernel}, layer {layer!r}, {id_dtype.__name__}"
        with np.errstate(invalid="ignore"):  # The oracle makes floats of NaN with any payload.
            want = oracle.step(int(layer), ids, weights)
        after = oracle.snapshot()
        # Host arrays of 64 bits would be clipped before the kernel sees them.
        ids = jnp.asarray(ids)
        plan, state = one_step(kernel, config)(state, layer, ids, weights)
        assert_same(plan_dict(plan), want, where)
        assert_same(pp.snapshot(config, state), after, where)
        if 0 <= int(layer) < config.num_layers:
            check_step(config, before, int(layer), want, after, bank)
        if t % 50 == 0 or t == steps - 1:
            pp.check_state(config, pp.clear_error(state))
        before = after
        for name in seen:
            seen[name] += want[name]
    return oracle, seen


def assert_eventful(oracle, seen):
    """It promoted, staged, had invalid lanes, and took the clock past an edge of its words."""
    assert seen["promoted_count"] > STEPS // 10 and seen["staged_count"] > STEPS
    assert oracle.error == 1
    assert oracle.clock < STEPS or oracle.clock % EDGE < STEPS


@pytest.mark.parametrize("edge", [0, 1, 3])
def test_garbage_through_all_kernels(edge):
    clock = max(0, edge * EDGE - STEPS // 8)
    assert_eventful(*fuzz(WIDE, DTYPES, edge, STEPS, clock))


def test_garbage_of_64_bits():
    with jax.enable_x64(True):
        assert_eventful(*fuzz(CONFIG_64, DTYPES_64, 64, STEPS, EDGE - STEPS // 8))


def test_the_stream_has_all_kinds_of_lanes():
    """Or the fuzz would prove little."""
    rng = np.random.default_rng(0)
    for id_dtype, weight_dtype, _ in DTYPES + DTYPES_64:
        ids = np.concatenate(
            [garbage_ints(rng, id_dtype, 64, 0, WIDE.num_experts) for _ in range(100)]
        )
        info = np.iinfo(id_dtype)
        assert {info.min, info.max, 0, min(WIDE.num_experts - 1, info.max)} <= set(ids.tolist())
        if weight_dtype is None:
            continue
        weights = np.concatenate([garbage_weights(rng, weight_dtype, 64) for _ in range(100)])
        with np.errstate(invalid="ignore"):
            wide = weights.astype(np.float64)
        assert len(set(weights[np.isnan(wide)].tobytes())) > 3
        assert {np.inf, -np.inf, 0.0} <= set(wide.tolist())
        assert np.signbit(wide[wide == 0]).any() and (wide < 0).any()
        subnormal = (wide > 0) & (wide < float(ml_dtypes.finfo(weight_dtype).tiny))
        assert subnormal.any()
