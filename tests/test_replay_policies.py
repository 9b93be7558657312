"""The policies beside the planner: against brute force, plain loops, and the planner's oracle."""

import itertools
from collections import Counter

import numpy as np
import pytest

import pallas_pool as pp
from bench import policies
from bench.synthetic import Synthetic, generate
from tests.oracle import Oracle
from tests.test_traces import COUNTS, geometry, recorded


def _residents(config):
    return [range(rows) for rows in config.layer_rows]


def _steps(config, ids):
    """The keys that each step selects, in order."""
    for token in ids.tolist():
        for layer, experts in enumerate(token):
            keys = [layer * config.num_experts + e for e in experts if e >= 0]
            yield list(dict.fromkeys(keys))


def _first_keys(config):
    return [
        layer * config.num_experts + e
        for layer, experts in enumerate(_residents(config))
        for e in experts
    ]


def _most_hits(config, ids):
    """The most hits of all choices that keep a step's hits, tried out."""
    best = {frozenset(_first_keys(config)): 0}
    for selected in map(set, _steps(config, ids)):
        following = {}
        for pool, hits in best.items():
            kept = pool & selected
            others = (pool | selected) - kept
            for chosen in itertools.combinations(others, config.rows - len(kept)):
                after = kept.union(chosen)
                following[after] = max(following.get(after, 0), hits + len(kept))
        best = following
    return max(best.values())


@pytest.mark.parametrize("layers, experts, rows", [(1, 6, 3), (2, 4, 2), (3, 3, (2, 0, 1))])
def test_the_optimum_is_the_most_that_any_choice_makes(layers, experts, rows):
    config = pp.PoolConfig(layers, experts, rows, 4, 4)
    rng = np.random.default_rng(0)
    beaten = Counter()
    for _ in range(60):
        ids = np.array([[rng.permutation(experts)[:2] for _ in range(layers)] for _ in range(5)])
        ids[rng.random(ids.shape) < 0.2] = -1
        counts = policies.optimum(config, ids, _residents(config))
        hits = counts.hits.sum()
        assert hits == _most_hits(config, ids)
        assert (counts.selected == counts.hits + counts.promoted + counts.staged).all()
        for other in (policies.least_recent, policies.least_frequent):
            beaten[other] += hits > other(config, ids, _residents(config)).hits.sum()
    assert min(beaten.values()) > 10


def _replayed(config, ids, worth):
    """Promotions a layer where the key worth least is evicted, scanning for it each time."""
    row_of = {key: row for row, key in enumerate(_first_keys(config))}
    count, last = Counter(), Counter()
    promoted = np.zeros(config.num_layers, int)
    for step, selected in enumerate(_steps(config, ids)):
        missed = [key for key in selected if key not in row_of]
        for key in selected:
            count[key] += 1
            last[key] = step + 1
        for key in missed:
            victims = [other for other in row_of if other not in selected]
            if victims:
                victim = min(victims, key=lambda k: (*worth(count[k], last[k]), row_of[k]))
                row_of[key] = row_of.pop(victim)
                promoted[step % config.num_layers] += 1
    return promoted


@pytest.mark.parametrize("rows", [(2, 0, 1), 5])
def test_the_least_frequent_and_the_least_recent(rows):
    ids = generate(Synthetic(tokens=60, layers=3, experts=12, top_k=4, zipf=1.2)).ids
    ids[np.random.default_rng(0).random(ids.shape) < 0.1] = -1
    config = pp.PoolConfig(3, 12, rows, 4, 4)
    for policy, worth in [
        (policies.least_frequent, lambda count, last: (count, last)),
        (policies.least_recent, lambda count, last: (last,)),
    ]:
        counts = policy(config, ids, _residents(config))
        assert counts.promoted.tolist() == _replayed(config, ids, worth).tolist()
        # With fewer rows than a step selects the others are staged.
        assert (counts.staged.sum() > 0) == (config.rows < 4)


def test_the_least_recent_is_the_planner_by_default():
    ids = generate(Synthetic(tokens=50, layers=4, experts=16, top_k=3)).ids
    config = pp.PoolConfig(4, 16, (6, 0, 3, 5), 4, 4)
    oracle = Oracle.of(config)
    plans = [oracle.step(layer, lanes) for token in ids for layer, lanes in enumerate(token)]
    promoted = np.array([plan["promoted_count"] for plan in plans]).reshape(-1, 4)
    counts = policies.least_recent(config, ids, _residents(config))
    assert counts.promoted.tolist() == promoted.sum(0).tolist()
    assert counts.tokens == 50 and counts.copies == promoted.sum() / 50


@pytest.mark.parametrize("name, rows, controls, want", [c for c in COUNTS if not c[2]])
def test_recorded_counts(name, rows, controls, want):
    trace = recorded(name)
    config = geometry(trace, rows)
    counts = policies.least_recent(config, trace, _residents(config))
    figures = (counts.selected, counts.hits, counts.promoted, counts.staged)
    assert tuple(int(x.sum()) for x in figures) == want
    best = policies.optimum(config, trace, _residents(config))
    assert best.hits.sum() > counts.hits.sum()
