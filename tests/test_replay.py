"""The replay of traces: the planner's counts, budgets, findings, and the command end to end."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pallas_pool as pp
from bench import budgets, findings, policies, replay_report
from bench.counts import Counts
from bench.drive import drive
from bench.synthetic import Synthetic, generate
from tests.support import KERNELS
from tests.test_traces import COUNTS, LIMITED, TRACES, recorded

ROOT = Path(__file__).resolve().parents[1]
SMALL = Synthetic(tokens=19, layers=3, experts=12, top_k=3, zipf=1, reuse=0.3)
RESIDENTS = (
    pp.PoolConfig(3, 12, (5, 2, 0), 4, 4, step_map=False),
    [[9, 1, 4, 3, 0], [7, 11], []],
)


@pytest.mark.parametrize("name, rows, controls, want", COUNTS)
def test_recorded_counts(name, rows, controls, want):
    ids = recorded(name)
    config = budgets.Geometry(ids.shape[1], 128, ids.shape[2]).pool(ids.shape[1] * rows)
    counts = drive(config, ids, None, controls, kernel="masked").counts
    figures = (counts.selected, counts.hits, counts.promoted, counts.staged)
    assert tuple(int(x.sum()) for x in figures) == want


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_counts_alike_in_chunks_of_any_size(kernel):
    ids = generate(SMALL).ids
    config, residents = RESIDENTS
    want = policies.least_recent(config, ids, residents)
    told = []
    for chunk in (8, 100):
        driven = drive(config, ids, residents, kernel=kernel, chunk=chunk, progress=told.append)
        for got, other in zip(driven.counts, want, strict=True):
            assert np.array_equal(got, other)
    assert told == [8, 8, 3, 19]


def test_a_closed_gate_keeps_the_residents():
    ids = generate(SMALL).ids
    config, residents = RESIDENTS
    frozen = drive(config, ids, residents, {"gate": False}, kernel="masked")
    assert pp.controls(frozen.state)["gate"] == 0 and not frozen.counts.promoted.any()
    resident = [np.isin(ids[:, layer], experts).sum() for layer, experts in enumerate(residents)]
    assert frozen.counts.hits.tolist() == resident


def test_counts():
    ids = np.array([[[1, 1, 2], [-1, -1, -1]], [[0, 2, -1], [-1, -1, -1]]])
    counts = Counts.of(ids, np.array([[1, 0], [0, 0]]), np.array([[0, 0], [1, 0]]))
    assert counts.selected.tolist() == [4, 0] and counts.hits.tolist() == [2, 0]
    assert counts.hit_rate == 50 and counts.copies == 1
    np.testing.assert_array_equal(counts.layer_hit_rates, [50, np.nan])


def test_budgets():
    geometry = budgets.Geometry(layers=3, experts=12, lanes=3)
    assert geometry.pool(24).rows_per_layer == 8 and geometry.width == 4
    assert geometry.pool(26).rows_per_layer == (9, 9, 8)
    assert [budgets.parse_bytes(x) for x in ("17", "1.5kb", "2 MiB")] == [17, 1500, 2**21]
    for text in ("", "-1", "1TBB", "1e3"):
        with pytest.raises(ValueError, match="is no size like"):
            budgets.parse_bytes(text)
    assert budgets.rows_of_bytes(geometry, 1099, 100) == 6  # The staging rows count.
    assert budgets.rows_of_bytes(geometry, 10**9, 100) == 36
    with pytest.raises(ValueError, match="499 bytes hold 4 rows of 100 bytes: no pool beside"):
        budgets.rows_of_bytes(geometry, 499, 100)
    assert budgets.default_rows(geometry, 9) == [2, 3, 4, 6, 8, 12]
    assert budgets.default_rows(budgets.Geometry(1, 1, 1), 1) == [1]
    qwen = budgets.default_rows(budgets.Geometry(48, 128, 6), 288)
    assert qwen == [5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    trace = generate(SMALL)
    assert budgets.Geometry.of(trace, 12) == geometry
    assert (budgets.cycles(trace) == 9).all()


def test_where_a_curve_flattens():
    bend = findings.bend([2, 4, 8, 16], [10, 50, 60, 65])
    assert bend.at == 1 and bend.before == 20 and bend.after == 1.25
    for rates in ([0, 1, 50], [0, 20, 60], [0, 22, 60], [50, 50, 50], [3, 9]):
        assert findings.bend([2, 4, 8][: len(rates)], rates) is None
    text = findings.flattening(2, [4, 8, 16, 32], [10, 50, 60, 65])
    assert text == (
        "The hit rate flattens beyond 4 rows a layer: up to there a row a layer gains 20.00 points "
        "on average, beyond 1.25; the last step, from 8 to 16 rows, gains 5.00 points."
    )
    assert "does not flatten" in findings.flattening(1, [1, 2, 3], [0, 1, 50])
    assert "is the same" in findings.flattening(1, [1, 2, 3], [40, 40, 40])
    assert "three budgets" in findings.flattening(1, [1, 2], [0, 40])


def test_the_cliff_and_the_limits():
    text = findings.cliff(4, np.array([9, 10, 10, 8]), [6, 9, 10], [0, 12.345, 50])
    assert "up to 10 distinct experts over all 4 layers" in text and "(2.5 a layer)" in text
    assert "1.5 rows a layer, fewer than 100 % of the tokens need (0.00 % hits)" in text
    assert "2.25 rows a layer, fewer than 50 % of the tokens need (12.35 % hits)." in text
    assert findings.cliff(4, np.array([9]), [9], [50]).endswith("none of these budgets.")
    assert findings.limits(4, 8, 50, 80, 40).endswith("policy limits most.")
    assert findings.limits(4, 8, 50, 60, 40).endswith("size limits most.")
    assert findings.limits(4, 8, 100, 100, 100) == "At 2 rows a layer everything hits."


def test_the_cliff_is_where_the_planner_falls_off():
    """Every token selects the same experts: all hit where the pool holds them, and none where it
    lacks the rows of one layer step."""
    trace = generate(SMALL._replace(reuse=1))
    cycle = int(budgets.cycles(trace).max())
    geometry = budgets.Geometry.of(trace, SMALL.experts)
    rates = []
    for rows in (cycle - SMALL.top_k, cycle):
        config = geometry.pool(rows)
        # None of the residents is ever selected.
        other = [np.setdiff1d(range(12), trace.ids[0, layer]) for layer in range(3)]
        residents = [x[:n] for x, n in zip(other, config.layer_rows, strict=True)]
        rates.append(drive(config, trace.ids, residents, kernel="masked").counts.hit_rate)
    assert rates == [0, pytest.approx(100 * 18 / 19)]


def test_what_a_copy_costs():
    counts = Counts(4, np.array([50]), np.array([6]), np.array([2]))
    bus = replay_report.Bus(row_bytes=10**6, gbs=50)
    assert bus.bytes_a_token(counts) == 2e6 and bus.seconds_a_token(counts) == pytest.approx(4e-5)
    unknown = replay_report.Bus(None, 50)
    assert unknown.bytes_a_token(counts) is None and unknown.seconds_a_token(counts) is None


def replay(tmp_path, *arguments, **options):
    """Runs the command as a script, from another folder, without the package installed."""
    command = [sys.executable, "-I", str(ROOT / "bench" / "replay.py"), *map(str, arguments)]
    cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=tmp_path, env=cpu, capture_output=True, text=True, check=False, **options
    )


def test_the_command_on_a_synthetic_trace(tmp_path):
    out = tmp_path / "out"
    spec = ",".join(f"{name}={value}" for name, value in SMALL._asdict().items())
    sweep = [f"--synthetic={spec}", "--rows=8,2,4", "--row_bytes=3MB", "--bus_gbs=25"]
    run = replay(tmp_path, *sweep, "--promote_min_misses=2", "--chunk=4", f"--out={out}")
    assert run.returncode == 0, run.stderr
    assert "synthetic: 19 tokens, 3 layers, top 3 of 12 experts." in run.stdout
    assert "promote_min_misses 2" in run.stdout and "MB  bus ms" in run.stdout
    assert (out / "replay.png").read_bytes().startswith(b"\x89PNG")
    ids = np.load(out / "trace.npy")
    assert np.array_equal(ids, generate(SMALL).ids)

    report = json.loads((out / "replay.json").read_text())
    assert report["manifest"]["argv"][0] == "bench/replay.py" and report["cycle_rows"] == 9
    assert list(report["findings"]) == ["flattening", "cliff", "limits"]
    assert all(text in run.stdout for text in report["findings"].values())
    with (out / "replay.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["pool_rows"] for line in lines] == ["6"] * 3 + ["12"] * 3 + ["24"] * 3
    config = budgets.Geometry(3, 12, 3).pool(12)
    limited = drive(config, ids, None, {"promote_min_misses": 2}, kernel="masked").counts
    planner, lfu, best = lines[3:6]
    assert [line["policy"] for line in (planner, lfu, best)] == ["planner", "lfu", "optimum"]
    assert int(planner["promoted"]) == limited.promoted.sum()
    assert int(planner["staged"]) == limited.staged.sum() > 0
    assert float(planner["bytes_a_token"]) == limited.copies * 3e6
    assert float(planner["bus_seconds_a_token"]) == pytest.approx(limited.copies * 3e6 / 25e9)
    assert int(planner["bank_bytes"]) == 3_000_000 * (12 + 4)
    residents = [range(4)] * 3
    assert int(lfu["hits"]) == policies.least_frequent(config, ids, residents).hits.sum()
    assert int(best["hits"]) == policies.optimum(config, ids, residents).hits.sum()
    with (out / "layers.csv").open() as file:
        by_layer = list(csv.DictReader(file))
    assert len(by_layer) == 3 * 3 * 3
    assert [int(line["hits"]) for line in by_layer[9:12]] == limited.hits.tolist()


def test_the_command_on_a_csv_with_bytes_and_a_warm_start(tmp_path):
    """Layers have the file's numbers; the bytes hold the staging rows too."""
    ids = generate(SMALL).ids
    lines = [f"{e},{t},{layer + 3},{lane}\n" for (t, layer, lane), e in np.ndenumerate(ids)]
    (tmp_path / "a.csv").write_text("e,t,layer,k\n" + "".join(lines[::-1]))
    names = ["--token_column=t", "--expert_column=e", "--lane_column=k"]
    size = ["--bytes=2KB,1.1kb", "--row_bytes=100", "--out=out", "--warm_start=a.csv"]
    run = replay(tmp_path, "a.csv", *names, *size)
    assert run.returncode == 0, run.stderr
    assert (
        "a.csv: 19 tokens, 3 layers (numbers 3 to 5), top 3 of 16 experts, the power of two "
        in (run.stdout)
    )
    report = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert report["layers"] == [3, 4, 5] and report["manifest"]["argv"][1] == "a.csv"
    assert [line["pool_rows"] for line in report["by_budget"]] == [7] * 3 + [16] * 3
    assert [line["bank_bytes"] for line in report["by_budget"]] == [1100] * 3 + [2000] * 3
    for rows, line in ((7, report["by_budget"][0]), (16, report["by_budget"][3])):
        config = pp.spread_rows(pp.PoolConfig(3, 16, 1, 4, 4), ids, rows)
        want = policies.least_recent(config, ids, pp.warm_start(config, ids))
        assert line["hits"] == want.hits.sum()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bad.csv"], "bad.csv: line 3, field 'layer': 'x' is no integer\n"),
        (["none.npy"], "none.npy: No such file or directory\n"),
        ([], "one argument, the file of a routing trace, or --synthetic\n"),
        (
            ["bad.csv", "--synthetic="],
            "one argument, the file of a routing trace, or --synthetic\n",
        ),
        (["--synthetic=tokens=0"], "--synthetic: tokens must be at least 1, got 0\n"),
        (["--synthetic=", "--rows=0"], "--rows: '0' is not in [1, 64]\n"),
        (["--synthetic=", "--rows=1", "--bytes=1"], "either --rows or --bytes\n"),
        (["--synthetic=", "--bytes=1GB"], "--bytes needs --row_bytes\n"),
        (["--synthetic=", "--bytes=1KB", "--row_bytes=1kB"], "no pool beside the 4 staging rows\n"),
        (["--synthetic=", "--row_bytes=x"], "--row_bytes: 'x' is no size like 9437184, 1.5GB or"),
        (["--synthetic=", "--warm_start=good.npy"], "good.npy: 2 layers, but the trace has 16\n"),
        (["good.npy", "--experts=4"], "good.npy: token 0, layer 0, lane 0: 5: an expert id must"),
        (["good.npy", "--experts=2000000000"], "num_experts must be in [1, 1073741823]"),
    ],
)
def test_errors_of_the_command(tmp_path, arguments, message):
    (tmp_path / "bad.csv").write_text("token,layer,expert\n0,0,1\n0,x,1\n")
    np.save(tmp_path / "good.npy", np.full((1, 2, 1), 5))
    run = replay(tmp_path, *arguments)
    assert run.returncode == 1 and message in run.stderr + run.stdout
    assert "Traceback" not in run.stderr and not (tmp_path / "out").exists()


def test_the_command_on_a_recorded_trace(tmp_path):
    path = TRACES / "qwen3-30b-a3b.npy"
    if not path.exists():
        pytest.skip(f"no recorded traces at {TRACES}")
    controls = [f"--{name}={value}" for name, value in LIMITED.items()]
    run = replay(tmp_path, path, "--rows=32", "--kernel=fused", "--out=out", *controls)
    assert run.returncode == 0, run.stderr
    assert "156 tokens, 48 layers, top 6 of 128 experts, the power of two above" in run.stdout
    planner = json.loads((tmp_path / "out" / "replay.json").read_text())["by_budget"][0]
    names = ("selected", "hits", "promoted", "staged")
    assert tuple(planner[name] for name in names) == COUNTS[-1][3]
