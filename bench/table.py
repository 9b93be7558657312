"""Tables of a run's timing: for the terminal, and for the README, between its two markers.

`python bench/table.py bench/results/NAME` writes the README's.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app

BASELINE = "loop"
README = Path(__file__).resolve().parents[1] / "README.md"
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


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]


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
                _quartiles(times),
                medians[key] / baseline if baseline else None,
                (statistics.median(own), statistics.fmean(own), max(own)) if own else None,
            )
        )
    return rows


def graph_notes(records: Iterable[dict[str, Any]]) -> list[str]:
    """A sentence for each chain that did not run as one command buffer, or may not have."""
    notes = []
    for record in records:
        if record["kind"] != "chain" or record["launches"] == {"kCommandBuffer": 1}:
            continue
        chain = f"{record['implementation']} at {record['width']} lanes"
        launches = ", ".join(f"{n} {name}" for name, n in record["launches"].items())
        if launches:
            notes.append(f"Not one command buffer: {chain} launches {launches}.")
        else:
            notes.append(f"XLA did not say what {chain} launches.")
    return notes


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
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


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---:" if i == 0 else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def readme_section(rows: Sequence[Row], notes: Sequence[str], manifest: dict[str, Any]) -> str:
    """The README's results: a column for each implementation, and what they were measured on."""
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
        return _markdown(["lanes", "pattern", *columns], lines)

    kernels = list(dict.fromkeys(row.implementation for row in rows if row.kernel))
    packages = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    command = " ".join(["python", *manifest["argv"]])
    commit = manifest["git"]["commit"] + (" with changes" if manifest["git"]["dirty"] else "")
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
    parts.append(
        f"`{command}` on {manifest['device']}, driver {manifest['driver']}, "
        f"Python {manifest['python']}, {packages}; commit {commit}; {manifest['time']}."
    )
    return "\n\n".join(parts)


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


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("one argument: the folder that bench/run.py has written")
    folder = Path(argv[1])
    manifest = json.loads((folder / "manifest.json").read_text())
    records = read_records(folder)
    section = readme_section(summarize(records), graph_notes(records), manifest)
    README.write_text(replace_section(README.read_text(), section))


if __name__ == "__main__":
    app.run(main)
