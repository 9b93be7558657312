"""The sweeps and their plots at a small size, and flashlib's part without a GPU. No times are judged."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_pool as pp
from bench import cases, chain, peers, plots, sweep, table
from bench.implementations import IMPLEMENTATIONS
from tests.oracle import Oracle

ROOT = Path(__file__).resolve().parents[1]
WANTED = sweep.Options(
    sweeps=("promotions", "pool"),
    kernels=("fused", "masked"),
    widths=(4, 8),
    layers=3,
    pool_rows=(8, 14, 20),
    pool_experts=64,
    pool_promotions=("1", "width"),
    promotions=(0, 1, 2, 4, 8),
    experts=24,
    rows_per_layer=10,
    step_map=False,
    forwards=2,
    batches=2,
    batch_ms=0.0,
    cell_s=0.0,
    profile_turns=0,
    scan_turns=1,
    threads=2,
    seed=0,
)
POINTS = sweep.points(WANTED)
HAS_PEER = all(importlib.util.find_spec(name) for name in peers.NEEDED)


def test_points():
    assert [(each.sweep, each.config.rows, each.config.width) for each in POINTS] == [
        ("promotions", 30, 4), ("promotions", 30, 8),
        ("pool", 24, 4), ("pool", 24, 8), ("pool", 42, 4), ("pool", 42, 8), ("pool", 60, 4), ("pool", 60, 8),
    ]  # fmt: skip
    assert [each.promotions for each in POINTS[:4]] == [
        (0, 1, 2, 4),
        (0, 1, 2, 4, 8),
        (1, 4),
        (1, 8),
    ]
    pool = {each.config.num_experts for each in POINTS if each.sweep == "pool"}
    assert pool == {WANTED.pool_experts}


@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{p.sweep}-{p.config.rows}-{p.config.width}"
)
def test_counts_by_the_oracle(point):
    """Every case is as short as it may be, and settled after its first time round."""
    config = point.config
    for promoted in point.promotions:
        case = sweep.make_case(config, promoted, 0)
        assert case.turns == (cases.fewest_turns(config, promoted) if promoted else 1)
        oracle = Oracle.of(config)
        seen = set()
        for circle in range(4):
            for turn in case.ids:
                for layer, ids in enumerate(turn):
                    plan = oracle.step(layer, ids)
                    if circle:
                        seen.add((plan["promoted_count"], plan["staged_count"]))
        assert seen == {(promoted, 0)}


def test_a_shorter_circle_is_refused():
    config = POINTS[0].config
    turns = cases.fewest_turns(config, 1) - 1
    with pytest.raises(ValueError, match="no 1 promotions a step"):
        cases.promote(config, np.random.default_rng(0), 1, turns)


def _settled(config, promoted):
    """A case, and the carry after its first time round."""
    case = sweep.make_case(config, promoted, 0)
    stream = chain.make_stream(config, case, case.turns + 3)  # More room than it has turns.
    carry = chain.settle(config, IMPLEMENTATIONS["vectorized"], case, stream)
    return case, stream, carry


def _lru_misses(problem, turns):
    """Misses of each step by what flashlib documents: every selected id resident, the least recently
    used slots given up, the lowest of them where they tie."""
    tables = {name: table.copy() for name, table in problem.tables.items()}
    slot_of, owner, used = (tables[name] for name in ("slot_of_id", "id_of_slot", "lru_usage"))
    clock, misses = int(tables["lru_step"]), []
    for turn in range(problem.turn, problem.turn + turns):
        for layer, ids in enumerate(problem.ids[turn % problem.turns]):
            clock += 1
            keys = np.unique(layer * problem.experts + ids)
            missing = keys[slot_of[keys] < 0]
            used[slot_of[keys[slot_of[keys] >= 0]]] = clock
            for key in missing:
                slot = np.argmin(used)
                assert used[slot] < clock
                slot_of[owner[slot]] = -1
                slot_of[key], owner[slot], used[slot] = slot, key, clock
            misses.append(len(missing))
    return misses


@pytest.mark.parametrize("promoted", [0, 1, 4, 8])
@pytest.mark.parametrize("point", [POINTS[1], POINTS[5]], ids=["promotions", "pool"])
def test_misses_of_the_peer(point, promoted):
    config = point.config
    case, _, carry = _settled(config, promoted)
    snapshot, turn = pp.snapshot(config, carry.state), int(carry.turn)
    problem = peers.make_problem(config, case, snapshot, turn, WANTED.forwards)
    assert set(_lru_misses(problem, 3 * case.turns)) == {promoted}
    assert len(problem.ids) == case.turns + WANTED.forwards - 1
    assert all(each.dtype == np.int32 for each in problem.tables.values())


@pytest.mark.skipif(not HAS_PEER, reason="needs PyTorch and flashlib")
@pytest.mark.skipif(
    jax.default_backend() != "gpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("promoted", [0, 1, 4])
def test_the_peer_itself(promoted):
    config, on_gpu = POINTS[1].config, jax.default_backend() == "gpu"
    case, _, carry = _settled(config, promoted)
    snapshot, turn = pp.snapshot(config, carry.state), int(carry.turn)
    problem = peers.make_problem(config, case, snapshot, turn, WANTED.forwards)
    peer = peers.Peer(problem, "cuda" if on_gpu else "cpu")
    if on_gpu:
        peer.capture()
    assert peer.check_circle() >= case.turns * config.num_layers
    peer._problem = problem._replace(promoted=promoted + 1)
    with pytest.raises(AssertionError, match=f"copied {promoted} experts, not {promoted + 1}"):
        peer.check_counts()


class _StillPeer:
    """Stands in for flashlib where there is none."""

    def __init__(self, problem):
        self.problem = problem

    def capture(self):
        pass

    call = wait = capture

    def check_counts(self):
        return 1

    check_circle = check_counts


def _check_replays(records, names, batches):
    *timed, checks = records
    assert {each["implementation"] for each in timed} == set(names)
    assert [each["batch"] for each in timed] == sorted(list(range(batches)) * len(names))
    assert all(each["steps"] == 6 * each["replays"] for each in timed)
    assert checks["same_states"] == list(WANTED.kernels) and checks["counted_steps"] > 0
    return checks


def test_timing_of_a_cell(monkeypatch):
    """On a CPU the times mean nothing, but chains, states, counts and records are real."""
    point = sweep.Point("pool", POINTS[2].config, (4,))
    prepared = sweep.prepare(point, WANTED)
    (cell,) = prepared.cells
    efforts = iter([sweep.timing.Effort(3, 1), sweep.timing.Effort(3, 2)])
    monkeypatch.setattr(sweep, "effort", lambda seconds, wanted: next(efforts))
    checks = _check_replays(list(sweep.time_cell(prepared, cell, WANTED)), WANTED.kernels, 3)
    assert (checks["rows"], checks["width"], checks["promoted"]) == (24, 4, 4)
    assert len(list(sweep.chain_records(prepared, WANTED))) == 2

    snapshot = pp.snapshot(point.config, cell.settled.state)
    problem = peers.make_problem(point.config, cell.case, snapshot, int(cell.settled.turn), 2)
    monkeypatch.setattr(peers, "Peer", _StillPeer)
    monkeypatch.setattr(sweep, "effort", lambda seconds, wanted: sweep.timing.Effort(2, 1))
    records = list(peers.time_cell(prepared, cell, problem, WANTED))
    assert _check_replays(records, [*WANTED.kernels, peers.PEER], 2)["peer_counted_steps"] == 2


def test_slow_kernels_are_replayed_less():
    wanted = WANTED._replace(batches=10, batch_ms=20.0, cell_s=0.6)
    assert sweep.effort(1e-3, wanted) == (10, 20)
    assert sweep.effort(0.15, wanted) == (4, 1)
    assert sweep.effort(1.0, wanted) == (sweep.SLOW_BATCHES, 1)


def _records():
    """As if measured: every implementation in every cell of the default sweeps."""
    for implementation, scale in (("fused", 3.0), ("loop", 12.0), ("flashlib", 5.0)):
        grid = [("promotions", 12384, k) for k in (0, 1, 16)]
        grid += [("pool", rows, k) for rows in (3072, 98304) for k in (1, 16)]
        for name, rows, promoted in grid:
            key = {"sweep": name, "rows": rows, "width": 16, "promoted": promoted}
            key["implementation"] = implementation
            for batch in range(3):
                yield {"kind": "batch", **key, "seconds": 1e-6 * scale * (9 + batch), "steps": 10}
            yield {"kind": "kernel", **key, "microseconds": [scale] * 99 + [11 * scale]}
        yield {"kind": "computes", "implementation": implementation, "text": "what it does"}


def _write(folder, records, name):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(map(json.dumps, records)))


def test_tables_and_plots(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    records = list(_records())
    _write(ours, [each for each in records if each["implementation"] != "flashlib"], "sweep.jsonl")
    _write(theirs, [each for each in records if each["implementation"] != "loop"], "peers.jsonl")
    read = table.read_sweeps([ours, theirs])
    assert len(read) == len(records)  # The second run's figures of fused are not mixed in.
    row = table.summarize_sweep(read)[0]
    assert row[:5] == ("promotions", 12384, 16, 0, "fused")
    assert row.quartiles == pytest.approx((2.85, 3.0, 3.15))
    assert row.kernel == pytest.approx((3.0, 3.3, 33.0, 33.0))
    section = table.sweep_section(read)
    assert "| pool rows | lanes | promoted | fused | loop | flashlib |" in section
    assert "| 12384 | 16 | 0 | 3.00; 3.00 / 3.30 / 33.00 | 12.00; " in section
    assert "`flashlib`: what it does" in section
    assert "flashlib" in table.sweep_terminal_table(table.summarize_sweep(read))

    assert plots.write([ours, theirs]) == [ours / "promotions.png", ours / "pool.png"]
    for path in ours.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    only = [each for each in records if each["kind"] == "batch" and each["sweep"] == "pool"]
    _write(tmp_path / "replay", only, "sweep.jsonl")
    assert plots.write([tmp_path / "replay"]) == [tmp_path / "replay" / "pool.png"]
    with pytest.raises(FileNotFoundError, match=r"neither sweep\.jsonl nor peers\.jsonl"):
        table.read_sweeps([tmp_path])


def _run_script(name, folder):
    command = [sys.executable, "-I", str(ROOT / "bench" / name), f"--out={folder / 'out'}"]
    cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=folder, env=cpu, capture_output=True, text=True, check=False)


def test_refusals(tmp_path):
    run = _run_script("sweep.py", tmp_path)
    assert run.returncode == 2
    assert run.stderr.strip().endswith("it needs an NVIDIA GPU, and JAX finds none here.")
    run = _run_script("peers.py", tmp_path)
    assert run.returncode == 2
    reason = "it needs an NVIDIA GPU" if HAS_PEER else "flashlib not installed"
    assert reason in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()
