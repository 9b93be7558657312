"""Tables and plots of decode speed: `python bench/decode_report.py FOLDER` writes report.md and PNGs there.

FOLDER is one that bench/decode.py has written, with a folder in it for each part and shape.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # Run as a script: import the checkout that it stands in, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import table

Record = dict[str, Any]
Key = tuple[str, int, float]  # Variant, sequences, budget.

# What issue and documentation promise.
COPY_SHARE = {1: 0.90, 8: 0.93}  # Of a plain copy's rate, by rows a layer.
EMPTY_COPY_US = 2.5
FFN_SHARE = 0.75
PLANNER_SHARE = 0.03
RATIO_SHARE = 0.85

COLORS = {
    "resident": "#333333",
    "pool": "#0b6e4f",
    "loop": "#b3261e",
    "staging": "#e08e0b",
    "offload": "#3b5bdb",
}
PART_COLORS = {
    "copies": "#e08e0b",
    "ffn": "#0b6e4f",
    "rest": "#3b5bdb",
    "planner": "#b3261e",
    "gaps": "#cccccc",
}
DPI = 140


class Run(NamedTuple):
    """One part of one shape.

    Attributes:
      name: of its folder.
      manifest: what it ran on.
      records: all that it wrote.
    """

    name: str
    manifest: Record
    records: list[Record]

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def setup(self) -> Record:
        return self.of("setup")[0]


class Bar(NamedTuple):
    """A promise: what, the figure, and whether it is kept."""

    what: str
    figure: str
    kept: bool

    def __str__(self) -> str:
        return f"{'kept' if self.kept else 'MISSED'}: {self.what}: {self.figure}"


class Speed(NamedTuple):
    """A variant at a batch and budget, in the steady state unless said otherwise.

    Attributes:
      samples: seconds a step, one a burst.
      steady: seconds a step over all steady steps, the median of the rounds.
      whole: the same over all steps, the warm-up included.
      copied: rows copied a step, steady and whole; 0 without a planner.
      hit_rate: share of the selected experts that were resident, or None.
    """

    samples: list[float]
    steady: float
    whole: float
    copied: tuple[float, float]
    hit_rate: float | None


def read(folder: Path) -> list[Run]:
    """Every run in a folder, or in the folders in it."""
    runs = []
    for path in sorted(folder.rglob("timing.jsonl")):
        # A run that was killed may have left half a line.
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        records = list(map(json.loads, lines))
        if records and records[0]["kind"] == "setup":
            text = (path.parent / "manifest.json").read_text()
            runs.append(Run(path.parent.name, json.loads(text), records))
    # Those with recorded routing first.
    return sorted(runs, key=lambda run: "recorded" not in run.setup["routing"])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _key(record: Record) -> Key:
    return record["variant"], record["batch_size"], record["budget"]


# The part `micro`.


def micro_rates(run: Run) -> dict[str, float]:
    """Bytes a second of the plain copies, medians of the batches."""
    rates = defaultdict(list)
    for record in run.of("micro"):
        if not record["launches"]:
            rates[record["case"]].append(record["bytes"] / record["seconds"])
    return {case: statistics.median(values) for case, values in rates.items()}


def _micro_key(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("case", "batch_size", "lanes", "rows", "routing"))


def kernel_microseconds(profile: Record) -> float:
    """Of the kernels of a call, together: of each the median of the profiled calls."""
    times = profile["microseconds"]
    launches = len(times) // profile.get("calls", 1)
    return sum(statistics.median(times[i::launches]) for i in range(launches))


def micro_text(run: Run) -> tuple[str, list[Bar]]:
    rates = micro_rates(run)
    plain = rates.get("plain pinned copy")
    device = max((rates[case] for case in ("device copy", "device add") if case in rates), default=None)
    walls, one = defaultdict(list), {}
    for record in run.of("micro"):
        if record["launches"]:
            walls[_micro_key(record)].append(record)
            one[_micro_key(record)] = record
    profiles = {_micro_key(record): record for record in run.of("micro_profile")}
    copies, ffns, bars = [], [], []
    for key, records in walls.items():
        case, batch, lanes, rows, routing = key
        layers = run.setup["shape"]["layers"]
        low, wall, high = table.quartiles([1e6 * r["seconds"] / r["launches"] for r in records])
        moved = one[key]["bytes"] / one[key]["launches"]  # A layer.
        profile = profiles.get(key)
        kernel = kernel_microseconds(profile) / layers if profile else None
        rate = moved / wall / 1e3  # GB/s of bytes in microseconds.
        kernel_rate = moved / kernel / 1e3 if kernel else None
        spread = f"{wall:.2f} ({low:.2f}-{high:.2f})"
        times = [spread, f"{kernel:.2f}" if kernel else "-"]
        speeds = [f"{rate:.1f}", f"{kernel_rate:.1f}" if kernel_rate else "-"]
        if case == "copy_rows":
            share = 1e9 * rate / plain if plain else None
            copies.append([str(lanes), str(rows), *times, *speeds, _percent(share if rows else None)])
            if rows == 0 and kernel:
                what = f"copy_rows, {lanes} lanes, nothing to copy, at most {EMPTY_COPY_US} us"
                bars.append(Bar(what, f"{kernel:.2f} us", kernel <= EMPTY_COPY_US))
            if rows in COPY_SHARE and share:
                bar = COPY_SHARE[rows]
                what = f"copy_rows, {lanes} lanes, {rows} a layer, at least {bar:.0%} of a plain copy"
                bars.append(Bar(what, _percent(share), share >= bar))
        else:
            best = kernel_rate or rate
            share = 1e9 * best / device if device else None
            label = f"{batch}, {routing}"
            ffns.append([label, f"{rows / layers:.1f}", *times, *speeds, _percent(share)])
            if share and kernel:
                what = f"FFN, batch {label}, at least {FFN_SHARE:.0%} of a device copy"
                bars.append(Bar(what, _percent(share), share >= FFN_SHARE))
    known = ", ".join(f"{case} {rate / 1e9:.1f} GB/s" for case, rate in rates.items())
    parts = [
        f"Plain copies, bytes read and written on the device, read on the bus: {known}.",
        "Row copies, a layer of a chain of all layers: microseconds, median (quartiles), by the clock, and "
        "of the kernel by CUPTI, of each launch the median of the profiled calls; GB/s; by the clock, as a "
        "share of a plain pinned copy.",
        table.markdown(["lanes", "rows", "us", "kernel us", "GB/s", "kernel GB/s", "of plain"], copies),
        "The FFN: bytes of distinct rows over time. The clock's has a small addition in it; the share of "
        "the device copy is that of the kernels.",
        table.markdown(["batch", "rows", "us", "kernel us", "GB/s", "kernel GB/s", "of device copy"], ffns),
    ]
    return "\n\n".join(parts), bars


# The part `decode`.


def speeds(run: Run) -> dict[Key, Speed]:
    """Of every variant that was timed."""
    rows = {_key(record): record for record in run.of("rows")}
    bursts: dict[Key, list[Record]] = defaultdict(list)
    for record in run.of("burst"):
        bursts[_key(record)].append(record)
    found = {}
    for key, records in bursts.items():
        steady = [record for record in records if not record["warm_up"]]
        copied, hit_rate = (0.0, 0.0), None
        if key in rows:
            first = rows[key]["warm_up"]
            every = [a + b for a, b in zip(rows[key]["promoted"], rows[key]["staged"], strict=True)]
            copied = statistics.fmean(every[first:]), statistics.fmean(every)
            hit_rate = 1 - sum(every[first:]) / sum(rows[key]["selected"][first:])
        samples = [record["seconds"] / record["steps"] for record in steady]
        if samples:
            whole = _by_round(records)
            found[key] = Speed(samples, _by_round(steady), whole, copied, hit_rate)
    return found


def _by_round(records: Iterable[Record]) -> float:
    """Seconds a step over all records of a round, the median of the rounds."""
    totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        totals[record["round"]][0] += record["seconds"]
        totals[record["round"]][1] += record["steps"]
    return statistics.median(seconds / steps for seconds, steps in totals.values())


def copy_rate(run: Run, kind: str) -> float | None:
    """Bytes a second of a "plain" pinned copy, or of a "device_copy", in the same process."""
    rates = [record["bytes"] / record["seconds"] for record in run.of(kind)]
    return statistics.median(rates) if rates else None


class Split(NamedTuple):
    """Microseconds of one step, by part; what the clock says of the same steps, or None."""

    parts: dict[str, float]
    wall: float | None

    @property
    def total(self) -> float:
        return self.wall or sum(self.parts.values())


def splits(run: Run) -> dict[Key, Split]:
    """Where a step's time goes, by CUPTI."""
    bursts = defaultdict(list)
    for record in run.of("burst"):
        bursts[(*_key(record), record["first"], record["steps"])].append(record["seconds"])
    found = {}
    for record in run.of("profile"):
        steps = record["steps"]
        parts = {part: sum(record[f"{part}_us"]) / steps for part in ("planner", "copies", "ffn")}
        parts["rest"] = record["rest_us_total"] / steps
        same = bursts.get((*_key(record), record["first"], steps))
        wall = 1e6 * statistics.median(same) / steps if same else None
        if wall is not None:
            parts["gaps"] = max(0.0, wall - sum(parts.values()))
        found[_key(record)] = Split(parts, wall)
    return found


class Ratio(NamedTuple):
    """Pool against staging only.

    Attributes:
      speed: how many times faster.
      bytes: how many times fewer bytes.
      ceiling: the speed ratio if the copies went at a plain copy's rate, and all else took no longer
        than a step with all experts resident; None where either is unknown.
      bound: the same if all else took no longer than the weights that a step reads, the selected experts'
        and the dense ones, at the rate of a device copy.
    """

    speed: float
    bytes: float
    ceiling: float | None
    bound: float | None


def ratios(run: Run, whole: bool) -> dict[tuple[int, float], Ratio]:
    """By sequences and budget, over the steady steps or over all."""
    known, found = speeds(run), {}
    rate, device_rate = copy_rate(run, "plain"), copy_rate(run, "device_copy")
    size = run.setup["expert_bytes"]
    rows = {_key(record): record for record in run.of("rows")}
    for (variant, batch, budget), pool in known.items():
        staging = known.get(("staging", batch, budget))
        if variant != "pool" or staging is None:
            continue
        at = int(whole)
        if not pool.copied[at]:
            continue
        speed = staging.whole / pool.whole if whole else staging.steady / pool.steady

        slow, fast = (each.copied[at] * size / rate if rate else None for each in (staging, pool))
        resident = known.get(("resident", batch, 100.0))
        first = 0 if whole else rows[variant, batch, budget]["warm_up"]
        selected = statistics.fmean(rows[variant, batch, budget]["selected"][first:])
        read = selected * size + run.setup["dense_bytes"]
        found[batch, budget] = Ratio(
            speed,
            staging.copied[at] / pool.copied[at],
            _speed_ratio(slow, fast, resident.steady if resident else None),
            _speed_ratio(slow, fast, read / device_rate if device_rate else None),
        )
    return found


def _speed_ratio(staging: float | None, pool: float | None, rest: float | None) -> float | None:
    """Of steps that copy for so many seconds, and take `rest` besides; None where one is unknown."""
    if staging is None or pool is None or rest is None:
        return None
    return (staging + rest) / (pool + rest)


def _order(key: Key) -> tuple[int, float, int]:
    return key[1], key[2], list(COLORS).index(key[0])


def _speed_table(run: Run) -> str:
    size, known = run.setup["expert_bytes"], speeds(run)
    lines = []
    for key in sorted(known, key=_order):
        (variant, batch, budget), speed = key, known[key]
        low, middle, high = table.quartiles([batch / each for each in speed.samples])
        resident = known.get(("resident", batch, 100.0))
        share = batch / speed.steady / (batch / resident.steady) if resident else None
        moved = f"{speed.copied[0] * size / 1e9:.3f}" if speed.hit_rate is not None else "-"
        if variant == "offload":
            moved = f"{run.setup['shape']['layers'] * run.setup['shape']['experts'] * size / 1e9:.1f}"
        lines.append(
            [
                str(batch),
                f"{budget:g}" if variant != "offload" else "-",
                variant,
                f"{middle:.1f} ({low:.1f}-{high:.1f})",
                str(len(speed.samples)),
                f"{1e3 * speed.steady:.2f}",
                _percent(speed.hit_rate),
                moved,
                _percent(share),
            ]
        )
    header = ["batch", "budget %", "variant", "tokens/s", "samples", "ms a step", "hits", "GB a step"]
    return table.markdown([*header, "of resident"], lines)


def _split_table(run: Run) -> tuple[str, list[Bar]]:
    rate, size, lines, bars = copy_rate(run, "plain"), run.setup["expert_bytes"], [], []
    known = splits(run)
    rows = {_key(record): record for record in run.of("rows")}
    for key in sorted(known, key=_order):
        (variant, batch, budget), split = key, known[key]
        parts = split.parts
        share = parts["planner"] / split.total
        own = next(record for record in run.of("profile") if _key(record) == key)
        bus = None
        if key in rows and parts["copies"]:
            span = slice(own["first"], own["first"] + own["steps"])
            copied = sum(rows[key]["promoted"][span]) + sum(rows[key]["staged"][span])
            bus = copied * size / own["steps"] / parts["copies"] / 1e3
            if variant == "pool" and copied:
                what = f"planner, batch {batch}, budget {budget:g}%, at most {PLANNER_SHARE:.0%} of a step"
                bars.append(Bar(what, f"{share:.2%}", share <= PLANNER_SHARE))
        cells = [f"{parts.get(part, float('nan')):.0f}" for part in PART_COLORS]
        wall = f"{split.wall:.0f}" if split.wall else "-"
        of_plain = _percent(1e9 * bus / rate) if bus and rate else "-"
        bus_text = f"{bus:.1f}" if bus else "-"
        lines.append([str(batch), f"{budget:g}", variant, *cells, wall, f"{share:.2%}", bus_text, of_plain])
    header = ["batch", "budget %", "variant", *PART_COLORS, "step"]
    return table.markdown([*header, "planner share", "bus GB/s", "of plain"], lines), bars


def _ratio_table(run: Run) -> tuple[str, list[Bar]]:
    lines, bars = [], []
    for name, whole in (("steady", False), ("all steps", True)):
        for (batch, budget), ratio in sorted(ratios(run, whole).items()):
            quotient = ratio.speed / ratio.bytes
            most = [f"{each / ratio.bytes:.2f}" if each else "-" for each in (ratio.ceiling, ratio.bound)]
            figures = [f"{ratio.speed:.2f}", f"{ratio.bytes:.2f}", f"{quotient:.2f}"]
            lines.append([str(batch), f"{budget:g}", name, *figures, *most])
            what = (
                f"pool over staging only, batch {batch}, budget {budget:g}%, {name}: at least "
                f"{RATIO_SHARE} of the ratio of bytes"
            )
            figure = f"{quotient:.2f}"
            if ratio.bound and ratio.bound / ratio.bytes < RATIO_SHARE:
                figure += f", of {ratio.bound / ratio.bytes:.2f} that the bytes allow"
            bars.append(Bar(what, figure, quotient >= RATIO_SHARE))
    header = ["batch", "budget %", "steps", "times faster", "times fewer bytes", "quotient"]
    return table.markdown([*header, "at a plain copy's rate", "by bytes alone"], lines), bars


def decode_text(run: Run) -> tuple[str, list[Bar]]:
    setup, host = run.setup, run.of("host")
    rate = copy_rate(run, "plain")
    hosted: Record = host[0] if host else {"distinct_layers": "?", "layers": "?", "bytes": 0}
    facts = [
        f"Routing: {setup['routing']}; {setup['tokens']} tokens, top-{setup['top_k_of_routing']} of "
        f"{setup['shape']['experts']}; a token repeats {setup['locality']:.0%} of the token before. A batch "
        "decodes as many segments of it side by side.",
        f"Controls of the pool: {', '.join(setup['controls']) or 'defaults'}.",
        f"Besides the experts a step reads {setup['dense_bytes'] / 1e9:.2f} GB: {setup['dense']}.",
        f"{hosted['distinct_layers']} of {hosted['layers']} layers have host arrays of their own "
        f"({hosted['bytes'] / 1e9:.1f} GB); an expert is {setup['expert_bytes'] / 1e6:.2f} MB.",
    ]
    if rate:
        facts.append(f"A plain pinned copy made {rate / 1e9:.1f} GB/s in the same process.")
    device_rate = copy_rate(run, "device_copy")
    if device_rate:
        facts.append(f"A device copy read and wrote {device_rate / 1e12:.2f} TB/s.")
    programs = [record for record in run.of("program") if record["variant"] == "pool"]
    if programs:
        temporary = max(record["temp_bytes"] or 0 for record in programs)
        graphs = sum(record["launches"] == {"kCommandBuffer": 1} for record in programs)
        facts.append(
            f"{graphs} of {len(programs)} programs of the pool are one command buffer; their temporaries "
            f"are {temporary / 1e6:.1f} MB at most."
        )
    checks = run.of("check")
    if checks:
        worst = max(record.get("largest_relative_error", 0.0) for record in checks)
        equal = sum(record["equal"] for record in checks)
        facts.append(
            f"{len(checks)} comparisons of outputs: {equal} equal bit for bit, the largest relative "
            f"error {worst:.2g}."
        )
    split, split_bars = _split_table(run)
    ratio, ratio_bars = _ratio_table(run)
    parts = [
        " ".join(facts),
        "Steady state: tokens a second, median (quartiles) of the bursts.",
        _speed_table(run),
    ]
    if run.of("profile"):
        parts += [
            "Microseconds of a step by CUPTI, summed by kernel; `step` is the clock's of the same steps, "
            "without CUPTI, `gaps` what is left of it.",
            split,
        ]
    parts += [
        "Pool against staging only. The last two columns are what the quotient would be: if the copies went "
        "at a plain copy's rate, beside the step of the resident variant; and if that were nothing but "
        "reading its weights at the rate of a device copy.",
        ratio,
    ]
    return "\n\n".join(parts), [*split_bars, *ratio_bars]


def text(folder: Path) -> str:
    """Everything that a folder has to say, in Markdown."""
    sections = []
    for run in read(folder):
        make: Callable[[Run], tuple[str, list[Bar]]]
        make = micro_text if run.of("micro") else decode_text
        body, bars = make(run)
        head = f"## {run.name}"
        if not run.setup["measurement"]:
            head += "\n\nA check where there is no GPU: **its times are no measurement.**"
            bars = []
        left = [f"- left out: {record['what']}: {record['why']}" for record in run.of("left_out")]
        promises = [f"- {bar}" for bar in bars]
        lists = ["\n".join(each) for each in (promises, left) if each]
        sections.append("\n\n".join([head, body, *lists, table.ran_on(run.manifest)]))
    return "\n\n".join(sections) or f"No records in {folder}."


# Plots.


def plot_speed(runs: Sequence[Run]) -> Any:
    """Tokens a second against the budget, a row for each shape, a panel for each batch."""
    figure, panels = _panels([(run, speeds(run)) for run in runs], 4.6)
    for axes, run, batch in panels:
        known = {key: speed for key, speed in speeds(run).items() if key[1] == batch}
        for variant, color in COLORS.items():
            own = sorted((key[2], speed) for key, speed in known.items() if key[0] == variant)
            if not own:
                continue
            if variant in ("resident", "offload"):
                axes.axhline(batch / own[0][1].steady, color=color, linestyle="--", label=variant)
                continue
            budgets = [budget for budget, _ in own]
            bounds = [table.quartiles([batch / each for each in speed.samples]) for _, speed in own]
            low, middle, high = zip(*bounds, strict=True)
            # The loop planner's line often covers the pool's.
            style = ":" if variant == "loop" else "-"
            axes.plot(budgets, middle, style, marker="o", color=color, markersize=4, label=variant)
            axes.fill_between(budgets, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_title(f"{run.setup['shape']['name']}, batch {batch}", fontsize=10)
        axes.set_xlabel("experts with a pool row, %")
        axes.set_ylabel("tokens a second")
        axes.set_yscale("log")
        axes.grid(True, which="both", color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=7, frameon=False)
    return figure


def plot_split(runs: Sequence[Run]) -> Any:
    """Where a step's time goes: stacked, a row for each shape, a panel for each batch."""
    figure, panels = _panels([(run, splits(run)) for run in runs], 5.4)
    for axes, run, batch in panels:
        known = {key: split for key, split in splits(run).items() if key[1] == batch}
        keys = sorted(known, key=_order)
        bottom = [0.0] * len(keys)
        for part, color in PART_COLORS.items():
            heights = [known[key].parts.get(part, 0.0) / 1e3 for key in keys]
            axes.bar(range(len(keys)), heights, bottom=bottom, color=color, label=part)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        labels = [f"{key[0]} {key[2]:g}%" for key in keys]
        axes.set_xticks(range(len(keys)), labels, rotation=60, ha="right", fontsize=7)
        axes.set_title(f"{run.setup['shape']['name']}, batch {batch}", fontsize=10)
        axes.set_ylabel("milliseconds a step")
        axes.legend(fontsize=7, frameon=False)
    return figure


def plot_ratio(runs: Sequence[Run]) -> Any:
    """Times faster than staging only against times fewer bytes, a panel for each shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * len(runs), 4.6), layout="constrained")
    styles = [(False, "o", "steady"), (True, "s", "all steps")]
    for axes, run in zip(figure.subplots(1, len(runs), squeeze=False).flat, runs, strict=True):
        largest = 1.0
        colors = {1: COLORS["pool"]}
        for whole, marker, name in styles:
            found = ratios(run, whole)
            for batch in dict.fromkeys(batch for batch, _ in found):
                color = colors.setdefault(batch, COLORS["offload"])
                own = sorted((budget, ratio) for (each, budget), ratio in found.items() if each == batch)
                x, y = [ratio.bytes for _, ratio in own], [ratio.speed for _, ratio in own]
                fill = "none" if whole else color
                label = f"batch {batch}, {name}"
                axes.plot(x, y, marker, color=color, markerfacecolor=fill, markersize=5, label=label)
                ceilings = [(ratio.bytes, ratio.ceiling) for _, ratio in own if ratio.ceiling]
                if ceilings:
                    axes.plot(*zip(*ceilings, strict=True), "_", color=color, markersize=11)
                for (budget, _), at in zip(own, zip(x, y, strict=True), strict=True):
                    axes.annotate(
                        f"{budget:g}%", at, (6, -7), textcoords="offset points", fontsize=6, color=color
                    )
                largest = max(largest, *x, *y)
        line = [0.8, 1.3 * largest]
        axes.plot(line, line, color="#999999", linewidth=1, label="the ratio of bytes")
        promised = [RATIO_SHARE * each for each in line]
        axes.plot(line, promised, "--", color="#999999", linewidth=1, label=f"{RATIO_SHARE} of it")
        axes.plot([], [], "_", color="#666666", markersize=11, label="at a plain copy's rate")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("times fewer bytes over the bus")
        axes.set_ylabel("times faster than staging only")
        axes.set_title(run.setup["shape"]["name"], fontsize=10)
        axes.legend(fontsize=7, frameon=False)
    return figure


def _panels(
    found: Sequence[tuple[Run, dict[Key, Any]]], width: float
) -> tuple[Any, list[tuple[Any, Run, int]]]:
    """A figure, and its panels with the run and the batch of each."""
    from matplotlib.figure import Figure

    wanted = [(run, sorted({key[1] for key in known})) for run, known in found]
    columns = max(len(batches) for _, batches in wanted)
    figure = Figure(figsize=(width * columns, 3.9 * len(wanted)), layout="constrained")
    grid = figure.subplots(len(wanted), columns, squeeze=False)
    panels = []
    for row, (run, batches) in zip(grid, wanted, strict=True):
        panels += [(axes, run, batch) for axes, batch in zip(row, batches, strict=False)]
        for axes in row[len(batches) :]:
            axes.set_visible(False)
    return figure, panels


PLOTS = {"speed": plot_speed, "split": plot_split, "ratio": plot_ratio}


def write(folder: Path) -> list[Path]:
    """Writes report.md and the plots, and returns their paths."""
    written = [folder / "report.md"]
    written[0].write_text(text(folder) + "\n")
    runs = [run for run in read(folder) if run.of("burst")]
    for name, plot in PLOTS.items():
        own = [run for run in runs if run.of("profile")] if name == "split" else runs
        if own:
            written.append(folder / f"{name}.png")
            plot(own).savefig(written[-1], dpi=DPI, facecolor="white")
    return written


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        sys.exit("argument: a folder that bench/decode.py has written")
    for path in write(Path(argv[1])):
        print(path)


if __name__ == "__main__":
    main(sys.argv)
