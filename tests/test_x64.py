"""The same bits with 64-bit types on, and ids, layers and weights of 64 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_pool as pp
from bench.correctness import comparisons, difference, expected_of
from bench.implementations import IMPLEMENTATIONS as ALL
from tests.oracle import Oracle
from tests.support import (
    CONFIG,
    EDGE,
    IMPLEMENTATIONS,
    MOST,
    aged,
    assert_same,
    check_all,
    one_step,
    plan_dict,
    step_function,
)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


COMPARISONS = {comparison.name: comparison for comparison in comparisons()}
expected = functools.cache(lambda name: expected_of(COMPARISONS[name]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_111_comparisons(implementation):
    assert len(COMPARISONS) == 111
    for name, comparison in COMPARISONS.items():
        found = difference(comparison, ALL[implementation], expected(name))
        assert found is None, found


def test_across_the_edge_of_the_clock():
    rng = np.random.default_rng(3)
    clock = 2 * EDGE - 30
    state, oracle = aged(CONFIG, clock, 70, clock - rng.integers(0, 4, CONFIG.rows))
    controls = {"protect_recent": 1, "promote_min_misses": 2, "promote_interval": 2}
    oracle.set_controls(**controls)
    layers = np.arange(96) % CONFIG.num_layers
    ids = rng.integers(-2, CONFIG.num_experts + 1, (96, CONFIG.width), np.int32)
    states = check_all(CONFIG, pp.set_controls(state, **controls), oracle, layers, ids)
    for state in states.values():
        assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(state))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_ids_and_weights_of_64_bits(name):
    """Ids that alias experts or padding modulo 2**32 are invalid; weights are judged in 64 bits."""
    config = pp.PoolConfig(2, 40, 3, 32, 32)
    extremes = [2**32 + 5, -(2**32) + 6, 2**32 - 1, -(2**32) - 1, 2**63 - 1, -(2**63), EDGE, -2]
    info = np.finfo(np.float64)
    bad = [np.nan, -np.nan, np.inf, -np.inf, -1.0, -info.smallest_subnormal, -1e-300, info.min]
    good = [0.0, -0.0, info.smallest_subnormal, 1e-300, 1e300, info.max]
    ids = np.array([*extremes, *range(14), -1, *[3] * 9], np.int64)
    weights = np.array([1.0] * 8 + bad + good + [np.nan] + [1.0] * 9)
    oracle = Oracle.of(config)
    want = oracle.step(1, ids, weights)
    valid = [-1] * 16 + list(range(8, 14)) + [-1] + [3] * 9
    assert want["safe_ids"].tolist() == valid and oracle.error == 1
    ids, weights = jnp.asarray(ids), jnp.asarray(weights)
    assert ids.dtype == jnp.int64 and weights.dtype == jnp.float64
    plan, state = one_step(name, config)(pp.init_state(config), 1, ids, weights)
    assert_same(plan_dict(plan), want)
    assert_same(pp.snapshot(config, state), oracle.snapshot())
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves((plan, state)))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_layers_of_64_bits(name):
    """A scan over traced int64 layers, some of which alias layers modulo 2**32."""
    layers = [0, 1, 2, EDGE * 2, EDGE * 2 + 1, -EDGE * 2, 2**63 - 1, -(2**63), MOST, 2]
    ids = np.array([[7, 0, 3, -1]] * len(layers))
    oracle = Oracle.of(CONFIG)
    want = [oracle.step(layer, ids[0]) for layer in layers]

    @jax.jit
    def run(state, layers, ids):
        def body(state, x):
            plan, state = step_function(name)(CONFIG, state, *x)
            return state, plan

        return lax.scan(body, state, (layers, ids))

    state, plans = run(pp.init_state(CONFIG), jnp.asarray(layers), jnp.asarray(ids))
    for t in range(len(layers)):
        assert_same(plan_dict(jax.tree.map(lambda x, t=t: x[t], plans)), want[t], f"step {t}")
    assert_same(pp.snapshot(CONFIG, state), oracle.snapshot())


def test_controls_and_state_stay_int32():
    state = pp.clear_error(pp.set_controls(pp.init_state(CONFIG), protect_recent=MOST, gate=True))
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(state))
    assert pp.controls(state)["protect_recent"] == MOST
    pp.check_state(CONFIG, state)
