"""Every pattern of the benchmark makes the counts that it states, in every step."""

import numpy as np
import pytest

import pallas_pool as pp
from bench import cases, chain
from bench.implementations import IMPLEMENTATIONS
from tests.oracle import Oracle

CONFIG = pp.PoolConfig(num_layers=3, num_experts=24, rows_per_layer=14, staging_rows=8, width=8)
PATTERNS = cases.patterns(CONFIG.width, (1, 4, 8, 16))


def test_patterns():
    assert list(PATTERNS) == [
        "all_hit", "one_staged", "all_staged", "promote_1", "promote_4", "promote_8",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_counts_by_the_oracle(name):
    case = PATTERNS[name](CONFIG, np.random.default_rng(0))
    oracle = Oracle.of(CONFIG)
    oracle.set_controls(gate=case.gate)
    seen = set()
    for circle in range(4):
        for turn in case.ids:
            for layer, ids in enumerate(turn):
                assert len(set(ids)) == CONFIG.width
                plan = oracle.step(layer, ids)
                assert (plan["routes"] >= 0).all()
                if circle:  # The first one leads into the steady state.
                    seen.add((plan["promoted_count"], plan["staged_count"]))
    assert seen == {(case.promoted, case.staged)}


@pytest.mark.parametrize("name", PATTERNS)
def test_counts_are_asserted_from_plans(name):
    case = PATTERNS[name](CONFIG, np.random.default_rng(1))
    stream = chain.make_stream(CONFIG, case)
    planner = IMPLEMENTATIONS["vectorized"]
    carry = chain.settle(CONFIG, planner, case, stream)
    steps = chain.check_counts(CONFIG, planner, case, carry, stream)
    assert steps >= case.turns * CONFIG.num_layers
    wrong = case._replace(promoted=case.promoted + 1)
    with pytest.raises(AssertionError, match=f"{name}, width 8, turn 0, layer 0: promoted"):
        chain.check_counts(CONFIG, planner, wrong, carry, stream)


def test_a_pool_that_holds_everything_has_no_promotions():
    config = pp.PoolConfig(3, 24, 24, 8, 8)
    with pytest.raises(ValueError, match="72 pool rows hold all 24 experts"):
        cases.promote(config, np.random.default_rng(0), 1)
    with pytest.raises(ValueError, match="no 0 hits and 8 misses"):
        cases.all_staged(config, np.random.default_rng(0))
