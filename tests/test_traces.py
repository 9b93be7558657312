"""Routing of real models, replayed: the counts of the traces' README; and a generated trace."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_pool as pp
from tests.oracle import Oracle
from tests.support import IMPLEMENTATIONS, KERNELS, assert_same, step_function

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
EXPERTS = 128
LIMITED = {"promote_limit": 1, "promote_min_misses": 2, "protect_recent": 1}

# Trace, rows a layer, controls -> selections, hits, promotions, staged; from the traces' README.
COUNTS = [
    ("qwen3-30b-a3b", 16, {}, (44766, 25610, 19156, 0)),
    ("qwen3-30b-a3b", 32, {}, (44766, 35454, 9312, 0)),
    ("qwen3-30b-a3b", 64, {}, (44766, 41779, 2987, 0)),
    ("gpt-oss-120b", 16, {}, (10560, 6386, 4174, 0)),
    ("gpt-oss-120b", 64, {}, (10560, 8927, 1633, 0)),
    ("qwen3-30b-a3b", 32, LIMITED, (44766, 33948, 3695, 7123)),
]


def recorded(name):
    path = TRACES / f"{name}.npy"
    if not path.exists():
        pytest.skip(f"no recorded traces at {TRACES}")
    return np.load(path)


def geometry(trace, rows):
    lanes = trace.shape[2]
    width = 1 << (lanes - 1).bit_length()
    return pp.PoolConfig(trace.shape[1], EXPERTS, rows, width, width)


@functools.cache
def replayer(name, config):
    """(state, trace) -> state, and [selections, hits, promotions, staged] of each layer step."""

    @jax.jit
    def replay(state, trace):
        tokens, layers, lanes = trace.shape

        def body(state, x):
            plan, state = step_function(name)(config, state, *x)
            selected = jnp.sum(plan.safe_ids >= 0)
            counts = (selected, selected - plan.copy_count, plan.promoted_count, plan.staged_count)
            return state, jnp.stack(counts)

        layer = jnp.tile(jnp.arange(layers, dtype=jnp.int32), tokens)
        return lax.scan(body, state, (layer, trace.reshape(-1, lanes)))

    return replay


def check_counts(implementation, trace, rows, controls, want):
    config = geometry(trace, rows)
    state = pp.set_controls(pp.init_state(config), **controls)
    state, counts = replayer(implementation, config)(state, trace)
    assert tuple(np.asarray(counts).sum(0).tolist()) == want
    pp.check_state(config, state)
    return state


@pytest.mark.parametrize("name, rows, controls, want", COUNTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_counts(kernel, name, rows, controls, want):
    check_counts(kernel, recorded(name), rows, controls, want)


@pytest.mark.parametrize("name, rows, controls, want", [COUNTS[3], COUNTS[5]])
def test_recorded_counts_of_the_reference_and_states_equal(name, rows, controls, want):
    trace = recorded(name)
    config = geometry(trace, rows)
    state = pp.snapshot(config, check_counts("reference", trace, rows, controls, want))
    for kernel in KERNELS:
        other = check_counts(kernel, trace, rows, controls, want)
        assert_same(pp.snapshot(config, other), state, kernel)


def generated(seed, tokens, layers, lanes):
    """A trace with temporal locality: a token keeps most of the experts of the one before it, and
    draws new ones from a few popular ones; some layers route nothing for some tokens."""
    rng = np.random.default_rng(seed)
    popular = np.stack([rng.permutation(EXPERTS) for _ in range(layers)])
    trace = np.empty((tokens, layers, lanes), np.int16)
    now = popular[:, :lanes].copy()
    for token in range(tokens):
        for layer in range(layers):
            for lane in np.flatnonzero(rng.random(lanes) < 0.3):
                others = np.setdiff1d(popular[layer], now[layer], assume_unique=True)
                rank = int(len(others) * rng.random() ** 3)
                now[layer, lane] = others[rank]
        trace[token] = np.where(rng.random((layers, 1)) < 0.02, -1, now)
    return trace


@pytest.mark.parametrize(
    "controls", [{}, LIMITED | {"promote_interval": 3}], ids=("defaults", "limited")
)
def test_generated_trace(controls):
    trace = generated(seed=5, tokens=60, layers=6, lanes=4)
    config = geometry(trace, 20)
    oracle = Oracle.of(config)
    oracle.set_controls(**controls)
    want = []
    for token in trace:
        for layer, ids in enumerate(token):
            plan = oracle.step(layer, ids)
            selected = int((plan["safe_ids"] >= 0).sum())
            want.append(
                (
                    selected,
                    selected - plan["copy_count"],
                    plan["promoted_count"],
                    plan["staged_count"],
                )
            )
    _, hits, promotions, staged = np.sum(want, 0)
    assert hits > 0 and promotions > 100 and (staged > 0) == bool(controls)
    for name in IMPLEMENTATIONS:
        state = pp.set_controls(pp.init_state(config), **controls)
        state, counts = replayer(name, config)(state, trace)
        assert np.array_equal(counts, want), name
        assert_same(pp.snapshot(config, state), oracle.snapshot(), name)
