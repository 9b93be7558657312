"""`step` under `jit`, `scan` over layers and `vmap` over pools; pure, interpreted, in turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_pool as pp
from tests.oracle import Oracle
from tests.support import (
    CONFIG,
    IMPLEMENTATIONS,
    KERNELS,
    assert_same,
    one_step,
    plan_dict,
    step_function,
)

LAYERS = CONFIG.num_layers


def forward_ids(seed):
    """[L, W] ids of one forward."""
    rng = np.random.default_rng(seed)
    return rng.integers(-1, CONFIG.num_experts, (LAYERS, CONFIG.width), np.int32)


def expected(forwards):
    oracle = Oracle.of(CONFIG)
    plans = [[oracle.step(layer, ids[layer]) for layer in range(LAYERS)] for ids in forwards]
    return plans, oracle.snapshot()


def plan_at(plans, index):
    return plan_dict(jax.tree.map(lambda x: x[index], plans))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_pure(name):
    """The state handed in stays as it was, and the same step again gives the same."""
    state = pp.init_state(CONFIG)
    before = pp.snapshot(CONFIG, state)
    ids = np.array([7, 6, 0, 9], np.int32)
    first = one_step(name, CONFIG)(state, jnp.int32(0), ids)
    again = one_step(name, CONFIG)(state, jnp.int32(0), ids)
    assert_same(pp.snapshot(CONFIG, state), before)
    assert_same(plan_dict(first[0]), plan_dict(again[0]))
    assert_same(pp.snapshot(CONFIG, first[1]), pp.snapshot(CONFIG, again[1]))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_scan_over_layers(name):
    """A forward is a scan over its layers, with a traced layer."""

    @jax.jit
    def forward(state, ids):
        def body(state, x):
            plan, state = step_function(name)(CONFIG, state, *x)
            return state, plan

        return lax.scan(body, state, (jnp.arange(LAYERS), ids))

    forwards = [forward_ids(seed) for seed in range(4)]
    plans, snapshot = expected(forwards)
    state = pp.init_state(CONFIG)
    for ids, want in zip(forwards, plans, strict=True):
        state, got = forward(state, ids)
        for layer in range(LAYERS):
            assert_same(plan_at(got, layer), want[layer], f"layer {layer}")
    assert_same(pp.snapshot(CONFIG, state), snapshot)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_vmap_over_pools(name):
    """Pools side by side, each with its own layer and ids, are as good as alone."""
    pools, steps = 3, 5
    rng = np.random.default_rng(1)
    layers = rng.integers(0, LAYERS, (steps, pools), np.int32)
    ids = rng.integers(-2, CONFIG.num_experts + 1, (steps, pools, CONFIG.width), np.int32)
    one = functools.partial(step_function(name), CONFIG)
    batched = jax.jit(jax.vmap(one))
    states = jax.tree.map(lambda x: jnp.stack([x] * pools), pp.init_state(CONFIG))
    oracles = [Oracle.of(CONFIG) for _ in range(pools)]
    for t in range(steps):
        plans, states = batched(states, layers[t], ids[t])
        for pool, oracle in enumerate(oracles):
            want = oracle.step(int(layers[t, pool]), ids[t, pool])
            assert_same(plan_at(plans, pool), want, f"pool {pool}, step {t}")
    for pool, oracle in enumerate(oracles):
        state = jax.tree.map(lambda x, pool=pool: x[pool], states)
        assert_same(pp.snapshot(CONFIG, state), oracle.snapshot(), f"pool {pool}")


@pytest.mark.parametrize("name", KERNELS)
def test_interpreted_explicitly(name):
    """`interpret=True` gives the same bits, on a GPU too."""
    step = jax.jit(functools.partial(step_function(name, interpret=True), CONFIG))
    forwards = [forward_ids(seed) for seed in range(2)]
    plans, snapshot = expected(forwards)
    state = pp.init_state(CONFIG)
    for ids, want in zip(forwards, plans, strict=True):
        for layer in range(LAYERS):
            plan, state = step(state, jnp.int32(layer), ids[layer])
            assert_same(plan_dict(plan), want[layer])
    assert_same(pp.snapshot(CONFIG, state), snapshot)


def test_kernels_take_turns_on_one_state():
    """Any kernel, and the reference, goes on with the state that another left."""
    config = CONFIG
    oracle, state = Oracle.of(config), pp.init_state(config)
    rng = np.random.default_rng(8)
    for t in range(240):
        if t % 40 == 0:
            controls = {
                "promote_limit": int(rng.integers(3)),
                "protect_recent": int(rng.integers(2)),
            }
            controls["gate"] = int(rng.random() < 0.8)
            oracle.set_controls(**controls)
            state = pp.set_controls(state, **controls)
        layer = int(rng.integers(LAYERS))
        ids = (config.num_experts * rng.random(config.width) ** 2).astype(np.int32)
        name = IMPLEMENTATIONS[rng.integers(len(IMPLEMENTATIONS))]
        want = oracle.step(layer, ids)
        plan, state = one_step(name, config)(state, jnp.int32(layer), ids)
        assert_same(plan_dict(plan), want, f"{name}, step {t}")
        assert_same(pp.snapshot(config, state), oracle.snapshot(), f"{name}, step {t}")
    pp.check_state(config, state)
