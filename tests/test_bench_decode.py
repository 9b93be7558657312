"""The decode benchmark: the command at a small shape, its routing, its checks, and its report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app, flags

import pallas_pool as pp
from bench import (
    decode,
    decode_micro,
    decode_models,
    decode_passes,
    decode_profile,
    decode_report,
    decode_routing,
    host_memory,
)
from bench.decode_models import SHAPES
from bench.decode_passes import Cell
from bench.synthetic import Synthetic, generate

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "decode.py"


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The command as a script, from another folder, without a GPU."""
    folder = tmp_path_factory.mktemp("decode")
    command = [sys.executable, "-I", str(SCRIPT), f"--out={folder / 'out'}", "--tokens=6"]
    command.append("--controls=protect_recent=1")
    cpu = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(command, cwd=folder, env=cpu, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, folder / "out"


def _records(folder, part, kind):
    lines = (folder / f"{part}-check" / "timing.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_the_command_is_a_check_without_a_gpu(checked):
    output, folder = checked
    assert "No GPU: a check at a small shape. Its times are no measurement." in output
    assert not _records(folder, "decode", "setup")[0]["measurement"]
    manifest = json.loads((folder / "decode-check" / "manifest.json").read_text())
    assert manifest["argv"] == ["bench/decode.py", "--controls=protect_recent=1", "--tokens=6"]
    assert "bench/decode_passes.py" in manifest["sources"]
    assert manifest["environment"][host_memory.LIMIT].isdigit()


def test_the_command_compares_every_variant_with_plain_jax(checked):
    _, folder = checked
    checks = _records(folder, "decode", "check")
    first = [each for each in checks if each["against"]["variant"] == "offload"]
    assert {each["variant"] for each in first} == set(decode_passes.VARIANTS)
    assert max(each["largest_relative_error"] for each in checks) <= decode_passes.TOLERANCE
    # Whichever experts are resident, the library's variants make the same bits.
    later = [each for each in checks if each["steps"] == 6]
    assert {each["variant"] for each in later} == {"pool", "loop", "staging"}
    assert all(each["equal"] for each in later)


def test_the_command_counts_what_it_copies(checked):
    _, folder = checked
    rows = {record["variant"]: record for record in _records(folder, "decode", "rows")}
    assert set(rows) == {"pool", "loop", "staging"}
    assert rows["pool"]["promoted"] == rows["loop"]["promoted"] and sum(rows["pool"]["promoted"])
    assert not sum(rows["staging"]["promoted"]) and sum(rows["staging"]["staged"])
    bursts = [record for record in _records(folder, "decode", "burst") if record["variant"] == "pool"]
    assert [record["warm_up"] for record in bursts] == [True, False]
    assert sum(record["steps"] for record in bursts) == 6


def test_the_command_times_the_parts(checked):
    _, folder = checked
    cases = {record["case"] for record in _records(folder, "micro", "micro")}
    assert cases == {"copy_rows", "expert_ffn", "plain pinned copy", "device copy", "device add"}
    assert _records(folder, "micro", "check")[0]["equal"]


def test_the_report_of_a_check(checked):
    _, folder = checked
    text = decode_report.text(folder)
    assert text.count("**its times are no measurement.**") == 2
    assert "kept: " not in text and "MISSED: " not in text


def test_a_batch_decodes_segments_side_by_side():
    ids = np.arange(7 * 2 * 3).reshape(7, 2, 3)
    steps = decode_routing.for_batch(ids, 2)
    assert steps.shape == (3, 2, 2, 3)
    for step in range(3):
        np.testing.assert_array_equal(steps[step, :, 0], ids[step])
        np.testing.assert_array_equal(steps[step, :, 1], ids[3 + step])
    with pytest.raises(ValueError, match="7 tokens of routing are too few for batch 8"):
        decode_routing.for_batch(ids, 8)


def test_the_generated_routing_is_as_local_as_the_recorded():
    spec = SHAPES["moe-512"].generated._replace(layers=4)
    local = decode_routing.locality(generate(spec).ids)
    assert 0.33 < local < 0.41
    path = decode_routing.TRACES / "qwen3-30b-a3b.npy"
    if path.exists():
        recorded = decode_routing.recorded(path, 48, 128, 0)
        assert abs(decode_routing.locality(recorded.ids[60:]) - local) < 0.04
        assert recorded.ids.shape == (156, 48, 6)


def test_playing_steps_through_the_planner():
    """Against steps one by one: rows, the state on the way, and that at the end."""
    config = pp.PoolConfig(2, 12, rows_per_layer=4, staging_rows=4, width=4, step_map=False)
    ids = generate(Synthetic(tokens=10, layers=2, experts=12, top_k=2)).ids
    steps = decode_routing.for_batch(ids, 2)
    played = decode_routing.play(config, pp.init_state(config), steps, cut=3)
    state, copied = pp.init_state(config), []
    step = jax.jit(pp.step, static_argnums=0)
    for number, layers in enumerate(steps):
        if number == 3:
            _same_state(config, played.before, state)
        copied.append(0)
        for layer, own in enumerate(layers):
            plan, state = step(config, state, layer, own)
            copied[-1] += int(plan.copy_count)
    _same_state(config, played.end, state)
    assert played.counts.copied.tolist() == copied
    distinct = [sum(len(set(own.ravel().tolist())) for own in layers) for layers in steps]
    assert played.counts.selected.tolist() == distinct


def _same_state(config, got, want):
    got, want = pp.snapshot(config, got), pp.snapshot(config, want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, name)


def test_a_wrong_state_is_named():
    config = pp.PoolConfig(2, 12, rows_per_layer=4, staging_rows=4, width=4)
    state = pp.init_state(config)
    cell = Cell("pool", 1, 25.0)
    decode_passes.check_state(config, state, state, cell)
    with pytest.raises(AssertionError, match="protect_recent differ"):
        decode_passes.check_state(config, state, pp.set_controls(state, protect_recent=1), cell)


def test_outputs_are_compared_step_by_step():
    good = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    assert decode_passes.compare(good, good, 3)["equal"]
    bad = good.copy()
    bad[2, 1] *= 1.5
    decode_passes.check_close(decode_passes.compare(bad, good, 2))
    with pytest.raises(AssertionError, match="outputs differ"):
        decode_passes.check_close(decode_passes.compare(bad, good, 3))
    bad[0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match="outputs differ"):
        decode_passes.check_close(decode_passes.compare(bad, good, 1))


def test_no_burst_straddles_the_warm_up():
    assert decode_passes.bursts_of(0, 11, 4, 3) == [(0, 3), (3, 1), (4, 3), (7, 3), (10, 1)]
    assert decode_passes.bursts_of(0, 2, 2, 5) == [(0, 2)]
    assert decode_passes.bursts_of(0, 3, 0, 5) == [(0, 3)]


def test_the_first_cells_are_worth_most():
    cells = decode_passes.cells(decode_passes.VARIANTS, [1, 4], [12.5, 25.0])
    assert cells[:4] == [
        Cell("resident", 1, 100.0),
        Cell("pool", 1, 12.5),
        Cell("staging", 1, 12.5),
        Cell("loop", 1, 12.5),
    ]
    programs = {cell.program for cell in cells}
    assert len(programs) == len(cells) - 4  # Staging runs the pool's.


def test_weights_differ_from_expert_to_expert_and_layer_to_layer():
    shape = SHAPES["check"]
    layers = [decode_models.host_layer(shape, layer) for layer in range(2)]
    leaves = [leaf for each in layers for leaf in each.values()]
    rows = np.concatenate([np.asarray(leaf, np.float32).reshape(16, -1) for leaf in leaves])
    assert rows.shape[0] == 2 * 3 * 16
    correlation = np.corrcoef(rows)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.3
    assert rows.std() == pytest.approx(np.sqrt((2 / 32 + 1 / 16) / 3), rel=0.05)


def test_routes_of_the_ffn_alone():
    ids = np.array([[[5, 2], [2, -1]], [[7, 7], [1, 0]]])
    routes, distinct = decode_micro._routes(ids, share=4)
    assert routes.tolist() == [[[1, 0], [0, -1]], [[6, 6], [5, 4]]]
    assert distinct == 5


def test_profilers_take_over_from_each_other(monkeypatch):
    launches = [
        decode_profile.Launch("pool_step_fused", 2.0),
        decode_profile.Launch("pool_copy_rows", 30.0),
        decode_profile.Launch("expert_ffn_up", 5.0),
        decode_profile.Launch("expert_ffn_down", 4.0),
        decode_profile.Launch("gemm_fusion_dot_7", 3.0),
    ]
    prepared = []

    def prepare():
        prepared.append(1)
        return lambda: None

    profilers = {"blind": lambda run: launches[:2], "seeing": lambda run: launches}
    monkeypatch.setattr(decode_profile, "PROFILERS", profilers)
    name, seen = decode_profile.profile(prepare, {"ffn": 2, "planner": 1})
    assert name == "seeing" and len(prepared) == 2
    assert decode_profile.durations(seen, "ffn") == [5.0, 4.0]
    assert decode_profile.durations(seen, "rest") == [3.0]
    with pytest.raises(decode_profile.NoProfile, match="blind: 2 launches"):
        decode_profile.profile(prepare, {"ffn": 3})


def _write(folder, part, records):
    own = folder / f"{part}-m"
    own.mkdir()
    manifest = {"argv": ["bench/decode.py"], "device": "a GPU", "driver": "1", "packages": {"jax": "0"}}
    manifest |= {"python": "3", "git": {"commit": "abc", "dirty": False}, "time": "today"}
    (own / "manifest.json").write_text(json.dumps(manifest))
    shape = {"name": "m", "layers": 2, "experts": 10}
    setup = {
        "kind": "setup",
        "measurement": True,
        "shape": shape,
        "expert_bytes": 1_000_000,
        "routing": "made up",
        "tokens": 8,
        "top_k_of_routing": 2,
        "locality": 0.5,
        "controls": [],
        "dense": "none",
        "dense_bytes": 0,
    }
    lines = [json.dumps(record) for record in (setup, *records)]
    # As if it had been killed in the middle of a record.
    (own / "timing.jsonl").write_text("\n".join([*lines, '{"kind": "bu']))


def _micro_records():
    plain = {"launches": 0, "bytes": 50_000_000}
    yield {"kind": "micro", "case": "plain pinned copy", "seconds": 0.001, **plain}  # 50 GB/s.
    yield {"kind": "micro", "case": "device copy", "seconds": 5e-5, **plain}  # 1000 GB/s.
    for rows, microseconds in ((0, 6.0), (1, 21.0), (8, 200.0)):
        key = {"case": "copy_rows", "batch_size": 1, "lanes": 8, "rows": rows}
        moved = 2 * rows * 1_000_000
        yield {"kind": "micro", **key, "seconds": 2e-6 * microseconds, "launches": 2, "bytes": moved}
        # Three calls of two layers; one of them was disturbed.
        times = [microseconds - 4] * 2 + [1000.0, 2000.0] + [microseconds - 4] * 2
        yield {"kind": "micro_profile", **key, "bytes": moved, "calls": 3, "microseconds": times}
    key = {"case": "expert_ffn", "batch_size": 1, "lanes": 2, "rows": 4, "routing": "all distinct"}
    yield {"kind": "micro", **key, "seconds": 8e-6, "launches": 2, "bytes": 4_000_000}
    yield {"kind": "micro_profile", **key, "bytes": 4_000_000, "microseconds": [1.0, 1.5] * 2}


def test_the_report_of_the_parts(tmp_path):
    _write(tmp_path, "micro", _micro_records())
    text = decode_report.text(tmp_path)
    assert "| 8 | 1 | 21.00 (21.00-21.00) | 17.00 | 47.6 | 58.8 | 95.2% |" in text
    assert "- kept: copy_rows, 8 lanes, nothing to copy, at most 2.5 us: 2.00 us" in text
    assert "- kept: copy_rows, 8 lanes, 1 a layer, at least 90% of a plain copy: 95.2%" in text
    assert "- MISSED: copy_rows, 8 lanes, 8 a layer, at least 93% of a plain copy: 80.0%" in text
    # 2 MB a layer in 2.5 us are 800 GB/s.
    assert "- kept: FFN, batch 1, all distinct, at least 75% of a device copy: 80.0%" in text


def _decode_records():
    yield {"kind": "host", "distinct_layers": 1, "layers": 2, "bytes": 10_000_000}
    yield {"kind": "plain", "bytes": 10_000_000, "seconds": 0.0002}  # 50 GB/s.
    yield {"kind": "device_copy", "bytes": 10_000_000, "seconds": 1e-5}  # 1000 GB/s.
    copied = {"pool": [4, 4, 1, 1], "staging": [4, 4, 4, 4]}
    seconds = {"resident": 1e-4, "pool": 1.5e-4, "staging": 2.4e-4}
    for variant, each in seconds.items():
        budget = 100.0 if variant == "resident" else 25.0
        key = {"variant": variant, "batch_size": 2, "budget": budget}
        if variant in copied:
            rows = {"promoted": copied[variant], "staged": [0] * 4, "selected": [8] * 4}
            yield {"kind": "rows", **key, "warm_up": 2, **rows}
        for round_ in range(3):
            for first in (0, 2):
                span = {"first": first, "steps": 2, "warm_up": first == 0}
                took = 2 * each * (2 if first == 0 and variant == "pool" else 1)
                yield {"kind": "burst", **key, "round": round_, **span, "seconds": took}
    key = {"variant": "pool", "batch_size": 2, "budget": 25.0, "first": 2, "steps": 2}
    times = {"planner_us": [2.0] * 4, "copies_us": [10.0] * 4, "ffn_us": [20.0] * 8}
    yield {"kind": "profile", **key, **times, "rest_us_total": 60.0}
    yield {"kind": "left_out", "what": "offload", "why": "device memory"}


def test_the_report_of_decoding(tmp_path):
    pytest.importorskip("matplotlib")
    _write(tmp_path, "decode", _decode_records())
    written = decode_report.write(tmp_path)
    assert [path.name for path in written] == ["report.md", "speed.png", "split.png", "ratio.png"]
    assert all(path.stat().st_size for path in written)
    text = written[0].read_text()
    # 2 sequences in 150 us; 1 of 8 selected experts is copied.
    assert "| 2 | 25 | pool | 13333.3 (13333.3-13333.3) | 3 | 0.15 | 87.5% | 0.001 | 66.7% |" in text
    # Of 150 us: 4 planner, 20 copies, 80 FFN, 30 rest, and 16 nothing.
    line = next(line for line in text.splitlines() if line.startswith("| 2 | 25 | pool | 20 |"))
    assert line == "| 2 | 25 | pool | 20 | 80 | 30 | 4 | 16 | 150 | 2.67% | 50.0 | 100.0% |"
    assert "- kept: planner, batch 2, budget 25%, at most 3% of a step: 2.67%" in text
    # Steady: 1.6 times faster with 4 times fewer bytes. At 50 GB/s (20 us a row) and 100 us besides,
    # 180 us against 120 us could be had; if all else were reading 8 MB at 1000 GB/s, 88 against 28.
    assert "| 2 | 25 | steady | 1.60 | 4.00 | 0.40 | 0.38 | 0.79 |" in text
    assert "steady: at least 0.85 of the ratio of bytes: 0.40, of 0.79 that the bytes allow" in text
    assert "- left out: offload: device memory" in text
    assert "`python bench/decode.py` on a GPU, driver 1, Python 3, jax 0; commit abc; today." in text


def test_host_memory_is_asked_for(monkeypatch):
    assert 0 < host_memory.available() <= host_memory.total()
    monkeypatch.setenv(host_memory.LIMIT, "7")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    host_memory.prepare_environment()
    assert os.environ[host_memory.LIMIT] == "7"
    monkeypatch.delenv(host_memory.LIMIT)
    host_memory.prepare_environment()
    assert 0 < int(os.environ[host_memory.LIMIT]) * host_memory.GIB <= host_memory.total()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--variants=pool,none", "none is none of resident, pool"),
        ("--budgets=0", "a percentage in"),
        ("--batches=0", "at least 1"),
        ("--rounds=1,2,3", "no more than there are batches"),
        ("--controls=gate=1", "NAME=NUMBER with a name of promote_limit"),
        ("--shapes=unknown", "unknown is none of"),
    ],
)
def test_flags_are_checked(flag, message):
    values = flags.FlagValues()
    decode.define_flags(values)
    values(["decode.py", flag])
    with pytest.raises(app.UsageError, match=message):
        decode.controls_of(decode.options(values))


@pytest.mark.parametrize(
    ("given", "rounds"),
    [
        ([], {1: 2, 4: 1}),
        (["--batches=8"], {8: 2}),
        (["--batches=1,2,3"], {1: 2, 2: 1, 3: 1}),
        (["--rounds=3"], {1: 3, 4: 3}),
    ],
)
def test_rounds_of_each_batch(given, rounds):
    values = flags.FlagValues()
    decode.define_flags(values)
    values(["decode.py", *given])
    assert decode.rounds_of(decode.options(values)) == rounds


def test_rest_of_a_step_reads_all_dense_weights():
    """Every dense weight matters to what a step ends with."""
    shape = SHAPES["check"]
    params = decode_models.make_params(shape, dense=True)
    ids = generate(shape.generated._replace(tokens=2)).ids
    forced = decode_models.make_forced(shape, decode_routing.for_batch(ids, 1))
    experts = tuple(decode_models.host_layer(shape, layer) for layer in range(shape.layers))

    def squares(params):
        moe = decode_models.offload_moe(experts)
        carry = decode_models.make_carry(forced, ())
        carry, _ = decode_models.decode_step(shape, moe, params, forced, carry)
        return jnp.sum(carry.hidden[0] ** 2)

    gradients = jax.jit(jax.grad(squares))(params._replace(head=None))
    for layer, dense in enumerate(gradients.layers):
        for name, gradient in dense._asdict().items():
            columns = np.abs(np.asarray(gradient, np.float32)).max(0) > 0
            wanted = ids[0, layer] if name == "router" else slice(None)
            assert columns[wanted].all(), (layer, name)
