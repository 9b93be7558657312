"""`warm_start` and `spread_rows`: residents and rows by frequency."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
from bench import policies
from bench.synthetic import Synthetic, generate

CONFIG = pp.PoolConfig(
    num_layers=3, num_experts=5, rows_per_layer=(2, 0, 3), staging_rows=4, width=4
)
TABLE = [[1, 7, 0, 7, 2], [9, 9, 9, 9, 9], [0, 0, 4, 0, 0]]


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.float32, list, jnp.asarray])
def test_a_table(kind):
    table = TABLE if kind is list else kind(TABLE)
    residents = pp.warm_start(CONFIG, table)
    assert residents == [[3, 1], [], [1, 0, 2]]
    state = pp.init_state(CONFIG, residents)
    assert pp.snapshot(CONFIG, state)["row_key"].tolist() == [3, 1, 11, 10, 12, -1, -1, -1, -1]
    pp.check_state(CONFIG, state)


def test_a_trace_counts_each_expert_once_a_token():
    trace = np.full((4, 3, 4), -1, np.int16)
    trace[0, 0] = [4, 4, 4, -1]
    trace[1:3, 0, 2:] = [2, 1]
    trace[3, 0, 0] = 2
    trace[:, 2, :3] = [[4, 0, -1], [3, 4, 0], [0, 3, 4], [4, 1, 4]]
    for each in (trace, trace.astype(np.int64), jnp.asarray(trace), trace.tolist()):
        assert pp.warm_start(CONFIG, each) == [[1, 2], [], [3, 0, 4]]
    unsigned = np.uint8([[[4], [0], [3]]])
    assert pp.warm_start(CONFIG, unsigned) == [[0, 4], [], [1, 0, 3]]


@pytest.mark.parametrize(
    "rows, want",
    [
        (None, (0, 5, 0)),
        (1, (0, 1, 0)),
        (8, (2, 5, 1)),
        (10, (4, 5, 1)),
        (11, (4, 5, 2)),  # Of those never selected the second of its layer before the fifth.
        (15, (5, 5, 5)),
    ],
)
def test_rows_go_where_the_frequent_experts_are(rows, want):
    config = pp.spread_rows(CONFIG, TABLE, rows)
    assert config.rows_per_layer == want and config.staging_rows == CONFIG.staging_rows
    residents = pp.warm_start(config, TABLE)
    worth = sorted(np.array(TABLE).ravel(), reverse=True)
    got = [TABLE[layer][expert] for layer, experts in enumerate(residents) for expert in experts]
    assert sorted(got, reverse=True) == worth[: config.rows]
    pp.check_state(config, pp.init_state(config, residents))


def test_ties_are_spread_evenly():
    assert pp.spread_rows(CONFIG, np.zeros((3, 5))).rows_per_layer == (2, 2, 1)


@pytest.mark.parametrize(
    "routing, error, message",
    [
        (
            TABLE[:2],
            ValueError,
            "trace [tokens, 3, top_k] or a table [3, 5] for this config, got [2",
        ),
        (np.zeros((9, 2, 4), int), ValueError, "for this config, got [9, 2, 4]"),
        (7, ValueError, "for this config, got []"),
        (
            np.zeros((9, 3, 4)),
            TypeError,
            "routing: a trace must have an integer dtype, got float64",
        ),
        (np.zeros((3, 5), bool), TypeError, "routing: a table must have a number dtype, got bool"),
        (np.full((9, 3, 4), 5), ValueError, "routing[0, 0, 0] must be in [-1, 5), got 5"),
        (np.full((9, 3, 4), -2), ValueError, "routing[0, 0, 0] must be in [-1, 5), got -2"),
        (np.diag([0.0, 0, np.nan, 1, 1])[:3], ValueError, "routing[2, 2] must be finite and at le"),
        (-np.eye(3, 5), ValueError, "routing[0, 0] must be finite and at least 0, got -1.0"),
        (
            np.full((3, 5), np.inf),
            ValueError,
            "routing[0, 0] must be finite and at least 0, got inf",
        ),
    ],
)
def test_bad_routing(routing, error, message):
    for function in (pp.warm_start, pp.spread_rows):
        with pytest.raises(error, match=re.escape(message)):
            function(CONFIG, routing)


@pytest.mark.parametrize("rows, error", [(0, ValueError), (16, ValueError), (2.0, TypeError)])
def test_bad_rows(rows, error):
    with pytest.raises(error, match="rows must be"):
        pp.spread_rows(CONFIG, TABLE, rows)


def test_a_warm_pool_hits_more():
    """What comes later in a trace hits more where what came before it tells the residents."""
    ids = generate(Synthetic(tokens=120, layers=4, experts=64, zipf=1.5, reuse=0.2)).ids
    config = pp.PoolConfig(4, 64, 12, 4, 4)
    spread = pp.spread_rows(config, ids[:80])
    assert spread.rows == config.rows

    def hits(config, residents):
        return policies.least_recent(config, ids[80:], residents).hits.sum()

    cold = hits(config, [range(12)] * 4)
    assert cold < hits(config, pp.warm_start(config, ids[:80]))
    assert cold < hits(spread, pp.warm_start(spread, ids[:80]))
