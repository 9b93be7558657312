"""The benchmark end to end, at a small size: files, checks, tables. No times are judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_pool as pp
from bench import cases, chain, correctness, table, timing
from bench.implementations import IMPLEMENTATIONS
from bench.random_run import random_run

ROOT = Path(__file__).resolve().parents[1]
CONFIG = pp.PoolConfig(num_layers=2, num_experts=12, rows_per_layer=7, staging_rows=4, width=4)
MANIFEST = {
    "argv": ["bench/run.py", "--replays=7"],
    "device": "a GPU",
    "driver": "1.2",
    "python": "3.11",
    "packages": {"jax": "0.10"},
    "git": {"commit": "abc", "dirty": True},
    "time": "today",
}


def test_the_command(tmp_path):
    """As a script, from another folder, without the package installed, and without a GPU."""
    command = [sys.executable, "-I", str(ROOT / "bench" / "run.py"), "--kernels=masked"]
    command += ["--plain=vectorized", "--widths=4", "--layers=2", "--experts=12"]
    command += ["--rows_per_layer=7", "--sms=90", f"--out={tmp_path / 'out'}"]
    cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        command, cwd=tmp_path, env=cpu, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "No timing: it needs an NVIDIA GPU" in run.stdout
    assert "111 comparisons and 0 random steps of masked, vectorized: all equal" in run.stdout
    correct = json.loads((tmp_path / "out" / "correctness.json").read_text())
    assert len(correct["comparisons"]) == 111 and not correct["differences"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["argv"][1:3] == ["--widths=4", "--layers=2"]
    assert "bench/run.py" in manifest["sources"] and "out" not in manifest["flags"]
    resources = json.loads((tmp_path / "out" / "resources.json").read_text())
    assert list(resources) == ["masked_4_sm90"]
    assert (tmp_path / "out" / "artifacts" / "masked_4_sm90.ttir").exists()


def test_a_difference_is_named():
    comparison = next(c for c in correctness.comparisons() if "width_16-gate_1-mix" in c.name)
    plans, snapshot = correctness.expected_of(comparison)
    masked = IMPLEMENTATIONS["masked"]
    plans[0]["routes"][3] += 1
    found = correctness.difference(comparison, masked, (plans, snapshot))
    assert found.startswith(f"{comparison.name}: masked: plan 0: routes[3] is ")
    plans[0]["routes"][3] -= 1
    snapshot["clock"] += 1
    found = correctness.difference(comparison, masked, (plans, snapshot))
    assert found == f"{comparison.name}: masked: state: clock is 1, not 2"


@pytest.mark.parametrize("name", ["one_staged", "promote_2"])
def test_timing_of_a_case(name):
    """On a CPU the times mean nothing, but chains, states, counts and records are real."""
    case = cases.patterns(CONFIG.width, [2])[name](CONFIG, np.random.default_rng(0))
    stream, begin = chain.make_stream(CONFIG, case), chain.start(CONFIG, case)
    efforts = {
        "masked": timing.Effort(2, 3),
        "loop": timing.Effort(2, 3),
        "vectorized": timing.Effort(1, 2),
    }
    chains = {}
    for each in efforts:
        planner = IMPLEMENTATIONS[each]
        carry = chain.copy_for(CONFIG, planner, begin)
        chains[each] = chain.compile_chain(CONFIG, planner, carry, stream, 2)
    if jax.default_backend() == "gpu":
        assert chains["masked"].launches == {"kCommandBuffer": 1}
    *batches, checks = timing.time_case(CONFIG, case, chains, efforts)
    order = [(each["implementation"], each["batch"]) for each in batches]
    assert order[:4] == [("masked", 0), ("loop", 0), ("loop", 1), ("masked", 1)]
    assert order[4:] == [("vectorized", 0)]
    assert checks["same_states"] == list(efforts)
    assert (checks["promoted"], checks["staged"]) == (case.promoted, case.staged)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", pp.KERNELS)
def test_durations_of_single_kernels(kernel):
    case = cases.all_hit(CONFIG, np.random.default_rng(0))
    durations = timing.kernel_durations(CONFIG, case, kernel, 3)
    assert len(durations) == 3 * CONFIG.num_layers and min(durations) > 0


def test_random_run():
    assert list(random_run(CONFIG, 1500, 0, ["masked", "vectorized"])) == [1000, 2000]


def _records():
    for name, scale in (("loop", 2e-6), ("masked", 1e-6)):
        yield {"kind": "chain", "width": 4, "implementation": name, "launches": {"kWhile": 2}}
        for batch in range(3):
            yield {
                "kind": "batch",
                "width": 4,
                "case": "all_hit",
                "implementation": name,
                "batch": batch,
                "steps": 10,
                "seconds": scale * 10 * (batch + 1),
            }
    key = {"kind": "kernel", "width": 4, "case": "all_hit", "implementation": "masked"}
    yield key | {"microseconds": [1.0, 2.0, 6.0]}


def test_tables(tmp_path):
    lines = [json.dumps(record) for record in _records()]
    (tmp_path / "timing.jsonl").write_text("\n".join(lines))
    records = table.read_records(tmp_path)
    loop, masked = table.summarize(records)
    assert loop.quartiles == pytest.approx((3, 4, 5)) and loop.ratio == 1 and loop.kernel is None
    assert masked.ratio == pytest.approx(0.5) and masked.kernel == (2, 3, 6)
    assert "masked" in table.terminal_table([loop, masked])
    notes = table.graph_notes(records)
    assert notes[0] == "Not one command buffer, but 2 kWhile a call: loop at 4 lanes, masked at 4 lanes."
    section = table.run_section([loop, masked], notes, MANIFEST)
    assert "| 4 | `all_hit` | 4.00 (3.00-5.00) | 2.00 (1.50-2.50), 0.50x |" in section
    assert "| 4 | `all_hit` | 2.00 / 3.00 / 6.00 |" in section
    assert "`python bench/run.py --replays=7` on a GPU, driver 1.2" in section
    start, end = table.MARKERS
    assert table.replace_section(f"a\n{start}\nold\n{end}\nb", "new") == (
        f"a\n{start}\nnew\n{end}\nb"
    )
    with pytest.raises(ValueError, match="followed by"):
        table.replace_section("no markers", "new")
