"""The clock past 2**31 steps, and past multiples of it: recency stays right, ties too."""

import numpy as np
import pytest

import pallas_pool as pp
from tests.support import (
    CONFIG,
    EDGE,
    IMPLEMENTATIONS,
    aged,
    assert_same_steps,
    check_all,
    run_oracle,
    run_steps,
)

STEPS = 300


def stream(seed, layers):
    rng = np.random.default_rng(seed)
    popular = (CONFIG.num_experts * rng.random((STEPS, 4)) ** 2).astype(np.int32)
    ids = np.where(rng.random((STEPS, 4)) < 0.1, -1, popular).astype(np.int32)
    return np.arange(STEPS) % 3 if layers is None else np.full(STEPS, layers), ids


@pytest.mark.parametrize("protect", [0, 1, 2, 40])
@pytest.mark.parametrize("epoch", [1, 2, 1000])
def test_across_the_edge(epoch, protect):
    clock = epoch * EDGE - 5
    rng = np.random.default_rng(epoch)
    used = clock - rng.integers(0, 3, CONFIG.rows)  # Ties, and rows still protected.
    state, oracle = aged(CONFIG, clock, clock // 2, used)
    oracle.set_controls(protect_recent=protect)
    state = pp.set_controls(state, protect_recent=protect)
    states = check_all(CONFIG, state, oracle, *stream(epoch, None))
    assert oracle.clock == clock + STEPS
    for state in states.values():
        pp.check_state(CONFIG, state)


def test_ties_before_and_after_the_edge():
    """All rows tie at the last clock before the edge; those of one step tie again after it."""
    for clock in (EDGE - 1, EDGE, 2 * EDGE - 1, 3 * EDGE - 2):
        state, oracle = aged(CONFIG, clock, 0, [clock] * CONFIG.rows)
        layers = [0, 1, 0, 1]
        ids = np.array([[7, 6, 5, -1], [7, 6, 5, 4], [0, 1, 2, 3], [3, 4, 7, 0]], np.int32)
        ids = np.concatenate([ids, np.full((STEPS - 4, 4), -1, np.int32)])
        layers = layers + [1] * (STEPS - 4)
        want = run_oracle(oracle.copy(), layers, ids)
        assert want[0][0]["copy_dst"].tolist() == [0, 1, 2, -1]
        assert want[1][0]["copy_dst"].tolist() == [3, 4, 5, 6]
        check_all(CONFIG, state, oracle, layers, ids)


def test_rows_of_several_epochs():
    """Where epochs differ the smallest word is not the oldest row; the largest word is a word."""
    clock = 3 * EDGE + 17
    ages = [3 * EDGE, EDGE - 1, 2 * EDGE, 2 * EDGE - 1, EDGE - 1, EDGE, 3 * EDGE + 16]
    state, oracle = aged(CONFIG, clock, 5, ages)
    layers, ids = stream(7, None)
    ids[0] = [7, 6, 5, 4]
    want = run_oracle(oracle.copy(), layers, ids)
    assert want[0][0]["copy_dst"].tolist() == [1, 4, 5, 3]
    check_all(CONFIG, state, oracle, layers, ids)


def test_forwards_pass_the_edge_with_an_interval():
    for interval in (2, 3, 5):
        state, oracle = aged(CONFIG, 3 * EDGE, EDGE - 4)
        oracle.set_controls(promote_interval=interval)
        state = pp.set_controls(state, promote_interval=interval)
        check_all(CONFIG, state, oracle, *stream(interval, None))
        assert oracle.forwards == EDGE - 4 + STEPS // 3


def test_a_closed_gate_stays_at_the_edge():
    """Nothing ticks at the edge with the gate closed; the clock goes on where it was."""
    state, oracle = aged(CONFIG, EDGE - 1, EDGE - 1)
    layers, ids = stream(3, 0)
    states = dict.fromkeys(IMPLEMENTATIONS, state)
    for gate in (0, 1, 0):
        oracle.set_controls(gate=gate)
        want = run_oracle(oracle, layers, ids)
        assert oracle.clock == oracle.forwards
        for name, state in states.items():
            got, states[name] = run_steps(
                name, CONFIG, pp.set_controls(state, gate=gate), layers, ids
            )
            assert_same_steps(got, want, name)
    assert oracle.clock == EDGE - 1 + STEPS
