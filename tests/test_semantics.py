"""The planner's rules one by one, with plans and states worked out by hand.

Two layers of six experts; each layer starts with its experts 0 and 1 in the bank, so pool rows 0
and 1 are layer 0's, rows 2 and 3 layer 1's, and staging rows are 4 to 11.
"""

import numpy as np
import pytest

import pallas_pool as pp
from tests.support import IMPLEMENTATIONS, Pool

CONFIG = pp.PoolConfig(num_layers=2, num_experts=6, rows_per_layer=2, staging_rows=8, width=8)


@pytest.fixture(params=("oracle", *IMPLEMENTATIONS))
def pool(request):
    return Pool(request.param, CONFIG)


def check(plan, *, ids, routes, promoted=(), staged=(), step_map):
    """Compares a whole plan; `promoted` and `staged` are (expert, row) pairs."""
    copies = [*promoted, *staged]

    def lanes(values):
        return [*values, *[-1] * (8 - len(values))]

    want = {
        "safe_ids": lanes(ids),
        "routes": lanes(routes),
        "copy_src": lanes([expert for expert, _ in copies]),
        "copy_dst": lanes([row for _, row in copies]),
        "copy_count": len(copies),
        "promoted_count": len(promoted),
        "staged_count": len(staged),
        "staged_expert": lanes([expert for expert, _ in staged]),
        "staged_row": lanes([row for _, row in staged]),
        "step_map": step_map,
    }
    assert {name: np.asarray(x).tolist() for name, x in plan.items()} == want


def facts(pool, *names):
    snapshot = pool.snapshot()
    return [np.asarray(snapshot[name]).tolist() for name in names]


def test_hits_are_routed_and_stamped(pool):
    plan = pool.step(0, [1, 0, 1])
    check(plan, ids=[1, 0, 1], routes=[1, 0, 1], step_map=[0, 1, -1, -1, -1, -1])
    plan = pool.step(1, [1])
    check(plan, ids=[1], routes=[3], step_map=[2, 3, -1, -1, -1, -1])
    assert facts(pool, "row_used", "clock", "forwards") == [[1, 1, 0, 2], 2, 1]


def test_a_miss_evicts_the_oldest_row_and_the_first_of_its_age(pool):
    plan = pool.step(0, [0, 5])
    check(plan, ids=[0, 5], routes=[0, 1], promoted=[(5, 1)], step_map=[0, -1, -1, -1, -1, 1])
    plan = pool.step(1, [4, 3])
    check(
        plan,
        ids=[4, 3],
        routes=[2, 3],
        promoted=[(4, 2), (3, 3)],
        step_map=[-1, -1, -1, 3, 2, -1],
    )
    assert facts(pool, "row_key", "row_used") == [[0, 5, 10, 9] + [-1] * 8, [1, 1, 2, 2]]
    assert facts(pool, "key_row") == [[0, -1, -1, -1, -1, 1, -1, -1, -1, 3, 2, -1]]


def test_an_older_row_goes_before_a_lower_one(pool):
    pool.step(0, [0])
    pool.step(0, [1])
    pool.step(1, [0, 1])
    pool.step(0, [0])
    plan = pool.step(1, [5])
    check(plan, ids=[5], routes=[1], promoted=[(5, 1)], step_map=[2, 3, -1, -1, -1, 1])


def test_hits_are_stamped_before_any_victim_is_chosen(pool):
    plan = pool.step(0, [5, 1, 0])
    check(plan, ids=[5, 1, 0], routes=[2, 1, 0], promoted=[(5, 2)], step_map=[0, 1, -1, -1, -1, 2])
    assert facts(pool, "row_used") == [[1, 1, 1, 0]]


def test_no_row_selected_in_a_step_is_evicted_in_it(pool):
    plan = pool.step(0, [0, 2, 1, 3, 4, 5])
    check(
        plan,
        ids=[0, 2, 1, 3, 4, 5],
        routes=[0, 2, 1, 3, 4, 5],
        promoted=[(2, 2), (3, 3)],
        staged=[(4, 4), (5, 5)],
        step_map=[0, 1, 2, 3, 4, 5],
    )
    assert facts(pool, "miss_count", "row_used") == [[0, 0, 0, 0, 1, 1] + [0] * 6, [1] * 4]


def test_duplicates_share_a_row_and_count_one_miss(pool):
    pool.set(promote_min_misses=2)
    plan = pool.step(0, [5, 2, 5, 2])
    check(
        plan,
        ids=[5, 2, 5, 2],
        routes=[4, 5, 4, 5],
        staged=[(5, 4), (2, 5)],
        step_map=[0, 1, 5, -1, -1, 4],
    )
    assert facts(pool, "miss_count") == [[0, 0, 1, 0, 0, 1] + [0] * 6]


def test_promote_limit(pool):
    pool.set(promote_limit=1)
    plan = pool.step(0, [2, 3, 4])
    check(
        plan,
        ids=[2, 3, 4],
        routes=[0, 4, 5],
        promoted=[(2, 0)],
        staged=[(3, 4), (4, 5)],
        step_map=[-1, 1, 0, 4, 5, -1],
    )
    assert facts(pool, "miss_count") == [[0, 0, 0, 1, 1, 0] + [0] * 6]


def test_promote_min_misses_and_promotions_first_in_the_copy_list(pool):
    pool.set(promote_min_misses=2)
    plan = pool.step(0, [2])
    check(plan, ids=[2], routes=[4], staged=[(2, 4)], step_map=[0, 1, 4, -1, -1, -1])
    plan = pool.step(0, [3, 2])
    check(
        plan,
        ids=[3, 2],
        routes=[4, 0],
        promoted=[(2, 0)],
        staged=[(3, 4)],
        step_map=[-1, 1, 0, 4, -1, -1],
    )
    assert facts(pool, "miss_count") == [[0, 0, 0, 1, 0, 0] + [0] * 6]


def test_an_evicted_expert_counts_its_misses_anew(pool):
    pool.set(promote_min_misses=2)
    pool.step(0, [5])
    pool.step(0, [5])  # evicts expert 0
    pool.step(0, [0])
    assert facts(pool, "miss_count") == [[1] + [0] * 11]
    plan = pool.step(0, [0])
    check(plan, ids=[0], routes=[1], promoted=[(0, 1)], step_map=[1, -1, -1, -1, -1, 0])


def test_promote_interval_counts_forwards(pool):
    pool.set(promote_interval=2)
    promoted = []
    for layer, expert in ((1, 5), (0, 5), (1, 4), (0, 4), (1, 3), (0, 3), (1, 2)):
        plan = pool.step(layer, [expert])
        promoted.append(int(plan["promoted_count"]))
    # Forwards 0 (before the first layer 0), 1, 1, 2, 2, 3, 3.
    assert promoted == [0, 1, 1, 0, 0, 1, 1]
    assert facts(pool, "clock", "forwards") == [7, 3]


def test_interval_one_promotes_before_the_first_forward(pool):
    plan = pool.step(1, [5])
    check(plan, ids=[5], routes=[0], promoted=[(5, 0)], step_map=[2, 3, -1, -1, -1, 0])


def test_protect_recent_is_strict(pool):
    # Rows unused so far are of clock 0; a forward is two clocks: they are victims from clock 3 on.
    pool.set(protect_recent=1)
    for _ in range(2):
        plan = pool.step(1, [5])
        check(plan, ids=[5], routes=[4], staged=[(5, 4)], step_map=[2, 3, -1, -1, -1, 4])
    plan = pool.step(1, [5])
    check(plan, ids=[5], routes=[0], promoted=[(5, 0)], step_map=[2, 3, -1, -1, -1, 0])


def test_a_closed_gate_freezes_everything(pool):
    pool.set(gate=False)
    before = facts(pool, *pool.snapshot())
    plan = pool.step(0, [5, 0, 4])
    check(
        plan,
        ids=[5, 0, 4],
        routes=[4, 0, 5],
        staged=[(5, 4), (4, 5)],
        step_map=[0, 1, -1, -1, 5, 4],
    )
    assert facts(pool, *pool.snapshot()) == before
    pool.set(gate=True)
    pool.step(0, [0])
    assert facts(pool, "row_used", "clock", "forwards") == [[1, 0, 0, 0], 1, 1]


def test_nothing_is_promoted_while_the_gate_is_closed(pool):
    pool.set(promote_min_misses=2)
    pool.step(0, [5])
    pool.step(0, [4, 5])  # promotes 5; 4 has one miss
    pool.set(gate=0, promote_min_misses=1)
    plan = pool.step(0, [4])
    check(plan, ids=[4], routes=[4], staged=[(4, 4)], step_map=[-1, 1, -1, -1, 4, 0])
    assert facts(pool, "miss_count", "clock") == [[0, 0, 0, 0, 1, 0] + [0] * 6, 2]


@pytest.mark.parametrize("expert", [-2, 6, 2**31 - 1, -(2**31)])
def test_each_invalid_id_sets_the_error_and_padding_does_not(pool, expert):
    pool.step(0, [-1, 0, -1])
    assert facts(pool, "error") == [0]
    pool.step(0, [-1, 0, expert])
    assert facts(pool, "error") == [1]


def test_invalid_lanes_are_padding_and_set_the_error(pool):
    plan = pool.step(0, [6, 0, -2, 5])
    check(
        plan,
        ids=[-1, 0, -1, 5],
        routes=[-1, 0, -1, 1],
        promoted=[(5, 1)],
        step_map=[0, -1, -1, -1, -1, 1],
    )
    assert facts(pool, "error", "row_used") == [1, [1, 1, 0, 0]]
    pool.step(0, [0])
    assert facts(pool, "error") == [1]


def test_weights_make_lanes_invalid_and_those_of_padding_are_not_looked_at(pool):
    plan = pool.step(0, [-1, 0, 1, -1], [np.nan, 0.0, 1.0, -3.0])
    check(plan, ids=[-1, 0, 1], routes=[-1, 0, 1], step_map=[0, 1, -1, -1, -1, -1])
    assert facts(pool, "error") == [0]
    plan = pool.step(0, [5, 0, 1, 5], [-1.0, np.inf, np.nan, 2.0])
    check(
        plan,
        ids=[-1, -1, -1, 5],
        routes=[-1, -1, -1, 2],
        promoted=[(5, 2)],
        step_map=[0, 1, -1, -1, -1, 2],
    )
    assert facts(pool, "error") == [1]


def test_a_step_of_padding_ticks_the_clock(pool):
    plan = pool.step(0, [])
    check(plan, ids=[], routes=[], step_map=[0, 1, -1, -1, -1, -1])
    assert facts(pool, "clock", "forwards", "row_used", "error") == [1, 1, [0] * 4, 0]
