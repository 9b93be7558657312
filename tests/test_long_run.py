"""A long random run, compared on the device step by step: races between warps show only there.

Many pools at once, each with its own ids, controls and clock. The reference steps them all at once
under `vmap`; a kernel steps one after another, as it does in use, and is compared with the
reference in every field of plan and state after every step. What comes back of a step is one count
a field.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_pool as pp
import reference
from tests.support import EDGE, KERNELS, aged, assert_same

STEPS = int(os.environ.get("POOL_LONG_RUN_STEPS", "100000"))  # of each kernel, all pools together
POOLS = 64
TURNS = 128  # steps of each pool in one call of the device
IN_TURNS = "all in turns"  # The kernels on one state, in no order.
TABLES = ("key_row", "row_key", "row_used", "row_epoch", "miss_count", "scalars")

# A geometry, and whether its calls have weights.
GEOMETRIES = {
    "one row": (pp.PoolConfig(2, 5, (0, 1), 4, 4), False),
    "uneven": (pp.PoolConfig(3, 40, (11, 0, 30), 8, 8), True),
    "16 lanes": (pp.PoolConfig(5, 130, (20, 0, 130, 33, 50), 16, 16), False),
    "64 lanes": (pp.PoolConfig(2, 160, 70, 64, 64), True),
    "many rows": (pp.PoolConfig(6, 1100, 800, 32, 32), False),
    "256 lanes": (pp.PoolConfig(3, 700, 400, 256, 256), False),
}


def fields(plan, state):
    """Everything that the semantics name; what a kernel keeps for itself is left out."""
    named = {name: x for name, x in plan._asdict().items() if x is not None}
    return named | {name: getattr(state, name) for name in TABLES}


@functools.cache
def comparison(config, kernel):
    """(kernel's states, reference's states, layers, ids, weights) -> both states and, of each step
    and pool, unequal entries by field, promotions and staged experts."""
    steps = [functools.partial(pp.step, config, kernel=name) for name in KERNELS]

    def step(state, layer, ids, weights):
        if kernel != IN_TURNS:
            return pp.step(config, state, layer, ids, weights, kernel=kernel)
        return lax.switch(jnp.sum(ids) % len(steps), steps, state, layer, ids, weights)

    together = jax.vmap(functools.partial(reference.step, config))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(states, wanted, layers, ids, weights):
        def one_pool(_, x):
            return None, step(*x)

        def turn(carry, x):
            states, wanted = carry
            want = together(wanted, *x)
            _, got = lax.scan(one_pool, None, (states, *x))
            unequal = jax.tree.map(
                lambda a, b: jnp.sum((a != b).reshape(len(a), -1), 1, dtype=jnp.int32),
                fields(*got),
                fields(*want),
            )
            plan = want[0]
            return (got[1], want[1]), (unequal, plan.promoted_count, plan.staged_count)

        return lax.scan(turn, (states, wanted), (layers, ids, weights))

    return run


def random_controls(rng):
    return {
        "gate": int(rng.random() < 0.9),
        "promote_limit": int(rng.choice([0, 0, 0, 1, 5])),
        "promote_interval": int(rng.choice([1, 1, 2, 3])),
        "promote_min_misses": int(rng.choice([1, 1, 2, 4])),
        "protect_recent": int(rng.choice([0, 0, 1, 2])),
    }


def random_lanes(config, rng, turns, pools, with_weights):
    """Ids of popular experts that change slowly, distinct and not, padding, a few invalid lanes."""
    shape = (turns, pools, config.width)
    layers = (np.arange(turns)[:, None] + np.arange(pools)) % config.num_layers
    popular = config.num_experts * rng.random(shape) ** rng.choice([1, 2, 4], (1, pools, 1))
    drift = np.arange(turns)[:, None, None] // 16
    ids = (popular.astype(np.int64) + drift + 7 * layers[..., None]) % config.num_experts
    used = rng.integers(1, config.width + 1, (turns, pools, 1))
    ids = np.where(np.arange(config.width) < used, ids, -1)
    ids = np.where(rng.random(shape) < 1e-3, config.num_experts, ids)
    layers = np.where(rng.random(layers.shape) < 1e-3, config.num_layers, layers)
    weights = np.where(rng.random(shape) < 1e-3, np.nan, rng.random(shape)).astype(np.float32)
    return layers.astype(np.int32), ids.astype(np.int32), weights if with_weights else None


def stacked(states):
    return jax.tree.map(lambda *x: jnp.stack(x), *states)


def at(states, pool):
    return jax.tree.map(lambda x: x[pool], states)


def long_run(kernel, config, with_weights, steps, pools, turns):
    rng = np.random.default_rng(config.width)
    clocks = rng.choice([0, 0, EDGE - 50, 3 * EDGE - 50], pools).tolist()
    starts = []
    for clock in clocks:
        used = clock - rng.integers(0, min(clock, 40) + 1, config.rows)
        starts.append(aged(config, clock, clock // config.num_layers, used)[0])
    states, wanted = stacked(starts), stacked(starts)
    promoted = staged = 0
    for call in range(-(-steps // (pools * turns))):
        controls = [random_controls(rng) for _ in range(pools)]
        states, wanted = (
            stacked([pp.set_controls(at(x, i), **controls[i]) for i in range(pools)])
            for x in (states, wanted)
        )
        lanes = random_lanes(config, rng, turns, pools, with_weights)
        (states, wanted), results = comparison(config, kernel)(states, wanted, *lanes)
        unequal, *placed = jax.device_get(results)
        found = [(*np.argwhere(x)[0], name) for name, x in unequal.items() if x.any()]
        if found:
            turn, pool, name = min(found)
            raise AssertionError(
                f"{kernel}, call {call}, step {turn} of pool {pool}: {name} differs; the controls "
                f"are {controls[pool]}"
            )
        for pool in (0, pools - 1):
            mine, theirs = at(states, pool), at(wanted, pool)
            assert_same(pp.snapshot(config, mine), pp.snapshot(config, theirs), kernel)
            pp.check_state(config, pp.clear_error(mine))
        promoted, staged = promoted + placed[0].sum(), staged + placed[1].sum()
    assert promoted and staged, "a run without either tests little"


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kernel", [*KERNELS, IN_TURNS])
def test_long_run(kernel, geometry):
    config, with_weights = GEOMETRIES[geometry]
    long_run(kernel, config, with_weights, STEPS // len(GEOMETRIES), POOLS, TURNS)


@pytest.mark.parametrize("kernel", [*KERNELS, IN_TURNS])
def test_the_same_run_made_short(kernel):
    """On any device, so that the long run is known to work, and to find what differs."""
    config, with_weights = GEOMETRIES["uneven"]
    long_run(kernel, config, with_weights, steps=400, pools=4, turns=50)


def test_the_run_finds_a_difference(monkeypatch):
    config, with_weights = GEOMETRIES["uneven"]
    kernel = KERNELS[0]
    run = comparison(config, kernel)

    def broken(states, *rest):
        after, (unequal, *placed) = run(states, *rest)
        return after, (unequal | {"routes": unequal["routes"].at[7, 2].set(1)}, *placed)

    monkeypatch.setitem(globals(), "comparison", lambda *_: broken)
    with pytest.raises(AssertionError, match=f"{kernel}, call 0, step 7 of pool 2: routes differs"):
        long_run(kernel, config, with_weights, steps=100, pools=4, turns=50)
