"""`moe` by the prefill path, and the FFN of many lanes that it is made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
from pallas_pool.config import INT32_MAX
from pallas_pool.grouped_ffn import make_tiles
from tests.moe_support import (
    CONFIG,
    EXPERTS,
    TOP_K,
    D,
    F,
    assert_bank_holds_residents,
    judged,
    numpy_experts,
    pinned_experts,
    plain,
    runner,
    tokens,
)
from tests.oracle import Oracle
from tests.support import assert_same

COUNT = 7  # Tokens; 14 lanes, where a step has up to 3.
LAYER = 0  # Whose residents are experts 0, 1 and 2.


def restricted(rng, allowed):
    """Tokens whose experts are among some."""
    x, _, weights = tokens(rng, COUNT, bad=0)
    return x, rng.choice(np.array(allowed, np.int32), (COUNT, TOP_K)), weights


def cases():
    rng = np.random.default_rng(0)
    x, ids, weights = tokens(rng, COUNT, bad=0)
    yield "any", (x, ids, weights)
    yield "some lanes bad", tokens(rng, COUNT, bad=0.5)
    yield "residents alone", restricted(rng, [0, 1, 2])
    yield "one resident", restricted(rng, [1])
    yield "no resident, one pass", restricted(rng, [3, 7])
    yield "no resident, two passes, the last not full", restricted(rng, [3, 4, 5, 7])
    yield "one expert", restricted(rng, [6])
    yield "padding alone", (x, np.full_like(ids, -1), weights)
    yield "invalid ids alone", (x, np.full_like(ids, EXPERTS), weights)
    yield "invalid weights alone", (x, ids, np.full_like(weights, np.nan))
    every = np.arange(COUNT * TOP_K, dtype=np.int32).reshape(COUNT, TOP_K) % EXPERTS
    yield "every expert", (x, every, weights)


CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_without_updates_nothing_moves_and_each_expert_is_copied_once(name):
    x, ids, weights = CASES[name]
    pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
    before = pp.snapshot(CONFIG, pool.state)
    y, pool = runner(CONFIG)(pool, pinned_experts(), jnp.int32(LAYER), x, ids, weights)
    np.testing.assert_allclose(y, plain(LAYER, x, ids, weights), rtol=1e-5, atol=1e-5)
    safe = judged(ids, weights)
    assert (np.asarray(y)[(safe < 0).all(axis=1)] == 0).all()
    after = pp.snapshot(CONFIG, pool.state)
    assert after.pop("error") == int((safe != ids).any())
    before.pop("error")
    assert_same(after, before)
    assert_bank_holds_residents(CONFIG, pool)
    selected = set(safe.ravel().tolist()) - {-1}
    read = pp.read_counters(pool)
    assert read["hits"][LAYER] == len(selected & {0, 1, 2})
    assert read["staged"][LAYER] == read["misses"][LAYER] == len(selected - {0, 1, 2})
    assert read["promotions"][LAYER] == 0 and read["calls"].tolist() == [1, 0]
    assert (read["hits"][1], read["misses"][1]) == (0, 0)


full_ffn = jax.jit(pp.grouped_ffn)


@functools.cache
def full_bank():
    bank = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in numpy_experts().items()}
    return jax.tree.map(jnp.asarray, bank)


def rows_of(layer, ids, weights):
    safe = judged(ids, weights)
    return np.where(safe >= 0, layer * EXPERTS + safe, -1).astype(np.int32)


@pytest.mark.parametrize("updates", [False, True])
def test_where_the_experts_are_does_not_change_a_bit(updates):
    """A pool that streams, and grouped_ffn on a bank of all experts."""
    pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
    run = runner(CONFIG, updates=updates)
    rng = np.random.default_rng(1)
    for step in range(6):
        layer, (x, ids, weights) = step % 2, tokens(rng, COUNT)
        y, pool = run(pool, pinned_experts(), jnp.int32(layer), x, ids, weights)
        want = full_ffn(x, full_bank(), rows_of(layer, ids, weights), weights)
        np.testing.assert_array_equal(y, want)
    assert pp.read_counters(pool)["misses"].sum() > 0


def blocks(ids, weights):
    """Distinct valid experts in the order of their first lane, in blocks as a step takes them."""
    distinct = list(dict.fromkeys(i for i in judged(ids, weights).ravel().tolist() if i >= 0))
    size = min(CONFIG.width, CONFIG.staging_rows, EXPERTS)
    return [distinct[i : i + size] for i in range(0, len(distinct), size)]


@pytest.mark.parametrize("controls", [{}, {"gate": False}, {"promote_min_misses": 2, "promote_limit": 1}])
def test_with_updates_the_state_is_that_of_steps_over_blocks(controls):
    oracle = Oracle.of(CONFIG)
    oracle.set_controls(**controls)
    pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
    pool = pool._replace(state=pp.set_controls(pool.state, **controls))
    run, rng = runner(CONFIG, updates=True), np.random.default_rng(2)
    counts = np.zeros((2, 3), np.int64)
    copied = 0
    for step in range(6):
        layer, (x, ids, weights) = step % 2, tokens(rng, COUNT)
        y, pool = run(pool, pinned_experts(), jnp.int32(layer), x, ids, weights)
        np.testing.assert_allclose(y, plain(layer, x, ids, weights), rtol=1e-5, atol=1e-5)
        in_call = []
        for block in blocks(ids, weights):
            plan = oracle.step(layer, block)
            hits = len(block) - plan["copy_count"]
            counts[layer] += hits, plan["promoted_count"], plan["staged_count"]
            in_call += plan["copy_src"][: plan["copy_count"]].tolist()
        assert len(set(in_call)) == len(in_call)
        copied += len(in_call)
        oracle.error |= int((judged(ids, weights) != ids).any())
        assert_same(pp.snapshot(CONFIG, pool.state), oracle.snapshot(), f"step {step}")
        assert_bank_holds_residents(CONFIG, pool)
    read = pp.read_counters(pool)
    for i, name in enumerate(("hits", "promotions", "staged")):
        np.testing.assert_array_equal(read[name], counts[:, i], name)
    assert read["calls"].tolist() == [3, 3]
    row = sum(leaf[0, 0].nbytes for leaf in numpy_experts().values())
    assert read["bytes_copied"].sum() == copied * row
    assert (counts[:, 1].sum() > 0) == (controls.get("gate", True))


@pytest.mark.parametrize("most, lanes", [(1, 16), (5, 2), (40, 4), (100, 16)])
def test_tiles_cover_each_lane_once_and_never_two_groups(most, lanes):
    rng = np.random.default_rng(most)
    for _ in range(8):
        n = 61
        group = rng.integers(0, most, n)
        group[rng.random(n) < rng.random()] = INT32_MAX
        group = np.sort(group).astype(np.int32)
        start, end = map(np.asarray, make_tiles(jnp.asarray(group), most, lanes))
        assert len(start) == n // lanes + min(most, n)
        covered = []
        for first, last in zip(start, end, strict=True):
            covered += range(first, last)
            assert first == last == n or (0 < last - first <= lanes and len(set(group[first:last])) == 1)
        assert covered == np.flatnonzero(group != INT32_MAX).tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_ffn_of_many_lanes_is_that_of_few(dtype):
    """Odd sizes, rows that no lane has, lanes of no row with weights that are not looked at."""
    rng = np.random.default_rng(4)
    rows, d, f, count = 5, 9, 21, 11
    shapes = {"gate_up": (rows, d, 2 * f), "down": (rows, f, d)}
    bank = {name: jnp.asarray(rng.standard_normal(shape) / 4, dtype) for name, shape in shapes.items()}
    x = jnp.asarray(rng.standard_normal((count, d)), dtype)
    routes = rng.choice(np.array([-1, 0, 2, 4, rows, 2**31 - 1], np.int32), (count, TOP_K))
    weights = np.where((routes < 0) | (routes >= rows), np.nan, rng.random(routes.shape)).astype(np.float32)
    many = jax.jit(pp.grouped_ffn)(x, bank, routes, weights)
    few = jax.jit(pp.expert_ffn)(x, bank, routes, weights)
    assert many.dtype == few.dtype == dtype
    # Sums of float32 in another order, then rounded to the dtype.
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        many.astype(jnp.float32), few.astype(jnp.float32), rtol=tolerance, atol=max(tolerance, 1e-6)
    )


def test_a_pool_of_numpy_arrays():
    """As a checkpoint may give it back, and not under `jit`."""
    arrays = tokens(np.random.default_rng(6), COUNT)
    pool = jax.device_get(pp.init_pool(CONFIG, pinned_experts(), counters=True))
    y, after = jax.eval_shape(lambda: pp.moe(CONFIG, pool, pinned_experts(), LAYER, *arrays))
    assert y.shape == (COUNT, D) and jax.tree.structure(after) == jax.tree.structure(pool)


def test_a_token_that_is_not_finite_leaves_the_others_alone():
    x, ids, weights = restricted(np.random.default_rng(5), [3])  # All lanes are of one tile.
    rows = rows_of(LAYER, ids, weights)
    want = np.array(full_ffn(x, full_bank(), rows, weights))
    x[2] = np.nan
    got = np.asarray(full_ffn(x, full_bank(), rows, weights))
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"x": np.zeros((3, D), np.int32)}, TypeError, "x must be of dtype"),
        ({"x": np.zeros((2, D), np.float32)}, ValueError, "x and weights must be"),
        ({"x": np.zeros((3, D + 1), np.float32)}, ValueError, f"x has d = {D + 1}, but .*made for d = {D}"),
        ({"routes": np.zeros(5, np.int32)}, ValueError, r"routes must be \[n\] with n >= T \* k = 6"),
        ({"routes": np.zeros((3, TOP_K), np.float32)}, TypeError, "routes must be an array of integers"),
        ({"routes": [[0, 1]] * 3}, TypeError, "routes must be an array of integers, got list"),
        ({"routes": np.zeros(0, np.int32), "weights": np.zeros((3, 0), np.float32)}, ValueError, "k >= 1"),
        ({"interpret": "no"}, TypeError, "interpret must be None, True or False"),
        ({"activation": lambda gate: gate[:1]}, ValueError, "activation must be an elementwise function"),
        ({"weights": np.zeros((3, TOP_K), np.int32)}, TypeError, "weights must be of dtype"),
        ({"activation": "none"}, ValueError, "activation must be one of"),
        ({"activation": 3}, TypeError, "activation must be a name or a function"),
        ({"bank": {"gate": np.zeros((4, D, F), np.float32)}}, ValueError, "missing"),
    ],
)
def test_the_ffn_refuses_bad_use(changes, error, message):
    arguments = {
        "x": np.zeros((3, D), np.float32),
        "bank": {name: leaf[0] for name, leaf in numpy_experts().items()},
        "routes": np.zeros((3, TOP_K), np.int32),
        "weights": np.zeros((3, TOP_K), np.float32),
    } | changes
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: pp.grouped_ffn(**arguments))
