"""Checks, compiles and times the planners: `python bench/run.py`.

First the comparisons with the oracle, which end the run if one fails; then the compiler's artifacts
of each kernel; then, on a GPU, the timing. Everything is written to a folder of its own.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # Run as a script: import the checkout that it stands in, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from absl import app, flags
from tqdm import tqdm

import pallas_pool as pp
from bench import artifacts, cases, chain, correctness, random_run, table, timing
from bench.implementations import IMPLEMENTATIONS, KERNELS, PLAIN
from bench.manifest import ROOT, manifest

_WIDTHS = flags.DEFINE_list("widths", ["16", "64"], "lanes")
_LAYERS = flags.DEFINE_integer("layers", 48, "MoE layers", 1)
_EXPERTS = flags.DEFINE_integer("experts", 512, "experts of a layer", 1)
_ROWS = flags.DEFINE_integer("rows_per_layer", 258, "bank rows of a layer", 1)
_STEP_MAP = flags.DEFINE_bool("step_map", True, "whether plans hold the step map")
_KERNELS = flags.DEFINE_list("kernels", list(KERNELS), "kernels to check, compile and time")
_PLAIN = flags.DEFINE_list("plain", list(PLAIN), "planners without Pallas to check and time")
_PATTERNS = flags.DEFINE_list("patterns", None, "patterns to time; all by default")
_PROMOTIONS = flags.DEFINE_list("promotions", ["1", "4", "16", "64"], "promotions a step to time")
_FORWARDS = flags.DEFINE_integer("forwards", 1, "forwards through all layers in one chain", 1)
_BATCHES = flags.DEFINE_integer("batches", 30, "timed batches of each kernel", 1)
_REPLAYS = flags.DEFINE_integer("replays", 100, "replays of the chain in a batch", 1)
_PLAIN_BATCHES = flags.DEFINE_integer("plain_batches", 5, "batches of a planner without Pallas", 1)
_PLAIN_REPLAYS = flags.DEFINE_integer("plain_replays", 2, "replays in each of them", 1)
_TURNS = flags.DEFINE_integer("profile_turns", 20, "forwards whose kernels CUPTI times; 0: none", 0)
_SMS = flags.DEFINE_list("sms", ["80", "90", "120"], "architectures to compile for")
_RANDOM = flags.DEFINE_integer("random_steps", 0, "steps of a long random run of the kernels", 0)
_AGAINST = flags.DEFINE_enum("random_against", "reference", PLAIN, "what they are compared with")
_SEED = flags.DEFINE_integer("seed", 0, "of the ids")
_OUT = flags.DEFINE_string("out", None, "folder for the results; bench/out/<time> by default")

# What the terminal shows of resources.json.
SHOWN = ("registers", "spill_store_bytes", "spill_load_bytes", "instructions", "loops", "sass")


def _config(width: int) -> pp.PoolConfig:
    return pp.PoolConfig(
        num_layers=_LAYERS.value,
        num_experts=_EXPERTS.value,
        rows_per_layer=_ROWS.value,
        staging_rows=width,
        width=width,
        step_map=_STEP_MAP.value,
    )


def _ints(flag: flags.FlagHolder[Any]) -> list[int]:
    return [int(value) for value in flag.value]


def _check_names(names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise app.UsageError(f"{name} is none of {', '.join(known)}")


def _cases(config: pp.PoolConfig) -> list[cases.Case]:
    """The cases to time at a geometry."""
    builders = cases.patterns(config.width, _ints(_PROMOTIONS))
    wanted = _PATTERNS.value or builders
    return [
        build(config, np.random.default_rng(_SEED.value))
        for name, build in builders.items()
        if name in wanted
    ]


def _bar(items: Iterable[Any], name: str, total: int | None = None) -> Iterable[Any]:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(items, name, total, leave=False, disable=None)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def check(folder: Path) -> bool:
    """Makes all comparisons, and the random run if asked for; whether all was equal."""
    names = _KERNELS.value + _PLAIN.value
    found = correctness.differences([IMPLEMENTATIONS[name] for name in names])
    total = sum(1 for _ in correctness.comparisons())
    results = dict(_bar(found, "comparisons", total))
    differences = [text for texts in results.values() for text in texts]
    random_steps = 0
    try:
        for steps in _bar(_random_steps(), "random chunks"):
            random_steps += steps
    except (AssertionError, pp.PoolError) as error:
        differences.append(str(error))
    report = {
        "implementations": names,
        "comparisons": list(results),
        "random_steps": random_steps,
        "differences": differences,
    }
    _write(folder / "correctness.json", report)
    print(
        f"{len(results)} comparisons and {random_steps} random steps of {', '.join(names)}: "
        + ("\n".join([f"{len(differences)} differ", *differences]) if differences else "all equal")
    )
    return not differences


def _random_steps() -> Iterator[int]:
    """Yields the steps of each chunk of the random run."""
    if not _RANDOM.value:
        return
    share = -(-_RANDOM.value // len(random_run.GEOMETRIES))
    for config in random_run.GEOMETRIES:
        arguments = (config, share, _SEED.value, _KERNELS.value, _AGAINST.value)
        for _ in random_run.random_run(*arguments):
            yield random_run.CHUNK


def compile_all(folder: Path) -> None:
    """Writes every kernel's artifacts, and what they use."""
    artifacts_folder = folder / "artifacts"
    artifacts_folder.mkdir(exist_ok=True)
    wanted = {}
    for name, width in itertools.product(_KERNELS.value, _ints(_WIDTHS)):
        launched = artifacts.planner_kernels(_config(width), name)
        for sm, (i, kernel) in itertools.product(_ints(_SMS), enumerate(launched)):
            stem = f"{name}_{width}_sm{sm}" + (f"_{i}" if len(launched) > 1 else "")
            wanted[stem] = (kernel, sm, artifacts_folder, stem)
    # The compiler holds Python's lock most of the time, and a fork of a process with JAX may hang.
    workers = min(len(wanted), os.cpu_count() or 1)
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawned) as pool:
        results = pool.map(artifacts.write, *zip(*wanted.values(), strict=True))
        found = list(_bar(results, "cross-compiling", len(wanted)))
    resources = dict(zip(wanted, found, strict=True))
    _write(folder / "resources.json", resources)
    for stem, figures in resources.items():
        print(f"{stem}: " + ", ".join(f"{k} {v}" for k, v in figures.items() if k in SHOWN))


def _compile_chains(names: Iterable[str]) -> dict[int, dict[str, chain.Chain]]:
    """The chain of each implementation by width, all compiled at once."""

    def compile_one(width: int, name: str) -> chain.Chain:
        config, implementation = _config(width), IMPLEMENTATIONS[name]
        case = _cases(config)[0]
        stream = chain.make_stream(config, case)
        carry = chain.copy_for(config, implementation, chain.start(config, case))
        return chain.compile_chain(config, implementation, carry, stream, _FORWARDS.value)

    wanted = [(w, n) for w in _ints(_WIDTHS) if _cases(_config(w)) for n in names]
    chains: dict[int, dict[str, chain.Chain]] = {width: {} for width in _ints(_WIDTHS)}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(compile_one, *zip(*wanted, strict=True)) if wanted else ()
        for (width, name), compiled in zip(wanted, results, strict=True):
            chains[width][name] = compiled
    return chains


def time_all() -> Iterator[dict[str, Any]]:
    """Times every case at every width, and yields the records of timing.jsonl."""
    efforts = dict.fromkeys(_KERNELS.value, timing.Effort(_BATCHES.value, _REPLAYS.value))
    plain = timing.Effort(_PLAIN_BATCHES.value, _PLAIN_REPLAYS.value)
    efforts |= dict.fromkeys(_PLAIN.value, plain)
    compiled = _compile_chains(efforts)
    for width in _ints(_WIDTHS):
        config, chains = _config(width), compiled[width]
        steps = config.num_layers * _FORWARDS.value
        wanted = _cases(config)
        for name, each in chains.items():
            yield {
                "kind": "chain",
                "width": width,
                "implementation": name,
                "steps": steps,
                "launches": each.launches,
            }
        for case in wanted:
            for record in timing.time_case(config, case, chains, efforts):
                if record["kind"] == "batch":
                    record["steps"] = steps * record["replays"]
                yield {"width": width, "case": case.name} | record
    # Last, so that no replay is timed in a process that CUPTI has touched.
    for width in _ints(_WIDTHS) if _TURNS.value else ():
        for case in _cases(_config(width)):
            for name in _KERNELS.value:
                durations = timing.kernel_durations(_config(width), case, name, _TURNS.value)
                yield {
                    "kind": "kernel",
                    "width": width,
                    "case": case.name,
                    "implementation": name,
                    "microseconds": [round(each, 3) for each in durations],
                }


def _number_of_records() -> int:
    kernels, plain = len(_KERNELS.value), len(_PLAIN.value)
    total = 0
    for width in _ints(_WIDTHS):
        wanted = len(_cases(_config(width)))
        batches = kernels * _BATCHES.value + plain * _PLAIN_BATCHES.value
        total += (kernels + plain) * (wanted > 0)
        total += wanted * (batches + 1 + (kernels if _TURNS.value else 0))
    return total


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    _check_names(_KERNELS.value, KERNELS)
    _check_names(_PLAIN.value, PLAIN)
    widest = max(_ints(_WIDTHS))
    _check_names(_PATTERNS.value or (), cases.patterns(widest, _ints(_PROMOTIONS)))
    logging.getLogger("jax").setLevel(logging.WARNING)  # Not which backends it does not find.
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(_OUT.value) if _OUT.value else ROOT / "bench" / "out" / now
    folder.mkdir(parents=True, exist_ok=True)
    # Where the results go is left out: it says nothing about them.
    module = flags.FLAGS.find_module_defining_flag(_OUT.name)
    own = [f for f in flags.FLAGS.get_key_flags_for_module(module) if f.name != _OUT.name]
    given = [flag.serialize() for flag in own if flag.present]
    values = {flag.name: flag.value for flag in own}
    _write(folder / "manifest.json", manifest(["bench/run.py", *given], values))
    if not check(folder):
        sys.exit(1)
    compile_all(folder)
    if jax.default_backend() != "gpu":
        print("No timing: it needs an NVIDIA GPU, and JAX finds none here.")
    else:
        with (folder / "timing.jsonl").open("w") as file:
            for record in _bar(time_all(), "timing", _number_of_records()):
                file.write(json.dumps(record) + "\n")
        records = table.read_records(folder)
        print(table.terminal_table(table.summarize(records)))
        print("\n".join(table.graph_notes(records)))
    print(f"Results: {folder}")


if __name__ == "__main__":
    app.run(main)
