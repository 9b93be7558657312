"""Tables of a run's timing: for the terminal, and for a page of the documentation, between its two markers.

`python bench/table.py bench/results/NAME` writes those of docs/results.md; with `--page=PAGE` another page's.
Folders that bench/sweep.py and bench/peers.py have written may follow, or stand alone, and add a table of
their own.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

BASELINE = "loop"
Cell = tuple[str, int, int, int, str]  # The first fields of a SweepRow.
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results.md"
MARKERS = ("<!-- results:start -->", "<!-- results:end -->")


class Row(NamedTuple):
    """An implementation on a case; microseconds a layer step.

    Attributes:
      width: lanes.
      case: name of the pattern.
      implementation: name of what was timed.
      quartiles: of the batches of graph replay, medians in the middle.
      ratio: of its median to the baseline's, or None without a baseline.
      kernel: median, mean and maximum of the kernel's own durations, or None.
    """

    width: int
    case: str
    implementation: str
    quartiles: tuple[float, float, float]
    ratio: float | None
    kernel: tuple[float, float, float] | None


class SweepRow(NamedTuple):
    """An implementation in a cell of a sweep; microseconds a layer step.

    Attributes:
      sweep: its name.
      rows: pool rows.
      width: lanes.
      promoted: promotions a step.
      implementation: name of what was timed.
      quartiles: of the batches of graph replay, medians in the middle, or None.
      kernel: median, mean, 99th percentile and maximum of the kernel's own durations, or None.
    """

    sweep: str
    rows: int
    width: int
    promoted: int
    implementation: str
    quartiles: tuple[float, float, float] | None
    kernel: tuple[float, float, float, float] | None


def read_records(folder: Path, name: str = "timing.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def read_sweeps(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Records of all sweeps in some folders; of a kernel that two runs have timed, those of the first.

    Raises:
      FileNotFoundError: a folder has none.
    """
    found: list[dict[str, Any]] = []
    for folder in folders:
        paths = sorted(folder.glob("sweep.jsonl")) + sorted(folder.glob("peers.jsonl"))
        if not paths:
            raise FileNotFoundError(f"neither sweep.jsonl nor peers.jsonl in {folder}")
        for path in paths:
            known = {record.get("implementation") for record in found} - {None}
            new = read_records(folder, path.name)
            found += [record for record in new if record.get("implementation") not in known]
    return found


def summarize_sweep(records: Iterable[dict[str, Any]]) -> list[SweepRow]:
    """One row for each implementation in each cell, in the order of the records."""
    replays: dict[Cell, list[float]] = defaultdict(list)
    kernels: dict[Cell, list[float]] = {}
    for record in records:
        if record["kind"] not in ("batch", "kernel"):
            continue
        key: Cell = (
            record["sweep"],
            record["rows"],
            record["width"],
            record["promoted"],
            record["implementation"],
        )
        if record["kind"] == "batch":
            replays[key].append(1e6 * record["seconds"] / record["steps"])
        else:
            kernels[key] = record["microseconds"]
    return [
        SweepRow(
            *key,
            quartiles(replays[key]) if key in replays else None,
            _durations(kernels[key]) if key in kernels else None,
        )
        for key in dict.fromkeys([*replays, *kernels])
    ]


def _durations(times: Sequence[float]) -> tuple[float, float, float, float]:
    ordered = sorted(times)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return statistics.median(ordered), statistics.fmean(ordered), high, ordered[-1]


def summarize(records: Iterable[dict[str, Any]]) -> list[Row]:
    """One row for each implementation on each case, in the order of the records."""
    batches, kernels = defaultdict(list), {}
    for record in records:
        if record["kind"] == "batch":
            key = record["width"], record["case"], record["implementation"]
            batches[key].append(1e6 * record["seconds"] / record["steps"])
        elif record["kind"] == "kernel":
            key = record["width"], record["case"], record["implementation"]
            kernels[key] = record["microseconds"]
    medians = {key: statistics.median(times) for key, times in batches.items()}
    rows = []
    for (width, case, name), times in batches.items():
        key = width, case, name
        baseline = medians.get((width, case, BASELINE))
        own = kernels.get(key)
        rows.append(
            Row(
                width,
                case,
                name,
                quartiles(times),
                medians[key] / baseline if baseline else None,
                (statistics.median(own), statistics.fmean(own), max(own)) if own else None,
            )
        )
    return rows


def graph_notes(records: Iterable[dict[str, Any]]) -> list[str]:
    """A sentence for all chains that launch the same, if that is not one command buffer, or may not be."""
    chains: dict[str, dict[str, list[str]]] = {}
    for record in records:
        if record["kind"] == "chain" and record["launches"] != {"kCommandBuffer": 1}:
            launches = ", ".join(f"{n} {name}" for name, n in record["launches"].items())
            widths = chains.setdefault(launches, {}).setdefault(record["implementation"], [])
            if str(record["width"]) not in widths:
                widths.append(str(record["width"]))
    notes = []
    for launches, found in chains.items():
        who = ", ".join(f"{name} at {' and '.join(widths)} lanes" for name, widths in found.items())
        if launches:
            notes.append(f"Not one command buffer, but {launches} a call: {who}.")
        else:
            notes.append(f"XLA did not say what a call launches: {who}.")
    return notes


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return (times[0],) * 3
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


def _number(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 100 else f"{microseconds:.0f}"


def terminal_table(rows: Iterable[Row]) -> str:
    """One line a row."""
    header = ["lanes", "pattern", "implementation", "median", "q1", "q3", f"/ {BASELINE}"]
    header += ["kernel median", "mean", "max"]
    lines = [header]
    for row in rows:
        low, middle, high = row.quartiles
        line = [str(row.width), row.case, row.implementation, *map(_number, (middle, low, high))]
        line.append(f"{row.ratio:.3f}" if row.ratio else "-")
        lines.append(line + (list(map(_number, row.kernel)) if row.kernel else ["-"] * 3))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if 0 < i < 3 else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---:"] * len(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def run_section(rows: Sequence[Row], notes: Sequence[str], manifest: dict[str, Any]) -> str:
    """The tables of a run: a column for each implementation, and what they were measured on."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    cells = {(row.width, row.case, row.implementation): row for row in rows}
    cases = list(dict.fromkeys((row.width, row.case) for row in rows))

    def replay(row: Row | None) -> str:
        if row is None:
            return ""
        low, middle, high = map(_number, row.quartiles)
        ratio = f", {row.ratio:.2f}x" if row.ratio and row.implementation != BASELINE else ""
        return f"{middle} ({low}-{high}){ratio}"

    def kernel(row: Row | None) -> str:
        return " / ".join(map(_number, row.kernel)) if row and row.kernel else ""

    def table(cell: Any, columns: Sequence[str]) -> str:
        lines = [
            [str(width), f"`{case}`", *(cell(cells.get((width, case, name))) for name in columns)]
            for width, case in cases
        ]
        return markdown(["lanes", "pattern", *columns], lines)

    kernels = list(dict.fromkeys(row.implementation for row in rows if row.kernel))
    parts = [
        "Graph replay, microseconds a layer step: median (quartiles) of the batches, and the ratio "
        f"of medians to `{BASELINE}`.",
        table(replay, names),
    ]
    if kernels:
        parts += [
            "The kernels' own durations by CUPTI, microseconds: median / mean / slowest step.",
            table(kernel, kernels),
        ]
    parts += [" ".join(notes)] if notes else []
    parts.append(ran_on(manifest))
    return "\n\n".join(parts)


def sweep_terminal_table(rows: Iterable[SweepRow]) -> str:
    """One line a row."""
    lines = [["sweep", "implementation", "rows", "lanes", "promoted", "replay", "q1", "q3"]]
    lines[0] += ["kernel median", "mean", "p99", "max"]
    for row in rows:
        line = [row.sweep, row.implementation, str(row.rows), str(row.width), str(row.promoted)]
        low, middle, high = map(_number, row.quartiles) if row.quartiles else ["-"] * 3
        kernel = list(map(_number, row.kernel)) if row.kernel else ["-"] * 4
        lines.append([*line, middle, low, high, *kernel])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if i < 2 else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def sweep_section(records: Sequence[dict[str, Any]]) -> str:
    """The tables of the sweeps: a column for each implementation."""
    rows = summarize_sweep(records)
    names = list(dict.fromkeys(row.implementation for row in rows))
    cells = {row[:5]: row for row in rows}

    def cell(row: SweepRow | None) -> str:
        if row is None:
            return ""
        replay = _number(row.quartiles[1]) if row.quartiles else "-"
        if row.kernel is None:
            return replay
        median, mean, _, slowest = map(_number, row.kernel)
        return f"{replay}; {median} / {mean} / {slowest}"

    lines = [
        [*map(str, key[1:]), *(cell(cells.get((*key, name))) for name in names)]
        for key in dict.fromkeys(row[:4] for row in rows)
    ]
    computes = {
        record["implementation"]: record["text"]
        for record in records
        if record["kind"] == "computes"
    }
    parts = [
        "Microseconds a layer step: graph replay, median of the batches; then the kernel's own "
        "durations by CUPTI, median / mean / slowest step.",
        markdown(["pool rows", "lanes", "promoted", *names], lines),
        *(f"`{name}`: {text}" for name, text in computes.items()),
    ]
    return "\n\n".join(parts)


def ran_on(manifest: dict[str, Any]) -> str:
    """The command, the machine and the sources of a run, as a sentence."""
    packages = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    command = " ".join(["python", *manifest["argv"]])
    commit = manifest["git"]["commit"] + (" with changes" if manifest["git"]["dirty"] else "")
    if commit.startswith("missing"):  # Run in a copy of the sources without their history.
        commit = "unknown, see the hashes in its manifest"
    return (
        f"`{command}` on {manifest['device']}, driver {manifest['driver']}, "
        f"Python {manifest['python']}, {packages}; commit {commit}; {manifest['time']}."
    )


def replace_section(text: str, section: str) -> str:
    """`text` with what stands between the markers replaced.

    Raises:
      ValueError: `text` has not both markers, in order.
    """
    start, end = MARKERS
    before, found, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"the text has no {start} followed by {end}")
    return f"{before}{start}\n{section}\n{end}{after}"


def merge_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Records of the first run, and the kernels' durations in cells where only a later run has them."""
    records = read_records(folders[0])

    def cell(record: dict[str, Any]) -> tuple[Any, ...]:
        return record["width"], record["case"], record["implementation"]

    for folder in folders[1:]:
        known = {cell(record) for record in records if record["kind"] == "kernel"}
        later = [record for record in read_records(folder) if record["kind"] == "kernel"]
        records += [record for record in later if cell(record) not in known]
    return records


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError(
            "arguments: folders that bench/run.py has written, if any: the first for the replays, each for "
            "the kernels' durations that those before lack; then folders of sweeps"
        )
    folders = list(map(Path, argv[1:]))
    runs = [folder for folder in folders if (folder / "timing.jsonl").exists()]
    sweeps = [folder for folder in folders if folder not in runs]
    first, *others = (json.loads((each / "manifest.json").read_text()) for each in (*runs, *sweeps))
    parts = []
    if runs:
        records = merge_runs(runs)
        parts.append(run_section(summarize(records), graph_notes(records), first))
    else:
        others = [first, *others]
    if sweeps:
        parts.append(sweep_section(read_sweeps(sweeps)))
    section = "\n\n".join([*parts, *map(ran_on, others)])
    page = Path(flags.FLAGS.page) if flags.FLAGS.page else RESULTS
    page.write_text(replace_section(page.read_text(), section))


if __name__ == "__main__":
    flags.DEFINE_string("page", None, "page whose marked section is written; docs/results.md by default")
    app.run(main)
