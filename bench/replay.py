"""How large a bank a model needs, and whether its routing caches: `python bench/replay.py TRACE`.

TRACE is a routing trace: a .npy or .npz array [tokens, layers, top_k] of expert ids, -1 for none,
or a .csv with a line for each token, layer and expert; --synthetic=... makes one up. The planner
itself replays it, a token at a time, at every budget. Beside it stand two policies that are
computed apart: the offline optimum and least-frequently-used.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # Run as a script: import the checkout that it stands in, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from absl import app, flags
from tqdm import tqdm

import pallas_pool as pp
from bench import budgets, findings, policies, replay_report, synthetic, traces
from bench.drive import drive
from bench.manifest import ROOT, manifest
from bench.replay_report import LFU, OPTIMUM, PLANNER
from pallas_pool.config import INT32_MAX

APART = {LFU: policies.least_frequent, OPTIMUM: policies.optimum}

_ROWS = flags.DEFINE_list("rows", None, "budgets: bank rows a layer; a sweep by default")
_BYTES = flags.DEFINE_list(
    "bytes", None, "budgets instead: bytes of the whole bank, staging rows included, like 24GiB"
)
_ROW_BYTES = flags.DEFINE_string("row_bytes", None, "an expert row's size, like 9437184 or 9MiB")
_BUS = flags.DEFINE_float("bus_gbs", 50, "GB/s (10**9 bytes) from the host to the GPU", 1e-9)
_GATE = flags.DEFINE_bool("gate", True, "control: whether experts may be promoted")
_LIMIT = flags.DEFINE_integer("promote_limit", 0, "control: promotions a step, or 0", 0, INT32_MAX)
_INTERVAL = flags.DEFINE_integer(
    "promote_interval", 1, "control: promote in forwards 1, 1+n, 1+2n, ...", 1, INT32_MAX
)
_MIN_MISSES = flags.DEFINE_integer(
    "promote_min_misses", 1, "control: promote an expert only from this miss on", 1, INT32_MAX
)
_RECENT = flags.DEFINE_integer(
    "protect_recent", 0, "control: rows used in the last n forwards are no victims", 0, INT32_MAX
)
_CONTROLS = (_GATE, _LIMIT, _INTERVAL, _MIN_MISSES, _RECENT)
_EXPERTS = flags.DEFINE_integer(
    "experts", None, "experts of a layer; by default the largest id + 1, up to a power of two", 1
)
_WARM = flags.DEFINE_string("warm_start", None, "trace whose most frequent experts start resident")
_TOKEN = flags.DEFINE_string("token_column", "token", "a .csv's column of tokens")
_LAYER = flags.DEFINE_string("layer_column", "layer", "a .csv's column of layers")
_EXPERT = flags.DEFINE_string("expert_column", "expert", "a .csv's column of expert ids")
_LANE = flags.DEFINE_string(
    "lane_column", None, "a .csv's column that orders a step's experts; the file's order by default"
)
_ARRAY = flags.DEFINE_string("array", None, "name of the array in an .npz")
_SYNTHETIC = flags.DEFINE_list(
    "synthetic", None, "make a trace up: tokens=,layers=,experts=,top_k=,zipf=,reuse=,seed="
)
_KERNEL = flags.DEFINE_enum(
    "kernel", None, tuple(pp.KERNELS), "all count alike; the default compiles or runs faster here"
)
_CHUNK = flags.DEFINE_integer("chunk", 16, "tokens that one call of the program plans", 1)
_OUT = flags.DEFINE_string("out", None, "folder for the results; bench/out/<time> by default")


class Input(NamedTuple):
    """What is replayed.

    Attributes:
      name: of the trace, for people.
      path: its file, or None of a synthetic one.
      trace: itself.
      warm: the trace whose most frequent experts start resident, or None.
      experts: of a layer.
      inferred: whether that was inferred from the ids.
    """

    name: str
    path: Path | None
    trace: traces.Trace
    warm: traces.Trace | None
    experts: int
    inferred: bool

    def describe(self) -> str:
        (tokens, layers, top_k), numbers = self.trace.ids.shape, self.trace.layers
        plain = numbers == tuple(range(layers))
        numbered = "" if plain else f" (numbers {numbers[0]} to {numbers[-1]})"
        why = f", the power of two above the largest id {self.trace.ids.max()}"
        return (
            f"{self.name}: {tokens} tokens, {layers} layers{numbered}, top {top_k} of "
            f"{self.experts} experts{why if self.inferred else ''}."
        )


def _input(path: str | None) -> Input:
    """Reads or makes the trace, and reads the one that warms the pool.

    Raises:
      traces.TraceError: a file is malformed, or the two do not fit each other.
    """
    experts = _EXPERTS.value
    columns = traces.Columns(_TOKEN.value, _LAYER.value, _EXPERT.value, _LANE.value)
    if path is None:
        try:
            spec = synthetic.Synthetic.parse([item for item in _SYNTHETIC.value or () if item])
        except ValueError as error:
            raise app.UsageError(f"--synthetic: {error}") from None
        if experts not in (None, spec.experts):
            raise app.UsageError("--experts: a synthetic trace has it as experts= in --synthetic")
        experts, trace = spec.experts, synthetic.generate(spec)
    else:
        trace = traces.read(path, experts, columns, _ARRAY.value)
    both, warm = [trace], None
    if _WARM.value is not None:
        warm = traces.read(_WARM.value, experts, columns, _ARRAY.value)
        both.append(warm)
        if len(warm.layers) != len(trace.layers):
            raise traces.TraceError(
                f"{_WARM.value}: {len(warm.layers)} layers, but the trace has {len(trace.layers)}"
            )
    return Input(
        "synthetic" if path is None else Path(path).name,
        None if path is None else Path(path),
        trace,
        warm,
        traces.inferred_experts(*both) if experts is None else experts,
        experts is None,
    )


def _row_bytes() -> int | None:
    if _ROW_BYTES.value is None:
        return None
    try:
        size = budgets.parse_bytes(_ROW_BYTES.value)
    except ValueError as error:
        raise app.UsageError(f"--row_bytes: {error}") from None
    if size < 1:
        raise app.UsageError("--row_bytes must be at least 1")
    return size


def _pools(geometry: budgets.Geometry, cycle: int, row_bytes: int | None) -> list[pp.PoolConfig]:
    """The pools of the budgets that the flags give, the smallest first."""
    layers = geometry.layers
    if _ROWS.value is not None and _BYTES.value is not None:
        raise app.UsageError("either --rows or --bytes")
    if _BYTES.value is not None:
        if row_bytes is None:
            raise app.UsageError("--bytes needs --row_bytes")
        try:
            sizes = [budgets.parse_bytes(text) for text in _BYTES.value]
            rows = {budgets.rows_of_bytes(geometry, size, row_bytes) for size in sizes}
        except ValueError as error:
            raise app.UsageError(f"--bytes: {error}") from None
    elif _ROWS.value is not None:
        rows = set()
        for text in _ROWS.value:
            if not text.strip().isdecimal() or not 1 <= int(text) <= geometry.experts:
                raise app.UsageError(f"--rows: {text!r} is not in [1, {geometry.experts}]")
            rows.add(int(text) * layers)
    else:
        rows = {n * layers for n in budgets.default_rows(geometry, cycle)}
    if not rows:
        raise app.UsageError("--rows and --bytes must name a budget")
    try:
        return [geometry.pool(n) for n in sorted(rows)]
    except ValueError as error:
        raise app.UsageError(str(error)) from None


def _sweep(
    pools: Sequence[pp.PoolConfig],
    trace: traces.Trace,
    warm: traces.Trace | None,
    kernel: str,
) -> list[replay_report.Result]:
    """Replays the trace at every budget, and says how long that took."""
    controls = {flag.name: flag.value for flag in _CONTROLS}
    results, compiling, replaying = [], 0.0, 0.0
    tokens = len(trace.ids)
    with tqdm(total=tokens * len(pools), unit=" tokens", leave=False, disable=None) as bar:
        for config in pools:
            bar.set_description(f"{config.rows} pool rows, {PLANNER}")
            residents: Sequence[Sequence[int]] = [range(rows) for rows in config.layer_rows]
            if warm is not None:
                config = pp.spread_rows(config, warm.ids)
                residents = pp.warm_start(config, warm.ids)
            driven = drive(
                config,
                trace.ids,
                residents,
                controls,
                kernel=kernel,
                chunk=_CHUNK.value,
                progress=bar.update,
            )
            counts = {PLANNER: driven.counts}
            for name, policy in APART.items():
                bar.set_description(f"{config.rows} pool rows, {name}")
                counts[name] = policy(config, trace.ids, residents)
            results.append(replay_report.Result(config, counts))
            compiling += driven.compile_seconds
            replaying += driven.seconds
    print(
        f"Planner: kernel {kernel} on {jax.devices()[0].device_kind}, "
        + ", ".join(f"{name} {int(value)}" for name, value in controls.items())
        + f". {tokens} tokens, budgets: {len(pools)}; {replaying:.2f} s, and {compiling:.1f} s to "
        "compile."
    )
    return results


def _find(results: Sequence[replay_report.Result], cycles: np.ndarray) -> dict[str, str]:
    """What the sweep says, in sentences."""
    layers = results[0].config.num_layers
    rows = [result.config.rows for result in results]
    rates = [result.hit_rate(PLANNER) for result in results]
    bend = findings.bend(rows, rates)
    shown = results[len(results) // 2 if bend is None else bend.at]
    return {
        "flattening": findings.flattening(layers, rows, rates),
        "cliff": findings.cliff(layers, cycles, rows, rates),
        "limits": findings.limits(
            layers, shown.config.rows, *(shown.hit_rate(name) for name in (PLANNER, OPTIMUM, LFU))
        ),
    }


def _manifest(path: Path | None) -> dict[str, Any]:
    """The benchmark's manifest, of this command and its trace."""
    # Where the results go is left out: it says nothing about them.
    module = flags.FLAGS.find_module_defining_flag(_OUT.name)
    own = [f for f in flags.FLAGS.get_key_flags_for_module(module) if f.name != _OUT.name]
    given = [flag.serialize() for flag in own if flag.present]
    argv = ["bench/replay.py", *([path.name] if path else []), *given]
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path else None
    ran = manifest(argv, {flag.name: flag.value for flag in own})
    return ran | {"trace_sha256": digest}


def _write(
    folder: Path,
    replayed: Input,
    results: Sequence[replay_report.Result],
    bus: replay_report.Bus,
    extra: dict[str, Any],
) -> None:
    """Writes the records as CSV and JSON, the plot, and a synthetic trace itself."""
    trace, cycle = replayed.trace, int(budgets.cycles(replayed.trace).max())
    by_budget = list(replay_report.records(results, bus))
    by_layer = list(replay_report.layer_records(results, trace.layers))
    replay_report.write_csv(folder / "replay.csv", by_budget)
    replay_report.write_csv(folder / "layers.csv", by_layer)
    report = {
        "manifest": _manifest(replayed.path),
        "tokens": len(trace.ids),
        "layers": trace.layers,
        "top_k": trace.ids.shape[2],
        "experts": replayed.experts,
        "cycle_rows": cycle,
        **extra,
        "by_budget": by_budget,
        "by_layer": by_layer,
    }
    (folder / "replay.json").write_text(json.dumps(report, indent=1) + "\n")
    replay_report.plot(folder / "replay.png", replayed.name, results, cycle, trace.layers)
    if replayed.path is None:
        np.save(folder / "trace.npy", trace.ids)


def main(argv: Sequence[str]) -> None:
    if len(argv) != (1 if _SYNTHETIC.value is not None else 2):
        raise app.UsageError("one argument, the file of a routing trace, or --synthetic")
    logging.getLogger("jax").setLevel(logging.WARNING)  # Not which backends it does not find.
    row_bytes = _row_bytes()
    try:
        replayed = _input(argv[1] if len(argv) > 1 else None)
    except traces.TraceError as error:
        sys.exit(str(error))
    print(replayed.describe())
    trace = replayed.trace
    cycles = budgets.cycles(trace)
    pools = _pools(budgets.Geometry.of(trace, replayed.experts), int(cycles.max()), row_bytes)
    kernel = _KERNEL.value or ("fused" if jax.default_backend() == "gpu" else "masked")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(_OUT.value) if _OUT.value else ROOT / "bench" / "out" / now
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out: {error}")
    results = _sweep(pools, trace, replayed.warm, kernel)
    found = _find(results, cycles)
    bus = replay_report.Bus(row_bytes, _BUS.value)
    _write(folder, replayed, results, bus, {"kernel": kernel, "findings": found})

    print(
        "\nThe planner a token: experts promoted and staged, MB copied, and ms that they take at "
        f"{bus.gbs:g} GB/s.\nLFU and the optimum have the same rows and initial residents, and no "
        "controls.\npolicy: points from the planner to the optimum; size: from there to 100 %."
    )
    print(replay_report.sweep_table(results, bus))
    if row_bytes is None:
        print("--row_bytes, the size of an expert's row, would give MB and bus ms.")
    print("\nHit rate of the planner by layer, %; columns are rows a layer.")
    print(replay_report.layer_table(results, trace.layers))
    print("", *found.values(), f"Results: {folder}", sep="\n")


if __name__ == "__main__":
    app.run(main)
