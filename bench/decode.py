"""Decode speed with experts in host memory: `python bench/decode.py`.

Two parts. `micro` times row copies and the FFN alone, beside a plain pinned copy and a device copy.
`decode` times whole decode steps of a model's shape with forced routing: the pool, the same with the loop
planner, staging only (the gate is closed: every miss goes over the bus), all experts resident, and XLA's own
offload of whole layers. Outputs are compared before anything is timed, and after every pass. On a machine
without a GPU it makes the same checks at a small shape, and measures nothing.

Each part and shape has a process and a folder of its own, with a manifest and raw records that are
written as they come; `python bench/decode_report.py FOLDER` makes tables and plots of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # Run as a script: import the checkout that it stands in, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import host_memory

if __name__ == "__main__":
    host_memory.prepare_environment()

import jax
from absl import app, flags
from tqdm import tqdm

from bench import decode_micro, decode_models, decode_passes, decode_report, decode_routing
from bench.decode_models import SHAPES, Shape
from bench.decode_passes import VARIANTS, Cell
from bench.manifest import ROOT, manifest

PARTS = ("micro", "decode")
CONTROLS = ("promote_limit", "promote_interval", "promote_min_misses", "protect_recent")
RECORDS = "timing.jsonl"
PLACE = "traces"  # The flag that is left out of manifests: the records name the trace, not where it lies.
DENSE = (
    "projections of the size of attention's, router and head; no KV cache, rotary embedding, shared "
    "experts or sampling"
)

SMALL: dict[str, Any] = {
    "batches": (1,),
    "budgets": (25.0,),
    "rounds": (1,),
    "micro_batches": 2,
    "micro_batch_ms": 0.0,
    "tokens": 8,
}


class Options(NamedTuple):
    """What to run, and how; each is a flag, which says more."""

    parts: tuple[str, ...]
    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    budgets: tuple[float, ...]
    variants: tuple[str, ...]
    controls: tuple[str, ...]
    layers: int
    tokens: int
    warm_up: float
    burst: int
    rounds: tuple[int, ...]
    check_steps: int
    offload_steps: int
    profile_steps: int
    plain_copies: int
    routing: str
    traces: str
    dense: bool
    distinct_layers: int
    micro_layers: int
    host_gb: float
    micro_batches: int
    micro_batch_ms: float
    threads: int
    limit_s: float


class OutOfTime(Exception):
    """The limit is reached."""


def define_flags(into: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags: not on import, since several scripts have some of the same names."""
    shapes = [name for name in SHAPES if name != "check"]
    define_list, define_int, define_float = (
        functools.partial(define, flag_values=into)
        for define in (flags.DEFINE_list, flags.DEFINE_integer, flags.DEFINE_float)
    )
    define_list("parts", list(PARTS), "micro, decode or both")
    define_list("shapes", shapes, "model shapes")
    define_list("batches", ["1", "4"], "sequences that decode at once")
    define_list(
        "budgets", ["12.5", "25", "50", "75"], "percent of the experts that have a pool row"
    )
    define_list("variants", list(VARIANTS), "what to time")
    define_list("controls", [], "controls of the pool, such as promote_min_misses=2; none: defaults")
    define_int("layers", 0, "only the first so many layers; 0: all", 0)
    define_int("tokens", 0, "only the first so many tokens of the routing; 0: all", 0)
    define_float(
        "warm_up", 1 / 3, "share of the steps that come before the steady state", 0, 1
    )
    define_int("burst", 6, "steps in one timed sample", 1)
    define_list("rounds", ["2", "1"], "passes of each variant, batch by batch; the last for all that follow")
    define_int("check_steps", 2, "steps whose outputs are compared before timing", 1)
    define_int("offload_steps", 2, "timed steps of a pass with XLA's own offload", 1)
    define_int("profile_steps", 6, "steps whose kernels CUPTI times; 0: none", 0)
    define_int("plain_copies", 8, "plain pinned copies of a layer before the passes", 1)
    flags.DEFINE_enum(
        "routing", "auto", ("auto", "recorded", "generated"), "auto: recorded where there is a trace",
        flag_values=into,
    )
    flags.DEFINE_string("traces", str(decode_routing.TRACES), "folder of recorded traces", flag_values=into)
    flags.DEFINE_bool("dense", True, f"whether a step has dense weights, too: {DENSE}", flag_values=into)
    define_int(
        "distinct_layers", 0, "layers whose experts differ in host memory; 0: as many as fit", 0
    )
    define_int("micro_layers", 4, "the same, of the part micro", 1)
    define_float(
        "host_gb", 0, "GB of host memory for experts; 0: a quarter of what is available", 0
    )
    define_int("micro_batches", 5, "micro: timed batches of each case", 1)
    # The first call of a batch is not dispatched while another runs: up to 2 ms that the batch has to dwarf.
    define_float("micro_batch_ms", 1000.0, "micro: about how long a batch is to take", 0)
    define_int("threads", 14, "programs that are compiled at once", 1)
    define_float("limit_s", 0, "begin nothing new after so many seconds; 0: no limit", 0)
    flags.DEFINE_string("out", None, "folder for the results; bench/out/<time> by default", flag_values=into)


def options(given: flags.FlagValues = flags.FLAGS) -> Options:
    """What the flags say."""
    values = {name: getattr(given, name) for name in Options._fields}
    for name in ("parts", "shapes", "variants", "controls"):
        values[name] = tuple(values[name])
    values["batches"] = tuple(map(int, values["batches"]))
    values["rounds"] = tuple(map(int, values["rounds"]))
    values["budgets"] = tuple(map(float, values["budgets"]))
    for name, known in (("parts", PARTS), ("shapes", SHAPES), ("variants", VARIANTS)):
        for value in values[name]:
            if value not in known:
                raise app.UsageError(f"--{name}: {value} is none of {', '.join(known)}")
    for budget in values["budgets"]:
        if not 0 < budget <= 100:
            raise app.UsageError(f"--budgets: a percentage in (0, 100], got {budget}")
    for batch in values["batches"]:
        if batch < 1:
            raise app.UsageError(f"--batches: at least 1, got {batch}")
    too_many = given["rounds"].present and len(values["rounds"]) > len(values["batches"])
    if too_many or min(values["rounds"], default=0) < 1:
        raise app.UsageError(
            f"--rounds: numbers of at least 1, no more than there are batches, got {values['rounds']}"
        )
    return Options(**values)


def controls_of(wanted: Options) -> dict[str, int]:
    """The controls to set.

    Raises:
      UsageError: one is unknown, or no number.
    """
    found = {}
    for text in wanted.controls:
        name, _, value = text.partition("=")
        if name not in CONTROLS or not value.isdigit():
            raise app.UsageError(f"--controls: NAME=NUMBER with a name of {', '.join(CONTROLS)}, got {text}")
        found[name] = int(value)
    return found


def rounds_of(wanted: Options) -> dict[int, int]:
    """Passes of each variant, by batch."""
    rounds = itertools.chain(wanted.rounds, itertools.repeat(wanted.rounds[-1]))
    return dict(zip(wanted.batches, rounds, strict=False))


def bar(items: Iterable[Any], name: str, total: int | None = None) -> Iterable[Any]:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(items, name, total, leave=False, disable=None)


class Writer:
    """Writes records as they come, so that a run cut short leaves what it had, and watches the time."""

    def __init__(self, path: Path, limit_s: float):
        self._file = path.open("w")
        self._begin = time.perf_counter()
        self._limit = limit_s

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def check_time(self) -> None:
        if self._limit and self.seconds() > self._limit:
            raise OutOfTime

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def say(self, text: str) -> None:
        tqdm.write(f"[{self.seconds():6.1f} s] {text}")
        sys.stdout.flush()


def routing_of(shape: Shape, wanted: Options) -> decode_routing.Routing:
    """The routing to force.

    Raises:
      UsageError: a recorded trace was asked for, and there is none.
    """
    path = Path(wanted.traces) / shape.trace if shape.trace else None
    if wanted.routing != "generated" and path is not None and path.exists():
        return decode_routing.recorded(path, shape.layers, shape.experts, wanted.tokens)
    if wanted.routing == "recorded":
        raise app.UsageError(f"--routing=recorded: no trace of {shape.name} in {wanted.traces}")
    spec = shape.generated
    tokens = wanted.tokens or spec.tokens
    return decode_routing.generated(spec._replace(tokens=tokens, layers=shape.layers))


def distinct_layers(shape: Shape, wanted: Options, asked: int) -> int:
    """How many layers get host arrays of their own.

    Raises:
      UsageError: not even one fits.
    """
    room = wanted.host_gb * 1e9 or 0.25 * host_memory.available()
    fit = int(room // shape.layer_bytes)
    if not fit:
        raise app.UsageError(
            f"a layer of {shape.name} is {shape.layer_bytes / 1e9:.2f} GB, and {room / 1e9:.2f} GB of host "
            "memory are for experts: --host_gb sets another amount"
        )
    return min(shape.layers, asked or fit, fit)


def make_experts(
    shape: Shape, distinct: int, first: dict[str, jax.Array] | None, writer: Writer
) -> tuple[dict[str, jax.Array], ...]:
    """The experts of all layers, in pinned host memory: layer l is layer l % distinct once more, the very
    same arrays, so that a model may be larger than the host."""
    begin, made = time.perf_counter(), [] if first is None else [first]
    for layer in bar(range(len(made), distinct), "experts in host memory"):
        made.append(jax.block_until_ready(decode_models.host_layer(shape, layer)))
    seconds = time.perf_counter() - begin
    size = distinct * shape.layer_bytes
    writer.say(
        f"{shape.name}: {distinct} of {shape.layers} layers have host arrays of their own"
        + (", used again for the others" if distinct < shape.layers else "")
        + f": {size / 1e9:.1f} GB pinned in {seconds:.0f} s"
    )
    record = {"kind": "host", "distinct_layers": distinct, "layers": shape.layers}
    writer.write(record | {"bytes": size, "seconds": round(seconds, 2)})
    return tuple(made[layer % distinct] for layer in range(shape.layers))


def setup_record(
    shape: Shape, routing: decode_routing.Routing, wanted: Options, dense_bytes: int
) -> dict[str, Any]:
    return {
        "kind": "setup",
        "measurement": jax.default_backend() == "gpu",
        "shape": shape._asdict() | {"generated": shape.generated._asdict()},
        "dtype": "bfloat16",
        "expert_bytes": shape.expert_bytes,
        "routing": routing.source,
        "tokens": len(routing.ids),
        "top_k_of_routing": routing.ids.shape[2],
        "locality": decode_routing.locality(routing.ids),
        "controls": list(wanted.controls),
        "dense": DENSE if wanted.dense else "none",
        "dense_bytes": dense_bytes,
    }


def device_copy_size() -> dict[str, int]:
    """Of the array that is copied on the device, where it is not the default."""
    return {} if jax.default_backend() == "gpu" else {"device_bytes": 2**16}


def run_micro(shape: Shape, wanted: Options, writer: Writer) -> None:
    """The part `micro` of a shape."""
    routing = routing_of(shape, wanted)
    writer.write(setup_record(shape, routing, wanted, 0))
    distinct = distinct_layers(shape, wanted, wanted.micro_layers)
    experts = make_experts(shape, distinct, None, writer)
    records = decode_micro.micro(
        shape,
        experts,
        wanted.batches,
        routing.ids,
        wanted.micro_batch_ms / 1e3,
        wanted.micro_batches,
        **device_copy_size(),
    )
    for record in bar(records, "micro"):
        writer.write(record)
        writer.check_time()


def _fits(shape: Shape, distinct: int, cell: Cell, lanes: int, dense_bytes: int) -> bool:
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit", 2**62)
    need = decode_passes.device_bytes(shape, distinct, cell, lanes)
    return need + dense_bytes < 0.98 * limit


def run_decode(shape: Shape, wanted: Options, writer: Writer) -> None:
    """The part `decode` of a shape."""
    controls = controls_of(wanted)
    routing = routing_of(shape, wanted)
    ids = {batch: decode_routing.for_batch(routing.ids, batch) for batch in wanted.batches}
    steps = {batch: len(own) for batch, own in ids.items()}
    warm_up = {batch: int(count * wanted.warm_up) for batch, count in steps.items()}
    distinct = distinct_layers(shape, wanted, wanted.distinct_layers)
    params = decode_models.make_params(shape, wanted.dense)
    forced = {batch: decode_models.make_forced(shape, own) for batch, own in ids.items()}
    dense_bytes = decode_models.dense_bytes(params)
    writer.write(setup_record(shape, routing, wanted, dense_bytes))
    writer.say(f"routing: {routing.source}; dense weights: {dense_bytes / 1e9:.2f} GB a step")

    asked = decode_passes.cells(wanted.variants, wanted.batches, wanted.budgets)
    cells = []
    for cell in asked:
        lanes = cell.batch * routing.ids.shape[2]
        if _fits(shape, distinct, cell, lanes, dense_bytes):
            cells.append(cell)
        else:
            writer.say(f"left out, for it needs more device memory: {cell}")
            record = {"kind": "left_out", "what": str(cell), "why": "device memory"}
            writer.write(record)

    # Programs compile while the rest of the experts is made: a first touch of pinned memory takes long.
    first = jax.block_until_ready(decode_models.host_layer(shape, 0))
    with concurrent.futures.ThreadPoolExecutor(wanted.threads) as executor:
        arguments = shape, distinct, first, params, forced, cells, executor
        futures = decode_passes.compile_all(*arguments)
        playing = decode_passes.play_all(shape, ids, warm_up, cells, controls, executor)
        loading = executor.submit(decode_passes.compile_loaders, shape, distinct, first, ids, cells)
        experts = make_experts(shape, distinct, first, writer)
        programs = {}
        for name, future in bar(futures.items(), "compiling"):
            programs[name] = future.result()
            writer.write(programs[name].record)
        loading.result()
        played = {cell: future.result() for cell, future in bar(playing.items(), "counting rows")}
    writer.say(f"{len(programs)} programs compiled")
    model = decode_passes.Model(shape, distinct, experts, params, forced, ids, controls)
    try:
        _time(model, programs, played, cells, steps, warm_up, wanted, writer)
    except OutOfTime:
        writer.say("the time is up")
        writer.write({"kind": "left_out", "what": "all that would follow", "why": "time"})


def _time(
    model: decode_passes.Model,
    programs: dict[Any, decode_passes.Program],
    played: dict[Cell, decode_routing.Played],
    cells: list[Cell],
    steps: dict[int, int],
    warm_up: dict[int, int],
    wanted: Options,
    writer: Writer,
) -> None:
    """Checks, times and profiles."""
    for cell, own in played.items():
        lists = {name: values.tolist() for name, values in own.counts._asdict().items()}
        writer.write({"kind": "rows", **cell.key, "warm_up": warm_up[cell.batch], **lists})
    for record in decode_passes.plain_copies(model, wanted.plain_copies):
        writer.write(record)
    for record in decode_passes.device_copies(wanted.plain_copies, **device_copy_size()):
        writer.write(record)
    reference = _check(model, programs, cells, wanted, writer)
    writer.say("outputs compared")

    rounds = rounds_of(wanted)
    for round_ in range(max(rounds.values())):
        for group in bar(list(_groups(cells)), f"round {round_}"):
            first = round_ % len(group)
            for order, cell in enumerate(group[first:] + group[:first]):
                if round_ >= (1 if cell.variant == "offload" else rounds[cell.batch]):
                    continue
                writer.check_time()
                is_offload = cell.variant == "offload"
                count = min(wanted.offload_steps + 1, steps[cell.batch])
                done = decode_passes.run_pass(
                    model,
                    programs[cell.program],
                    cell,
                    count if is_offload else steps[cell.batch],
                    1 if is_offload else warm_up[cell.batch],
                    1 if is_offload else wanted.burst,
                    played[cell].end if cell in played else None,
                )
                for record in done.records:
                    kind = {"kind": "burst" if "seconds" in record else "bank"}
                    writer.write({**kind, **cell.key, "round": round_, "order": order, **record})
                known = reference.setdefault(cell.batch, (done.hidden, done.steps, cell))
                if known[1] < done.steps:  # The check's, of a few steps: this goes on from there.
                    _compare(done.hidden, known, min(known[1], done.steps), cell, writer)
                    reference[cell.batch] = (done.hidden, done.steps, cell)
                else:
                    _compare(done.hidden, known, done.steps, cell, writer)
        writer.say(f"round {round_ + 1} of {max(rounds.values())} done")

    if wanted.profile_steps and jax.default_backend() == "gpu":
        for cell in bar(cells, "profiling"):
            if cell.variant == "offload":  # Its copies are no kernels.
                continue
            writer.check_time()
            first = warm_up[cell.batch]
            count = min(wanted.profile_steps, steps[cell.batch] - first)
            writer.write(
                decode_passes.profile_cell(
                    model,
                    programs[cell.program],
                    cell,
                    played[cell].before if cell in played else None,
                    first,
                    count,
                )
            )
        writer.say("profiled")


def _groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """The cells of a batch and budget: they take turns."""
    keys = dict.fromkeys((cell.batch, cell.budget) for cell in cells)
    for key in keys:
        yield [cell for cell in cells if (cell.batch, cell.budget) == key]


Reference = tuple[Any, int, Cell]


def _check(
    model: decode_passes.Model,
    programs: dict[Any, decode_passes.Program],
    cells: list[Cell],
    wanted: Options,
    writer: Writer,
) -> dict[int, Reference]:
    """Compares the outputs of the first steps of every variant with those of XLA's own offload, or of the
    first variant there is; returns them by batch. A cell for which the device has not the memory is taken
    from the list.

    Raises:
      AssertionError: they differ by more than rounding.
    """
    reference: dict[int, Reference] = {}
    for cell in bar(sorted(cells, key=lambda cell: cell.variant != "offload"), "checking"):
        count = min(wanted.check_steps, len(model.ids[cell.batch]))
        arguments = model, programs[cell.program], cell, count, count, count
        try:
            done = decode_passes.run_pass(*arguments)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            writer.say(f"left out, for the device memory ran out: {cell}")
            text = str(error).splitlines()[0]
            writer.write({"kind": "left_out", "what": str(cell), "why": text})
            cells.remove(cell)
            continue
        known = reference.setdefault(cell.batch, (done.hidden, count, cell))
        _compare(done.hidden, known, count, cell, writer)
    return reference


def _compare(
    hidden: Any, reference: Reference, steps: int, cell: Cell, writer: Writer
) -> None:
    """Writes how far outputs are from each other.

    Raises:
      AssertionError: by more than rounding.
    """
    against, _, other = reference
    record = decode_passes.compare(hidden, against, steps)
    key = {"kind": "check", "what": "hidden states", **cell.key, "against": other.key}
    writer.write(key | record)
    decode_passes.check_close(key | record)


def run_job(part: str, shape: Shape, wanted: Options, folder: Path, argv: Sequence[str]) -> None:
    """One part of one shape, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {name: value for name, value in wanted._asdict().items() if name != PLACE}
    described = manifest(argv, said)
    described["environment"] = {
        name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_"))
    }
    (folder / "manifest.json").write_text(json.dumps(described, indent=1) + "\n")
    writer = Writer(folder / RECORDS, wanted.limit_s)
    writer.say(f"{part}, {shape.name}, on {described['device']}")
    run = functools.partial(run_micro if part == "micro" else run_decode, shape, wanted, writer)
    with contextlib.suppress(OutOfTime):
        run()


def _has_gpu() -> bool:
    """Whether there may be a GPU: asking JAX would take its memory."""
    return "cpu" not in os.environ.get("JAX_PLATFORMS", "") and Path("/dev/nvidiactl").exists()


def _spawn(jobs: Sequence[tuple[str, str]], folder: Path, given: Sequence[str], limit: float) -> int:
    """Runs each job in a process of its own; returns how many failed."""
    begin, failed = time.perf_counter(), 0
    for part, shape in jobs:
        left = limit - (time.perf_counter() - begin) if limit else 0
        if limit and left < 1:
            print(f"No time left for {part} of {shape}.")
            continue
        own = [f"--parts={part}", f"--shapes={shape}", f"--out={folder}", f"--limit_s={left}"]
        failed += subprocess.run([sys.executable, __file__, *given, *own]).returncode != 0
    return failed


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    wanted = options()
    logging.getLogger("jax").setLevel(logging.WARNING)  # Not which backends it does not find.
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(flags.FLAGS.out) if flags.FLAGS.out else ROOT / "bench" / "out" / now
    given = [flags.FLAGS[name] for name in Options._fields]
    argv = ["bench/decode.py", *(flag.serialize() for flag in given if flag.present and flag.name != PLACE)]
    jobs = [(part, shape) for shape in wanted.shapes for part in wanted.parts]
    if _has_gpu() and len(jobs) > 1:
        own = ("parts", "shapes", "limit_s")
        passed = [flag.serialize() for flag in given if flag.present and flag.name not in own]
        failed = _spawn(jobs, folder, passed, wanted.limit_s)
        print(decode_report.text(folder))
        print(f"Results: {folder}; python bench/decode_report.py {folder} writes tables and plots.")
        sys.exit(1 if failed else 0)
    if jax.default_backend() != "gpu":
        print("No GPU: a check at a small shape. Its times are no measurement.")
        jobs = [(part, "check") for part in wanted.parts]
        # Interpreted kernels take long to compile.
        wanted = wanted._replace(
            **{name: value for name, value in SMALL.items() if not flags.FLAGS[name].present}
        )
    for part, name in jobs:
        shape = SHAPES[name]
        shape = shape._replace(layers=min(wanted.layers or shape.layers, shape.layers))
        run_job(part, shape, wanted, folder / f"{part}-{shape.name}", argv)
    if len(jobs) > 1 or jax.default_backend() != "gpu" or not flags.FLAGS.out:
        print(decode_report.text(folder))
    print(f"Results: {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
