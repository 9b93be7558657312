"""Random geometry, controls and streams of hundreds of steps: every state and plan compared."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import pallas_pool as pp
from tests.invariants import Bank, check_step
from tests.support import (
    EDGE,
    IMPLEMENTATIONS,
    MOST,
    aged,
    assert_same_steps,
    run_oracle,
    run_steps,
)


class Geometry(NamedTuple):
    """A config, the lanes of a call, the dtype of its weights, the most chunks of an example."""

    config: pp.PoolConfig
    lanes: int
    weights: type | None
    chunks: int = 16


# Few, since each is compiled for every implementation.
GEOMETRIES = {
    "one of everything": Geometry(pp.PoolConfig(2, 3, (0, 1), 1, 1), 1, None),
    "layers differ": Geometry(pp.PoolConfig(3, 7, (7, 0, 5), 8, 8), 8, np.float32),
    "ragged": Geometry(pp.PoolConfig(2, 10, (1, 6), 5, 16), 5, ml_dtypes.bfloat16),
    "one layer": Geometry(pp.PoolConfig(1, 33, 20, 16, 16), 16, np.float16),
    "many layers": Geometry(pp.PoolConfig(37, 3, (1, 0) * 18 + (3,), 2, 2), 2, None),
    "wide": Geometry(pp.PoolConfig(2, 300, (140, 3), 64, 64), 64, np.float32, 6),
    # More experts than a tile of the step map, more rows than a tile of the victim scan.
    "tiles": Geometry(pp.PoolConfig(3, 1100, (1050, 3, 1100), 256, 256), 256, None, 2),
}
STEPS = 24  # of one chunk: controls change between chunks

controls = st.fixed_dictionaries(
    {},
    optional={
        "gate": st.sampled_from([1, 1, 1, 0]),
        "promote_limit": st.sampled_from([0, 0, 1, 2, 3, 100, MOST]),
        "promote_interval": st.sampled_from([1, 1, 2, 3, 5, MOST]),
        "promote_min_misses": st.sampled_from([1, 1, 2, 3, MOST]),
        "protect_recent": st.sampled_from([0, 0, 1, 2, 5, MOST]),
    },
)


class Style(NamedTuple):
    """How a chunk's ids are drawn."""

    seed: int
    skew: float  # 0: all experts alike; else popular ones
    padding: float  # share of lanes
    invalid: float
    in_order: bool  # layers 0, 1, 2, ... as in a model, else any


styles = st.builds(
    Style,
    seed=st.integers(0, 2**32 - 1),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    padding=st.sampled_from([0.0, 0.1, 0.6]),
    invalid=st.sampled_from([0.0, 0.0, 0.05]),
    in_order=st.booleans(),
)
NO_WEIGHTS = np.array([np.nan, np.inf, -np.inf, -1.0, -1e-7])


def stream(geometry, style, first_layer):
    """[STEPS] layers, [STEPS, lanes] ids and weights."""
    config, shape = geometry.config, (STEPS, geometry.lanes)
    rng = np.random.default_rng(style.seed)
    if style.in_order:
        layers = (first_layer + np.arange(STEPS)) % config.num_layers
    else:
        layers = rng.integers(0, config.num_layers, STEPS)
    ids = (config.num_experts * rng.random(shape) ** (1 + style.skew)).astype(np.int32)
    bad = np.array([-2, -(2**31), config.num_experts, MOST], np.int32)
    ids = np.where(rng.random(shape) < style.invalid, rng.choice(bad, shape), ids)
    ids = np.where(rng.random(shape) < style.padding, -1, ids).astype(np.int32)
    if geometry.weights is None:
        return layers, ids, None
    weights = rng.random(shape)
    weights = np.where(rng.random(shape) < style.invalid, rng.choice(NO_WEIGHTS, shape), weights)
    return layers, ids, weights.astype(geometry.weights)


def start(config, clock, seed):
    """A state and an oracle at that clock, with random residents, recency (ties too) and misses."""
    rng = np.random.default_rng(seed)
    residents = [rng.permutation(config.num_experts)[:rows] for rows in config.layer_rows]
    span = min(clock, int(rng.integers(1, 2 * config.rows + 2)))
    used = clock - rng.integers(0, span + 1, config.rows)
    resident = {
        layer * config.num_experts + expert
        for layer, experts in enumerate(residents)
        for expert in experts.tolist()
    }
    misses = {
        key: int(rng.choice([1, 2, MOST - 1, MOST]))
        for key in rng.permutation(config.keys)[: config.keys // 4].tolist()
        if key not in resident
    }
    forwards = clock - int(rng.integers(0, min(clock, 3) + 1))
    return aged(config, clock, forwards, used, misses, residents)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_long_streams(name):
    geometry = GEOMETRIES[name]
    config = geometry.config

    # A failing example is not shrunk: that would take minutes, and the next test's shrink well.
    @settings(
        max_examples=10 if geometry.chunks > 2 else 4, phases=(Phase.explicit, Phase.generate)
    )
    @given(
        clock=st.sampled_from([0, 0, 0, EDGE - 20, EDGE, 5 * EDGE - 7]),
        seed=st.integers(0, 2**32 - 1),
        chunks=st.lists(
            st.tuples(controls, styles),
            min_size=geometry.chunks // 2,
            max_size=geometry.chunks,
        ),
    )
    def compare(clock, seed, chunks):
        state, oracle = start(config, clock, seed)
        states = dict.fromkeys(IMPLEMENTATIONS, state)
        bank = Bank(config, oracle.snapshot(), seed)
        for number, (changed, style) in enumerate(chunks):
            layers, ids, weights = stream(geometry, style, number * STEPS)
            oracle.set_controls(**changed)
            before = oracle.snapshot()
            want = run_oracle(oracle, layers, ids, weights)
            for t, (plan, after) in enumerate(want):
                check_step(config, before, int(layers[t]), plan, after, bank)
                before = after
            for implementation in IMPLEMENTATIONS:
                state = pp.set_controls(states[implementation], **changed)
                got, state = run_steps(implementation, config, state, layers, ids, weights)
                assert_same_steps(got, want, f"{implementation}, chunk {number}")
                states[implementation] = state
        for state in states.values():
            pp.check_state(config, pp.clear_error(state))

    compare()


SMALL = Geometry(pp.PoolConfig(2, 4, (2, 1), 3, 4), 3, None)


@given(
    first=controls,
    steps=st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(-2, 4), min_size=3, max_size=3)),
        max_size=STEPS,
    ),
    then=controls,
)
@settings(max_examples=40)
def test_short_streams_lane_by_lane(first, steps, then):
    """Streams drawn id by id, which Hypothesis can shrink to the few that matter."""
    config = SMALL.config
    steps = steps + [(0, [-1] * 3)] * (STEPS - len(steps))
    layers = np.array([layer for layer, _ in steps], np.int32)
    ids = np.array([lanes for _, lanes in steps], np.int32)
    state, oracle = aged(config, 0, 0)
    states = dict.fromkeys(IMPLEMENTATIONS, state)
    for changed in (first, then):
        oracle.set_controls(**changed)
        want = run_oracle(oracle, layers, ids)
        for name in IMPLEMENTATIONS:
            state = pp.set_controls(states[name], **changed)
            got, states[name] = run_steps(name, config, state, layers, ids)
            assert_same_steps(got, want, name)
