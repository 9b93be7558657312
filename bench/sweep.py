"""Times the kernels as the pool and the promotions a step grow: `python bench/sweep.py`.

Two sweeps: `pool` over the rows of the pool, everything else being the same, and `promotions` over
the promotions a step at one geometry. Each cell has batches of graph replay, in which the kernels take
turns, and the duration of every single step by CUPTI. A kernel that takes long is replayed less.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

if not __package__:  # Run as a script: import the checkout that it stands in, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from absl import app, flags
from tqdm import tqdm

import pallas_pool as pp
from bench import cases, chain, table, timing
from bench.implementations import IMPLEMENTATIONS, KERNELS
from bench.manifest import ROOT, manifest

BASELINE = "fused"  # Settles and checks the cases: the only kernel that is fast in all of them.
RECORDS = "sweep.jsonl"

SWEEPS = ("promotions", "pool")
SLOW_BATCHES = 3  # However slow the kernel.


class Options(NamedTuple):
    """What to time, and how; each is a flag, which says more."""

    sweeps: tuple[str, ...]
    kernels: tuple[str, ...]
    widths: tuple[int, ...]
    layers: int
    pool_rows: tuple[int, ...]
    pool_experts: int
    pool_promotions: tuple[str, ...]
    promotions: tuple[int, ...]
    experts: int
    rows_per_layer: int
    step_map: bool
    forwards: int
    batches: int
    batch_ms: float
    cell_s: float
    profile_turns: int
    scan_turns: int
    threads: int
    seed: int


class Point(NamedTuple):
    """A geometry of a sweep, and the promotions a step that are timed at it."""

    sweep: str
    config: pp.PoolConfig
    promotions: tuple[int, ...]


class Cell(NamedTuple):
    """A case in its steady state.

    Attributes:
      key: what its records say of it.
      case: the case.
      stream: the case on the device.
      settled: the carry after the first time round.
      counted: steps whose counts were checked.
    """

    key: dict[str, Any]
    case: cases.Case
    stream: chain.Stream
    settled: chain.Carry
    counted: int


class Prepared(NamedTuple):
    """A point with everything compiled."""

    point: Point
    chains: dict[str, chain.Chain]
    cells: list[Cell]


def define_flags() -> None:
    """Defines the flags: not on import, since several scripts have some of the same names."""
    flags.DEFINE_list("sweeps", list(SWEEPS), "which sweeps")
    flags.DEFINE_list("kernels", list(KERNELS), "kernels to time")
    flags.DEFINE_list("widths", ["16", "64"], "lanes")
    flags.DEFINE_integer("layers", 48, "MoE layers", 1)
    flags.DEFINE_list(
        "pool_rows", ["64", "128", "256", "512", "1024", "2048"], "pool: bank rows of a layer"
    )
    flags.DEFINE_integer("pool_experts", 4096, "pool: experts of a layer", 1)
    flags.DEFINE_list("pool_promotions", ["1", "width"], "pool: promotions a step")
    flags.DEFINE_list(
        "promotions", ["0", "1", "2", "4", "8", "16", "32", "64"], "promotions: promotions a step"
    )
    flags.DEFINE_integer("experts", 512, "promotions: experts of a layer", 1)
    flags.DEFINE_integer("rows_per_layer", 258, "promotions: bank rows of a layer", 1)
    flags.DEFINE_bool("step_map", False, "whether plans hold the step map")
    flags.DEFINE_integer("forwards", 8, "forwards through all layers in one chain", 1)
    flags.DEFINE_integer("batches", 10, "timed batches of each kernel", 1)
    flags.DEFINE_float("batch_ms", 20.0, "about how long a batch is to take", 0.0)
    flags.DEFINE_float(
        "cell_s", 0.6, f"most seconds of a kernel in a cell, or {SLOW_BATCHES} batches", 0.0
    )
    flags.DEFINE_integer("profile_turns", 40, "forwards whose kernels CUPTI times; 0: none", 0)
    flags.DEFINE_integer("scan_turns", 4, "the same, of all but the fused kernel", 1)
    flags.DEFINE_integer("threads", 16, "geometries that are compiled at once", 1)
    flags.DEFINE_integer("seed", 0, "of the ids")
    flags.DEFINE_string("out", None, "folder for the results; bench/out/<time> by default")


def options() -> Options:
    """What the flags say."""
    values = {name: getattr(flags.FLAGS, name) for name in Options._fields}
    for name in ("sweeps", "kernels", "pool_promotions"):
        values[name] = tuple(values[name])
    for name in ("widths", "pool_rows", "promotions"):
        values[name] = tuple(map(int, values[name]))
    return Options(**values)


def points(wanted: Options) -> list[Point]:
    """All geometries of the sweeps."""
    found = []
    for sweep in wanted.sweeps:
        is_pool = sweep == "pool"
        for rows in wanted.pool_rows if is_pool else [wanted.rows_per_layer]:
            for width in wanted.widths:
                asked = wanted.pool_promotions if is_pool else wanted.promotions
                counts = dict.fromkeys(width if each == "width" else int(each) for each in asked)
                config = pp.PoolConfig(
                    num_layers=wanted.layers,
                    num_experts=wanted.pool_experts if is_pool else wanted.experts,
                    rows_per_layer=rows,
                    staging_rows=width,
                    width=width,
                    step_map=wanted.step_map,
                )
                found.append(Point(sweep, config, tuple(k for k in counts if k <= width)))
    return found


def make_case(config: pp.PoolConfig, promoted: int, seed: int) -> cases.Case:
    """A case of `promoted` promotions a step, in a circle as short as the pool allows; 0: all hit."""
    rng = np.random.default_rng(seed)
    if not promoted:
        return cases.all_hit(config, rng)
    return cases.promote(config, rng, promoted, cases.fewest_turns(config, promoted))


def prepare(point: Point, wanted: Options) -> Prepared:
    """Compiles all that a point needs, and walks its cases into their steady states."""
    config, baseline = point.config, IMPLEMENTATIONS[BASELINE]
    made = [make_case(config, promoted, wanted.seed) for promoted in point.promotions]
    room = max(case.turns for case in made)
    cells = []
    for case in made:
        stream = chain.make_stream(config, case, room)
        settled = chain.settle(config, baseline, case, stream)
        counted = chain.check_counts(config, baseline, case, settled, stream)
        key = {
            "sweep": point.sweep,
            "rows": config.rows,
            "width": config.width,
            "promoted": case.promoted,
        }
        cells.append(Cell(key, case, stream, settled, counted))
    chains = {}
    for name in wanted.kernels:
        carry = chain.copy_for(config, IMPLEMENTATIONS[name], cells[0].settled)
        arguments = config, IMPLEMENTATIONS[name], carry, cells[0].stream
        chains[name] = chain.compile_chain(*arguments, wanted.forwards)
        if wanted.profile_turns:
            walk = timing.jitted_walk(config, name, profile_turns(name, wanted))
            jax.block_until_ready(walk(carry, cells[0].stream))
    return Prepared(point, chains, cells)


def prepare_all(wanted: Options) -> list[Prepared]:
    """All points prepared, several at once: compiling is most of the work."""
    asked = points(wanted)
    with concurrent.futures.ThreadPoolExecutor(wanted.threads) as pool:
        found = pool.map(functools.partial(prepare, wanted=wanted), asked)
        return list(bar(found, "compiling and settling", len(asked)))


def profile_turns(kernel: str, wanted: Options) -> int:
    """Forwards of a kernel that CUPTI times: many where now and then a step refills the queue."""
    return wanted.profile_turns if kernel == BASELINE else wanted.scan_turns


def effort(seconds: float, wanted: Options) -> timing.Effort:
    """Of something that takes so long a call."""
    replays = max(1, round(1e-3 * wanted.batch_ms / seconds))
    batches = int(wanted.cell_s / (replays * seconds))
    return timing.Effort(min(wanted.batches, max(SLOW_BATCHES, batches)), replays)


def chain_records(prepared: Prepared, wanted: Options) -> Iterator[dict[str, Any]]:
    """One record of each chain: what it launches."""
    point = prepared.point
    for name, compiled in prepared.chains.items():
        yield {
            "kind": "chain",
            "sweep": point.sweep,
            "rows": point.config.rows,
            "width": point.config.width,
            "implementation": name,
            "steps": point.config.num_layers * wanted.forwards,
            "launches": compiled.launches,
        }


def warm_up(
    config: pp.PoolConfig, cell: Cell, chains: dict[str, chain.Chain]
) -> tuple[dict[str, chain.Carry], dict[str, float]]:
    """A carry of each chain after `timing.WARM_UP_CALLS` calls, and the seconds of the last call."""
    carries, seconds = {}, {}
    for name, compiled in chains.items():
        carry = chain.copy_for(config, IMPLEMENTATIONS[name], cell.settled)
        for _ in range(timing.WARM_UP_CALLS):
            begin = time.perf_counter()
            carry = jax.block_until_ready(compiled.call(carry, cell.stream))
            seconds[name] = time.perf_counter() - begin
        carries[name] = carry
    return carries, seconds


def time_cell(prepared: Prepared, cell: Cell, wanted: Options) -> Iterator[dict[str, Any]]:
    """Yields a record a batch, and one of the checks.

    Raises:
      AssertionError: two kernels that ran as often left different states, or a count is wrong.
    """
    config, chains = prepared.point.config, prepared.chains
    carries, seconds = warm_up(config, cell, chains)
    timing.check_same_state(config, cell.case, carries)
    efforts = {name: effort(each, wanted) for name, each in seconds.items()}
    steps = config.num_layers * wanted.forwards
    for record in timing.replay(chains, carries, cell.stream, efforts):
        yield {"kind": "batch"} | cell.key | record | {"steps": steps * record["replays"]}
    calls = {name: each.batches * each.replays for name, each in efforts.items()}
    yield check_record(prepared, cell, carries, calls)


def check_record(
    prepared: Prepared, cell: Cell, carries: dict[str, chain.Carry], calls: dict[str, int]
) -> dict[str, Any]:
    """Compares each carry with that of the fastest chain after as many calls; counts once round.

    Args:
      prepared: the point.
      cell: one of its cells.
      carries: of the chains, which ran `timing.WARM_UP_CALLS` more calls than `calls` says.
      calls: by chain.

    Raises:
      AssertionError: a state or a count is wrong.
    """
    config, chains = prepared.point.config, prepared.chains
    fastest = BASELINE if BASELINE in chains else next(iter(chains))
    implementation = IMPLEMENTATIONS[fastest]
    carry = chain.copy_for(config, implementation, cell.settled)
    done = 0
    for name in sorted(carries, key=calls.__getitem__):
        for _ in range(timing.WARM_UP_CALLS + calls[name] - done):
            carry = chains[fastest].call(carry, cell.stream)
        done = timing.WARM_UP_CALLS + calls[name]
        timing.check_same_state(config, cell.case, {fastest: carry, name: carries[name]})
    baseline = IMPLEMENTATIONS[BASELINE]
    counted = chain.check_counts(config, baseline, cell.case, carry, cell.stream)
    return {
        "kind": "checks",
        **cell.key,
        "turns": cell.case.turns,
        "counted_steps": cell.counted + counted,
        "same_states": list(carries),
    }


def kernel_record(point: Point, cell: Cell, kernel: str, wanted: Options) -> dict[str, Any]:
    """The duration of every step of some forwards, by CUPTI."""
    turns = profile_turns(kernel, wanted)
    durations = timing.durations_of_walk(point.config, kernel, turns, cell.settled, cell.stream)
    times = [round(each, 3) for each in durations]
    return {"kind": "kernel", **cell.key, "implementation": kernel, "microseconds": times}


def time_all(wanted: Options) -> Iterator[dict[str, Any]]:
    """Times every cell, and yields the records."""
    prepared = prepare_all(wanted)
    for each in prepared:
        yield from chain_records(each, wanted)
        for cell in each.cells:
            yield from time_cell(each, cell, wanted)
    # Last, so that no replay is timed in a process that CUPTI has touched.
    for each in prepared if wanted.profile_turns else ():
        for cell in each.cells:
            for kernel in wanted.kernels:
                yield kernel_record(each.point, cell, kernel, wanted)


def bar(items: Iterable[Any], name: str, total: int | None = None) -> Iterable[Any]:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(items, name, total, leave=False, disable=None)


def refuse(message: str) -> NoReturn:
    """Ends the run: it can't be made here."""
    print(message, file=sys.stderr)
    sys.exit(2)


def begin(
    script: str,
    argv: Sequence[str],
    own: Sequence[str],
    packages: dict[str, str],
) -> Path:
    """Checks the flags and the machine; makes the folder of the results and its manifest.

    Args:
      script: its path in the checkout.
      argv: of its `main`.
      own: names of its flags.
      packages: versions of what the script uses besides.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    for name, known in (("kernels", KERNELS), ("sweeps", SWEEPS)):
        for value in getattr(flags.FLAGS, name):
            if value not in known:
                raise app.UsageError(f"{value} is none of {', '.join(known)}")
    logging.getLogger("jax").setLevel(logging.WARNING)  # Not which backends it does not find.
    if jax.default_backend() != "gpu":
        refuse(f"{script} times kernels: it needs an NVIDIA GPU, and JAX finds none here.")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(flags.FLAGS.out) if flags.FLAGS.out else ROOT / "bench" / "out" / now
    folder.mkdir(parents=True, exist_ok=True)
    # Where the results go is left out: it says nothing about them.
    described_flags = [flags.FLAGS[name] for name in own]
    given = [flag.serialize() for flag in described_flags if flag.present]
    described = manifest([script, *given], {flag.name: flag.value for flag in described_flags})
    described["packages"] |= packages
    (folder / "manifest.json").write_text(json.dumps(described, indent=1) + "\n")
    return folder


def write(path: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Writes records as they come, so that a run cut short leaves what it had."""
    kept = []
    with path.open("w") as file:
        for record in bar(records, "timing"):
            file.write(json.dumps(record) + "\n")
            file.flush()
            kept.append(record)
    return kept


def main(argv: Sequence[str]) -> None:
    folder = begin("bench/sweep.py", argv, Options._fields, {})
    records = write(folder / RECORDS, time_all(options()))
    print(table.sweep_terminal_table(table.summarize_sweep(records)))
    print("\n".join(table.graph_notes(records)))
    print(f"Results: {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
