"""Plots of the sweeps: `python bench/plots.py FOLDER...` writes PNGs to the first folder.

The folders are those that bench/sweep.py and bench/peers.py have written. Lines are medians, of the
kernels' own durations where there are any, and of graph replay, dashed; crosses are means, triangles
the slowest single step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # Run as a script: import the checkout that it stands in, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from bench import table
from bench.table import SweepRow

COLORS = {
    "fused": "#0b6e4f",
    "masked": "#e08e0b",
    "loop": "#b3261e",
    "flashlib": "#3b5bdb",
}
OTHER = "#666666"
DPI = 140
PANEL = 4.6, 3.6  # Inches.


def _draw(axes: Axes, rows: Sequence[SweepRow], x: str) -> None:
    """Draws one line an implementation."""
    for name in reversed(dict.fromkeys(row.implementation for row in rows)):  # The first on top.
        own = sorted(
            (row for row in rows if row.implementation == name), key=lambda row: getattr(row, x)
        )
        color = COLORS.get(name, OTHER)
        replayed = [(getattr(row, x), row.quartiles[1]) for row in own if row.quartiles]
        timed = [(getattr(row, x), *row.kernel) for row in own if row.kernel]
        if replayed:
            axes.plot(*zip(*replayed, strict=True), "--", color=color, linewidth=1, alpha=0.7)
        if timed:
            at, median, mean, _, slowest = zip(*timed, strict=True)
            axes.plot(at, median, "-o", color=color, linewidth=1.8, markersize=4)
            axes.plot(at, mean, "x", color=color, markersize=6)
            axes.plot(at, slowest, "^", color=color, markersize=5, markerfacecolor="none")


def _finish(axes: Axes, title: str, xlabel: str, ticks: Sequence[int]) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _figure(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    lines = -(-count // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines + 0.7), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    for line in grid:
        line[0].set_ylabel("microseconds a layer step")
    return figure, panels


def _legend(figure: Figure, rows: Sequence[SweepRow]) -> None:
    names = dict.fromkeys(row.implementation for row in rows)
    handles = [Line2D([], [], color=COLORS.get(name, OTHER), label=name) for name in names]
    if any(row.kernel for row in rows):
        handles += [
            Line2D([], [], color=OTHER, marker="o", label="kernel, median"),
            Line2D([], [], color=OTHER, marker="x", linestyle="", label="mean"),
            Line2D(
                [],
                [],
                color=OTHER,
                marker="^",
                linestyle="",
                markerfacecolor="none",
                label="slowest step",
            ),
        ]
    handles.append(Line2D([], [], color=OTHER, linestyle="--", linewidth=1, label="graph replay"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False
    )


def plot_promotions(rows: Sequence[SweepRow]) -> Figure:
    """Time against promotions a step, a panel for each number of lanes."""
    widths = sorted({row.width for row in rows})
    figure, panels = _figure(len(widths), len(widths))
    for axes, width in zip(panels, widths, strict=False):
        own = [row for row in rows if row.width == width]
        _draw(axes, own, "promoted")
        axes.set_xscale("symlog", base=2, linthresh=1)
        ticks = sorted({row.promoted for row in own})
        pool = " and ".join(f"{each:,}" for each in sorted({row.rows for row in own}))
        _finish(axes, f"{width} lanes, {pool} pool rows", "promotions a step", ticks)
    _legend(figure, rows)
    return figure


def plot_pool(rows: Sequence[SweepRow]) -> Figure:
    """Time against pool rows, a panel for each number of lanes and of promotions a step."""
    panels_of = sorted({(row.width, row.promoted) for row in rows})
    figure, panels = _figure(len(panels_of), min(2, len(panels_of)))
    for axes, (width, promoted) in zip(panels, panels_of, strict=False):
        own = [row for row in rows if (row.width, row.promoted) == (width, promoted)]
        _draw(axes, own, "rows")
        axes.set_xscale("log", base=2)
        ticks = sorted({row.rows for row in own})
        plural = "" if promoted == 1 else "s"
        title = f"{width} lanes, {promoted} promotion{plural} a step"
        _finish(axes, title, "pool rows", ticks)
    _legend(figure, rows)
    return figure


PLOTS = {"promotions": plot_promotions, "pool": plot_pool}


def write(folders: Sequence[Path]) -> list[Path]:
    """Writes one PNG a sweep to the first folder, and returns their paths."""
    rows = table.summarize_sweep(table.read_sweeps(folders))
    written = []
    for sweep, plot in PLOTS.items():
        own = [row for row in rows if row.sweep == sweep]
        if own:
            written.append(folders[0] / f"{sweep}.png")
            plot(own).savefig(written[-1], dpi=DPI, facecolor="white")
    return written


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError(
            "arguments: folders that bench/sweep.py and bench/peers.py have written"
        )
    for path in write([Path(each) for each in argv[1:]]):
        print(path)


if __name__ == "__main__":
    app.run(main)
