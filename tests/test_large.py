"""Large geometry: many lanes, pools of many rows in every order of age, and the largest bank."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
from pallas_pool import state as fields
from pallas_pool.kernels import victims
from tests.support import (
    EDGE,
    IMPLEMENTATIONS,
    MOST,
    aged,
    assert_same,
    assert_same_steps,
    one_step,
    plan_dict,
    run_oracle,
    run_steps,
)

# 9011 rows (a prime) of 24000 keys.
POOL = pp.PoolConfig(4, 6000, (2253, 11, 4494, 2253), 64, 64)
STEPS = 24


def ages(clock):
    """Row ages that a search for the oldest rows may take for others, all <= clock."""
    rows = POOL.rows
    row = np.arange(rows)
    rng = np.random.default_rng(11)
    return {
        "all tied": np.full(rows, clock),
        "all tied but a few": np.where(row % 997 == 996, clock - 5, clock),
        "ascending": clock - rows + row,
        "descending": clock - row,
        "two ages, shuffled": clock - rng.integers(0, 2, rows),
        "few ages": clock - rng.integers(0, 40, rows),
        "shuffled": clock - rng.permutation(rows),
        "old rows side by side": np.where((row > 5000) & (row < 5900), clock - 100, clock)
        - row % 3,
        # Samples of every second, third or fourth row see nothing of the old ones, or nothing else.
        "old rows between young ones": np.where(row % 4 == 3, clock - 100_000 - row % 7, clock),
        "young rows between old ones": np.where(row % 3 == 0, clock, clock - 50 - row % 50),
        "far apart": clock - np.minimum(clock, rng.integers(0, EDGE, rows)),
    }


def stream(seed):
    """Distinct ids a step, nearly all of them misses, spread over the layers."""
    rng = np.random.default_rng(seed)
    layers = rng.permutation(np.arange(STEPS) % POOL.num_layers)
    ids = [rng.permutation(POOL.num_experts)[: POOL.width] for _ in range(STEPS)]
    return layers, np.array(ids, np.int32)


@pytest.mark.parametrize("clock", [2 * 10**6, 5 * EDGE + 10])
@pytest.mark.parametrize("order", ages(2 * 10**6))
def test_the_oldest_rows_go_first(order, clock):
    """More promotions than a queue of some hundred rows holds, from pools of any order of age."""
    rng = np.random.default_rng(5)
    residents = [rng.permutation(POOL.num_experts)[:rows] for rows in POOL.layer_rows]
    state, oracle = aged(POOL, clock, clock // 4, ages(clock)[order], residents=residents)
    layers, ids = stream(len(order))
    want = run_oracle(oracle, layers, ids)
    promoted = sum(plan["promoted_count"] for plan, _ in want)
    assert promoted > 600
    for name in IMPLEMENTATIONS:
        got, state_after = run_steps(name, POOL, state, layers, ids)
        assert_same_steps(got, want, name)
        pp.check_state(POOL, state_after)


@pytest.mark.parametrize("aim", [1.5, 12], ids=("than the queue holds", "than are collected"))
@pytest.mark.parametrize("order", ["shuffled", "few ages", "two ages, shuffled"])
def test_a_bound_that_lets_through_more(order, aim, monkeypatch):
    """With the error of a sample this is rare: here each bound is too late."""
    monkeypatch.setattr(victims, "AIM", aim)
    clock = 10**6
    # A pool that no other test compiles.
    pool = pp.PoolConfig(4, 6000, (2253, 11, 4494, 2200 + int(aim)), 64, 64)
    row_used = ages(clock)[order][: pool.rows]
    rng = np.random.default_rng(6)
    residents = [rng.permutation(pool.num_experts)[:rows] for rows in pool.layer_rows]
    state, oracle = aged(pool, clock, clock // 4, row_used, residents=residents)
    layers, ids = stream(3)
    got, after = run_steps("fused", pool, state, layers, ids)
    assert_same_steps(got, run_oracle(oracle, layers, ids), "fused")
    pp.check_state(pool, after)
    if aim < 2:
        assert after.queue[fields.QUEUE_TAIL] == fields.QUEUE_SIZE


def test_the_last_row_and_the_largest_sort_key_left_out():
    """513 rows lie below the bound, and the last of them has the key that stands for none."""
    rows = 4096
    pool = pp.PoolConfig(4, 2064, rows // 4, 32, 32)
    span = 2 ** (31 - 12)
    clock = 2 * span + 10
    sampled, unsampled = np.flatnonzero(in_sample(pool)), np.flatnonzero(~in_sample(pool))
    seen = int(victims.AIM * fields.QUEUE_SIZE * len(sampled) / rows) * 4 // 5
    oldest = np.concatenate([sampled[:seen], unsampled[: fields.QUEUE_SIZE - seen]])
    row_used = np.full(rows, clock)
    row_used[oldest] = np.arange(len(oldest))
    row_used[-1] = span - 1
    assert rows - 1 not in oldest
    state, oracle = aged(pool, clock, clock // 4, row_used)
    layers, ids = np.zeros(2, np.int32), np.array([range(1024, 1056), range(1056, 1088)], np.int32)
    got, after = run_steps("fused", pool, state, layers, ids)
    assert_same_steps(got, run_oracle(oracle, layers, ids), "fused")
    pp.check_state(pool, after)


def in_sample(config):
    """Which rows a refill samples."""
    sampled = victims._sampled(config)
    assert config.rows % sampled == 0
    stratum = config.rows // sampled
    hashed = (np.arange(sampled) * victims.HASH % 2**32) >> 16
    found = np.zeros(config.rows, bool)
    found[np.arange(sampled) * stratum + (hashed * stratum >> 16)] = True
    return found


LEAST = -EDGE
CORRUPT = {
    "all the least": lambda row: np.full(len(row), LEAST),
    "the least and a clock": lambda row: np.where(row % 2 == 0, LEAST, 10**6 - row % 999),
    "too far apart": lambda row: np.where(row > len(row) // 2, LEAST // 2, MOST),
    "any": lambda row: np.random.default_rng(3).integers(LEAST, MOST, len(row)),
}


@pytest.mark.parametrize("rows", [40, 1300])
@pytest.mark.parametrize("words", CORRUPT)
def test_a_corrupt_table_of_ages_ends_a_step(words, rows):
    """No plan of it is right, but none may hang the device."""
    pool = pp.PoolConfig(2, rows, rows // 2, 32, 32)
    for epoch in (0, 3):
        state, _ = aged(pool, epoch * EDGE + 10**6, 1000, np.full(rows, 10**6))
        corrupt = jnp.asarray(CORRUPT[words](np.arange(rows)), jnp.int32)
        step = one_step("fused", pool)
        state = dataclasses.replace(state, row_used=corrupt)
        for first in (rows // 2, rows // 2 + 8):
            ids = jnp.arange(first, first + 32, dtype=jnp.int32) % rows
            plan, state = step(state, jnp.int32(0), ids)
            assert 0 <= plan.promoted_count <= 32


LARGEST = pp.PoolConfig(128, 1024, 513, 32, 32)
WIDEST = pp.PoolConfig(2, 1500, (1500, 30), 1024, 1024)


@pytest.mark.parametrize("config", [LARGEST, WIDEST], ids=("largest bank", "most lanes"))
def test_a_few_steps_of_the_largest(config):
    assert LARGEST.rows > 2**16 and WIDEST.width > 512
    rng = np.random.default_rng(9)
    clock = 10**6
    used = clock - rng.integers(0, 1000, config.rows)
    start, oracle = aged(config, clock, 5, used)
    layers = [config.num_layers - 1, 0, 1, 1]
    ids = [rng.permutation(config.num_experts)[: config.width] for _ in layers]
    ids[3] = rng.integers(-1, config.num_experts, config.width)  # With duplicates.
    ids = np.array(ids, np.int32)
    states = dict.fromkeys(IMPLEMENTATIONS, start)
    for layer, lanes in zip(layers, ids, strict=True):
        want = oracle.step(layer, lanes)
        after = oracle.snapshot()
        for name in IMPLEMENTATIONS:
            plan, states[name] = one_step(name, config)(states[name], jnp.int32(layer), lanes)
            assert_same(plan_dict(plan), want, name)
            assert_same(pp.snapshot(config, states[name]), after, name)
    for state in states.values():
        pp.check_state(config, state)
