"""The controls: set, read, refused, and at the edges of their range."""

import jax
import numpy as np
import pytest

import pallas_pool as pp
from tests.support import CONFIG, IMPLEMENTATIONS, MOST, aged, assert_same, check_all, run_oracle

DEFAULTS = {
    "gate": 1,
    "promote_limit": 0,
    "promote_interval": 1,
    "promote_min_misses": 1,
    "protect_recent": 0,
}
LEAST = DEFAULTS | {"gate": 0}
RANGE = {name: (LEAST[name], 1 if name == "gate" else MOST) for name in DEFAULTS}


def test_defaults():
    assert pp.controls(pp.init_state(CONFIG)) == DEFAULTS


@pytest.mark.parametrize("name", DEFAULTS)
def test_one_control_set_and_read(name):
    state = pp.init_state(CONFIG)
    for value in RANGE[name]:
        changed = pp.set_controls(state, **{name: value})
        assert pp.controls(changed) == DEFAULTS | {name: value}
        assert pp.snapshot(CONFIG, changed)[name] == value
        rest = {name: DEFAULTS[name]}
        assert_same(pp.snapshot(CONFIG, changed) | rest, pp.snapshot(CONFIG, state))


def test_a_state_of_numpy_arrays():
    """As a checkpoint may give it back."""
    state = jax.device_get(pp.init_state(CONFIG))
    assert pp.controls(pp.set_controls(state, gate=False)) == DEFAULTS | {"gate": 0}
    assert pp.snapshot(CONFIG, pp.clear_error(state))["error"] == 0


def test_any_subset():
    state = pp.set_controls(pp.init_state(CONFIG), promote_limit=3, protect_recent=MOST)
    state = pp.set_controls(state, promote_limit=0, gate=False)
    assert pp.controls(state) == DEFAULTS | {"protect_recent": MOST, "gate": 0}
    assert pp.controls(pp.set_controls(state)) == pp.controls(state)
    state = pp.set_controls(state, gate=np.bool_(True), promote_interval=np.int64(MOST))
    assert pp.controls(state)["gate"] == 1 and pp.controls(state)["promote_interval"] == MOST


def test_set_under_jit():
    state = jax.jit(lambda state: pp.set_controls(state, promote_limit=5))(pp.init_state(CONFIG))
    assert pp.controls(state) == DEFAULTS | {"promote_limit": 5}
    with pytest.raises(TypeError, match="promote_limit must be a concrete int, got a traced value"):
        jax.jit(lambda state, x: pp.set_controls(state, promote_limit=x))(state, 5)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("gate", 2, ValueError, r"gate must be in \[0, 1\], got 2"),
        ("gate", -1, ValueError, r"gate must be in \[0, 1\], got -1"),
        ("gate", "open", TypeError, "gate must be an int, got 'open'"),
        ("promote_limit", -1, ValueError, r"promote_limit must be in \[0, 2147483647\], got -1"),
        ("promote_limit", MOST + 1, ValueError, "promote_limit must be in .*got 2147483648"),
        ("promote_limit", True, TypeError, "promote_limit must be an int, got the bool True"),
        ("promote_limit", 1.0, TypeError, r"promote_limit must be an int, got 1\.0"),
        (
            "promote_interval",
            0,
            ValueError,
            r"promote_interval must be in \[1, 2147483647\], got 0",
        ),
        ("promote_interval", 2**40, ValueError, "promote_interval must be in .*got 1099511627776"),
        ("promote_min_misses", 0, ValueError, r"promote_min_misses must be in \[1, .*got 0"),
        ("promote_min_misses", MOST + 1, ValueError, "promote_min_misses must be in .*2147483648"),
        ("protect_recent", -1, ValueError, r"protect_recent must be in \[0, .*got -1"),
        ("protect_recent", MOST + 1, ValueError, "protect_recent must be in .*got 2147483648"),
        ("protect_recent", np.array([1, 2]), TypeError, "protect_recent must be an int"),
    ],
)
def test_a_bad_control_is_refused_and_nothing_is_written(name, value, error, message):
    state = pp.set_controls(pp.init_state(CONFIG), promote_limit=7)
    before = pp.snapshot(CONFIG, state)
    good = {"promote_limit": 3, "promote_interval": 4, "gate": 0, "protect_recent": 5}
    with pytest.raises(error, match=message):
        pp.set_controls(state, **good | {name: value})
    assert_same(pp.snapshot(CONFIG, state), before)


def test_an_unknown_control_is_refused():
    with pytest.raises(TypeError, match="promote_limits"):
        pp.set_controls(pp.init_state(CONFIG), promote_limits=1)


def stream(config, steps, seed=0):
    rng = np.random.default_rng(seed)
    layers = np.arange(steps) % config.num_layers
    return layers, rng.integers(-1, config.num_experts, (steps, config.width), np.int32)


@pytest.mark.parametrize("value", [0, 1, MOST])
@pytest.mark.parametrize("name", DEFAULTS)
def test_each_control_at_its_edge(name, value):
    """Values outside a control's range stand for its next one inside."""
    value = min(max(value, RANGE[name][0]), RANGE[name][1])
    state, oracle = aged(CONFIG, 0, 0)
    oracle.set_controls(**{name: value})
    check_all(CONFIG, pp.set_controls(state, **{name: value}), oracle, *stream(CONFIG, 60))


def test_all_controls_at_their_most():
    most = {name: high for name, (_, high) in RANGE.items()}
    state, oracle = aged(CONFIG, 0, 0)
    oracle.set_controls(**most)
    states = check_all(CONFIG, pp.set_controls(state, **most), oracle, *stream(CONFIG, 60))
    for state in states.values():
        assert pp.controls(state) == most
        pp.check_state(CONFIG, state)


SMALL = {"staging_rows": 4, "width": 4}
ONE_LAYER = pp.PoolConfig(1, 4, 2, **SMALL)
MANY_LAYERS = pp.PoolConfig(37, 4, (2,) + (0,) * 36, **SMALL)
MOST_LAYERS = pp.PoolConfig(32768, 4, (1, 1) + (0,) * 32766, **SMALL)


@pytest.mark.parametrize(
    "config, layer, protect",
    [
        (ONE_LAYER, 0, MOST),
        (CONFIG, 1, MOST),
        (CONFIG, 1, 2**30 + 1),
        (MANY_LAYERS, 36, 65535),
        (MANY_LAYERS, 36, 3 * 65536 + 65535),
        (MOST_LAYERS, 32767, MOST),
        (MOST_LAYERS, 32767, 65536),
    ],
)
def test_protect_recent_times_the_layers_does_not_overflow(config, layer, protect):
    """Unused rows are victims once more than protect_recent * L steps have passed, to the step."""
    horizon = protect * config.num_layers
    state, oracle = aged(config, horizon - 3, 0, [0] * config.rows)
    oracle.set_controls(protect_recent=protect)
    state = pp.set_controls(state, protect_recent=protect)
    layers, ids = [layer] * 6, np.tile(np.array([2, 3, -1, -1], np.int32), (6, 1))
    want = run_oracle(oracle.copy(), layers, ids)
    assert [plan["promoted_count"] for plan, _ in want] == [0, 0, 0, 2, 0, 0]
    check_all(config, state, oracle, layers, ids)


def test_protect_recent_at_its_most_protects_every_row_of_a_young_pool():
    config, protect = MOST_LAYERS, MOST
    state, oracle = aged(config, 0, 0)
    oracle.set_controls(protect_recent=protect)
    layers, ids = stream(config, 20)
    layers = np.array([0, 1, 2, 32767] * 5)
    states = check_all(config, pp.set_controls(state, protect_recent=protect), oracle, layers, ids)
    for state in states.values():
        assert np.array_equal(pp.snapshot(config, state)["row_key"][:2], [0, 4])


@pytest.mark.parametrize("least", [MOST - 1, MOST])
def test_miss_counts_saturate(least):
    """Counts near the most stop at the most, and are promoted at promote_min_misses as ever."""
    resident = {0, 1, 2, 16, 17, 18, 19}
    misses = {key: MOST - 3 + key % 4 for key in range(24) if key not in resident}
    state, oracle = aged(CONFIG, 9, 3, miss_count=misses)
    states = dict.fromkeys(IMPLEMENTATIONS, state)
    promoted = []
    for changed in (
        {"promote_min_misses": least, "promote_interval": MOST},
        {"gate": 0},
        {"gate": 1, "promote_interval": 1, "promote_limit": 1},
    ):
        oracle.set_controls(**changed)
        layers, ids = stream(CONFIG, 48, seed=len(promoted))
        plans = run_oracle(oracle.copy(), layers, ids)
        promoted.append(sum(plan["promoted_count"] for plan, _ in plans))
        states = {name: pp.set_controls(one, **changed) for name, one in states.items()}
        states = check_all(CONFIG, states, oracle, layers, ids)
        if len(promoted) == 1:
            counts = oracle.snapshot()["miss_count"]
            assert set(counts.tolist()) == {0, MOST}
    assert promoted[:2] == [0, 0] and promoted[2] > 0
    for one in states.values():
        pp.check_state(CONFIG, one)


INTERVALS = [
    (interval, times * interval + 1)
    for interval in (2, 3, 7, 2**16 + 1, 2**30, MOST - 1, MOST)
    for times in (1, 2**31 // interval + 1, 7 * 2**31 // interval)
]


@pytest.mark.parametrize("interval, turn", INTERVALS)
def test_promote_interval_far_into_the_forwards(interval, turn):
    """Promotions come in forwards 1 modulo the interval and in no other, past 2**31 too."""
    state, oracle = aged(CONFIG, turn - 2, turn - 2)
    oracle.set_controls(promote_interval=interval)
    layers = [0] * 8
    ids = np.full((8, 4), -1, np.int32)
    ids[:, 0] = [7, 6, 5, 4, 3, 2, 1, 0]
    want = run_oracle(oracle.copy(), layers, ids)
    turns = [(turn - 1 + t) % interval == 1 for t in range(8)]
    expected = [
        mine and plan["copy_count"] > 0 for mine, (plan, _) in zip(turns, want, strict=True)
    ]
    assert [plan["promoted_count"] > 0 for plan, _ in want] == expected and any(expected)
    check_all(CONFIG, pp.set_controls(state, promote_interval=interval), oracle, layers, ids)
