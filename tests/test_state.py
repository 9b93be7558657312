"""`init_state`, `snapshot`, `clear_error`; `check_state` finds every corruption and names it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
from pallas_pool import state as fields
from tests.oracle import Oracle
from tests.support import IMPLEMENTATIONS, MOST, assert_same, one_step, with_words

CONFIG = pp.PoolConfig(
    num_layers=3, num_experts=5, rows_per_layer=(2, 0, 3), staging_rows=4, width=4
)


def test_the_initial_state():
    snapshot = pp.snapshot(CONFIG, pp.init_state(CONFIG))
    assert_same(
        snapshot,
        {
            "key_row": [0, 1, -1, -1, -1] + [-1] * 5 + [2, 3, 4, -1, -1],
            "row_key": [0, 1, 10, 11, 12, -1, -1, -1, -1],
            "row_used": [0] * 5,
            "miss_count": [0] * 15,
            "clock": 0,
            "forwards": 0,
            "gate": 1,
            "promote_limit": 0,
            "promote_interval": 1,
            "promote_min_misses": 1,
            "protect_recent": 0,
            "error": 0,
        },
    )
    pp.check_state(CONFIG, pp.init_state(CONFIG))


def test_given_residents():
    residents = [[4, 2], (), np.array([1, 0, 3])]
    state = pp.init_state(CONFIG, residents)
    snapshot = pp.snapshot(CONFIG, state)
    assert snapshot["row_key"].tolist() == [4, 2, 11, 10, 13, -1, -1, -1, -1]
    assert_same(snapshot, Oracle.of(CONFIG, residents).snapshot())
    pp.check_state(CONFIG, state)


@pytest.mark.parametrize(
    "residents, error, message",
    [
        ([[0, 1], []], ValueError, "residents must hold 3 sequences, one a layer, got 2"),
        ([[0], [], [0, 1, 2]], ValueError, r"residents\[0\] must hold 2 experts.*got 1"),
        ([[0, 1], [3], [0, 1, 2]], ValueError, r"residents\[1\] must hold 0 experts.*got 1"),
        ([[0, 5], [], [0, 1, 2]], ValueError, r"residents\[0\] must be in \[0, 4\], got 5"),
        ([[0, 1], [], [0, -1, 2]], ValueError, r"residents\[2\] must be in \[0, 4\], got -1"),
        ([[0, 1], [], [3, 1, 3]], ValueError, r"residents\[2\] names an expert twice: \[3, 1, 3\]"),
        ([[0, 1.0], [], [0, 1, 2]], TypeError, r"residents\[0\] must be an int, got 1\.0"),
    ],
)
def test_bad_residents_are_refused(residents, error, message):
    with pytest.raises(error, match=message):
        pp.init_state(CONFIG, residents)


def test_a_snapshot_is_of_the_whole_clock():
    state = with_words(
        pp.init_state(CONFIG),
        {fields.CLOCK: 7, fields.CLOCK_EPOCH: 3, fields.FORWARDS: MOST, fields.FORWARDS_EPOCH: 1},
        row_used=[0, MOST, 0, 7, 6],
        row_epoch=[0, 0, 1, 3, 3],
    )
    snapshot = pp.snapshot(CONFIG, state)
    assert snapshot["clock"] == 3 * 2**31 + 7
    assert snapshot["forwards"] == 2**32 - 1
    assert snapshot["row_used"].dtype == np.int64
    assert snapshot["row_used"].tolist() == [0, MOST, 2**31, 3 * 2**31 + 7, 3 * 2**31 + 6]
    pp.check_state(CONFIG, state)


def test_state_and_plan_are_pytrees_named_as_in_the_semantics():
    state = pp.init_state(CONFIG)
    names = {
        jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree.leaves_with_path(state)
    }
    assert {"key_row", "row_key", "row_used", "miss_count"} <= names
    doubled = jax.tree.map(lambda x: x * 2, state)
    assert isinstance(doubled, pp.PoolState)
    plan, _ = pp.step(CONFIG, state, 0, [0])
    assert plan._fields == (
        "routes",
        "safe_ids",
        "copy_src",
        "copy_dst",
        "copy_count",
        "promoted_count",
        "staged_count",
        "staged_expert",
        "staged_row",
        "step_map",
    )
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves((plan, state)))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_error_sticks_until_cleared(name):
    step = one_step(name, CONFIG)
    _, state = step(pp.init_state(CONFIG), 0, np.array([0, 5], np.int32))
    _, state = step(state, 0, np.array([0, 1], np.int32))
    with pytest.raises(pp.PoolError, match=r"a step saw an invalid lane .*clear_error"):
        pp.check_state(CONFIG, state)
    cleared = pp.clear_error(state)
    pp.check_state(CONFIG, cleared)
    assert_same(pp.snapshot(CONFIG, cleared), pp.snapshot(CONFIG, state) | {"error": 0})


def put(name, index, value):
    """A corruption: one entry of a table, or one word of the scalars, replaced."""

    def corrupt(state):
        table = np.array(getattr(state, name))
        table[index] = value
        return dataclasses.replace(state, **{name: jnp.asarray(table)})

    return corrupt


def both(*corruptions):
    def corrupt(state):
        for one in corruptions:
            state = one(state)
        return state

    return corrupt


# The state of `used_state` has 5 pool rows of 9 bank rows, 15 keys and clock 3; row 2 holds key 10.
CORRUPTIONS = [
    (put("key_row", 3, -2), r"key_row\[3\] = -2: not in \[-1, 5\)"),
    (put("key_row", 3, 5), r"key_row\[3\] = 5: not in \[-1, 5\)"),
    (put("key_row", 3, MOST), r"key_row\[3\] = 2147483647"),
    (put("key_row", 3, 2), r"key_row\[3\] = 2: row_key of that row does not lead back"),
    (put("key_row", 10, -1), r"row_key\[2\] = 10: key_row of that key does not lead back"),
    (put("key_row", 10, 3), r"row_key\[2\] = 10: key_row of that key does not lead back"),
    (put("row_key", 2, -2), r"row_key\[2\] = -2: not in \[-1, 15\)"),
    (put("row_key", 2, 15), r"row_key\[2\] = 15: not in \[-1, 15\)"),
    (put("row_key", 2, -1), r"row_key\[2\] = -1: a pool row without a key"),
    (put("row_key", 2, 3), r"row_key\[2\] = 3: key_row of that key does not lead back"),
    (put("row_key", 2, 11), r"row_key\[2\] = 11: key_row of that key does not lead back"),
    (put("row_key", 5, 3), r"row_key\[5\] = 3: a staging row is owned"),
    (put("row_key", 8, 10), r"row_key\[8\] = 10: a staging row is owned"),
    (put("row_used", 1, -1), r"row_used\[1\] = -1: negative"),
    (put("row_epoch", 1, -1), r"row_epoch\[1\] = -1: negative"),
    (put("row_used", 1, 4), r"row_used\[1\] = 4: later than the clock 3"),
    (put("row_epoch", 1, 1), r"row_used\[1\] = \d: later than the clock 3"),
    (put("miss_count", 4, -1), r"miss_count\[4\] = -1: negative"),
    (put("miss_count", 10, 1), r"miss_count\[10\] = 1: misses of a resident expert"),
    (put("scalars", fields.CLOCK, -1), r"scalars\[0\] = -1: a word of the clock is negative"),
    (put("scalars", fields.CLOCK_EPOCH, -1), r"scalars\[1\] = -1: a word of the clock"),
    (put("scalars", fields.FORWARDS, -1), r"scalars\[2\] = -1: a word of the clock is negative"),
    (put("scalars", fields.FORWARDS_EPOCH, -1), r"scalars\[3\] = -1: a word of the clock"),
    (put("scalars", fields.FORWARDS, 4), "forwards = 4: more than the clock 3"),
    (put("scalars", fields.GATE, 2), r"gate must be in \[0, 1\], got 2"),
    (put("scalars", fields.GATE, -1), r"gate must be in \[0, 1\], got -1"),
    (put("scalars", fields.PROMOTE_LIMIT, -1), "promote_limit must be in .*got -1"),
    (put("scalars", fields.PROMOTE_INTERVAL, 0), "promote_interval must be in .*got 0"),
    (put("scalars", fields.PROMOTE_MIN_MISSES, 0), "promote_min_misses must be in .*got 0"),
    (put("scalars", fields.PROTECT_RECENT, -1), "protect_recent must be in .*got -1"),
    (put("scalars", fields.ERROR, 1), "a step saw an invalid lane"),
    (put("scalars", fields.ERROR, -1), "a step saw an invalid lane"),
    (
        both(put("key_row", 10, 3), put("key_row", 11, 2)),
        r"row_key\[2\] = 10: key_row of that key does not lead back",
    ),
]


@pytest.fixture(scope="module")
def used_state():
    state = pp.init_state(CONFIG)
    state = pp.set_controls(state, promote_min_misses=2)
    for layer, ids in ((0, [0, 3]), (2, [0, 1]), (2, [4])):
        _, state = pp.step(CONFIG, state, layer, ids)
    pp.check_state(CONFIG, state)
    return state


@pytest.mark.parametrize("corrupt, message", CORRUPTIONS)
def test_check_state_finds_and_names_each_corruption(used_state, corrupt, message):
    with pytest.raises(pp.PoolError, match=message):
        pp.check_state(CONFIG, corrupt(used_state))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(pp.PoolState)])
def test_a_state_of_another_geometry_or_dtype_is_refused(field):
    def leaf(state):
        return getattr(state, field)

    def changed(change):
        state = pp.init_state(CONFIG)
        return jax.tree.map(lambda x: change(x) if x is leaf(state) else x, state)

    for change, got in (
        (lambda x: x[:-1], r"int32\[\d+\]"),
        (lambda x: x[None], r"int32\[1, \d+\]"),
        (lambda x: x.astype(jnp.float32), r"float32\[\d+\]"),
        (lambda x: x.astype(jnp.int16), r"int16\[\d+\]"),
    ):
        message = rf"state\.{field} must be int32\[\d+\] for this config, got {got}"
        for read in (pp.snapshot, pp.check_state):
            with pytest.raises(pp.PoolError, match=message):
                read(CONFIG, changed(change))
        for name in IMPLEMENTATIONS:
            with pytest.raises(ValueError, match=message):
                one_step(name, CONFIG)(changed(change), 0, np.array([0], np.int32))


@pytest.mark.parametrize(
    "function",
    [
        pp.set_controls,
        pp.controls,
        pp.clear_error,
        functools.partial(pp.snapshot, CONFIG),
        functools.partial(pp.check_state, CONFIG),
        lambda pool: pp.step(CONFIG, pool, 0, [0]),
    ],
)
def test_a_pool_is_no_state(function):
    pool = pp.Pool(pp.init_state(CONFIG), {})
    with pytest.raises(TypeError, match=r"state must be a PoolState, got Pool: give pool\.state"):
        function(pool)
