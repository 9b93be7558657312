"""A sweep's results: for the terminal, as CSV and JSON records, and as a plot."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import pallas_pool as pp
from bench.counts import Counts

PLANNER, LFU, OPTIMUM = "planner", "lfu", "optimum"
LABELS = {PLANNER: "planner", LFU: "least frequently used", OPTIMUM: "offline optimum (Belady)"}


class Result(NamedTuple):
    """A budget of the sweep.

    Attributes:
      config: of the pool.
      counts: of each policy, by name.
    """

    config: pp.PoolConfig
    counts: dict[str, Counts]

    @property
    def rows_a_layer(self) -> float:
        return self.config.rows / self.config.num_layers

    def hit_rate(self, policy: str) -> float:
        return self.counts[policy].hit_rate


class Bus(NamedTuple):
    """What a copy costs.

    Attributes:
      row_bytes: of an expert's row, or None if it is not known.
      gbs: GB/s, of 10**9 bytes.
    """

    row_bytes: int | None
    gbs: float

    def bytes_a_token(self, counts: Counts) -> float | None:
        return None if self.row_bytes is None else counts.copies * self.row_bytes

    def seconds_a_token(self, counts: Counts) -> float | None:
        size = self.bytes_a_token(counts)
        return None if size is None else size / (self.gbs * 1e9)


def records(results: Iterable[Result], bus: Bus) -> Iterator[dict[str, Any]]:
    """One of every policy at every budget."""
    for result in results:
        for policy, counts in result.counts.items():
            yield {
                "policy": policy,
                "rows_a_layer": round(result.rows_a_layer, 4),
                "pool_rows": result.config.rows,
                "bank_bytes": bus.row_bytes and bus.row_bytes * result.config.bank_rows,
                "selected": int(counts.selected.sum()),
                "hits": int(counts.hits.sum()),
                "promoted": int(counts.promoted.sum()),
                "staged": int(counts.staged.sum()),
                "hit_rate": round(counts.hit_rate, 4),
                "promoted_a_token": round(counts.a_token(counts.promoted), 4),
                "staged_a_token": round(counts.a_token(counts.staged), 4),
                "bytes_a_token": bus.bytes_a_token(counts),
                "bus_seconds_a_token": bus.seconds_a_token(counts),
            }


def layer_records(results: Iterable[Result], layers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One of every layer, policy and budget; layers by their numbers in the trace."""
    for result in results:
        for policy, counts in result.counts.items():
            rates = counts.layer_hit_rates
            for i, layer in enumerate(layers):
                yield {
                    "policy": policy,
                    "pool_rows": result.config.rows,
                    "layer": layer,
                    "selected": int(counts.selected[i]),
                    "hits": int(counts.hits[i]),
                    "promoted": int(counts.promoted[i]),
                    "staged": int(counts.staged[i]),
                    "hit_rate": None if np.isnan(rates[i]) else round(float(rates[i]), 4),
                }


def write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def sweep_table(results: Sequence[Result], bus: Bus) -> str:
    """One line a budget. `policy` and `size` part what is missing from 100 % at the optimum."""
    header = ["rows a layer", "pool rows", "hit %", "promoted", "staged", "MB", "bus ms"]
    lines = [[*header, "LFU %", "optimum %", "policy", "size"]]
    if bus.row_bytes is not None:
        lines[0].insert(2, "bank GB")
    for result in results:
        counts = result.counts[PLANNER]
        rates = [result.hit_rate(name) for name in (PLANNER, LFU, OPTIMUM)]
        size, seconds = bus.bytes_a_token(counts), bus.seconds_a_token(counts)
        line = [f"{result.rows_a_layer:.4g}", str(result.config.rows), f"{rates[0]:.2f}"]
        line += [f"{counts.a_token(x):.2f}" for x in (counts.promoted, counts.staged)]
        line += ["-" if size is None else f"{size / 1e6:.2f}"]
        line += ["-" if seconds is None else f"{seconds * 1e3:.3f}"]
        line += [f"{x:.2f}" for x in (*rates[1:], rates[2] - rates[0], 100 - rates[2])]
        if bus.row_bytes is not None:
            line.insert(2, f"{result.config.bank_rows * bus.row_bytes / 1e9:.2f}")
        lines.append(line)
    return _aligned(lines)


def _percent(rate: float) -> str:
    return "-" if np.isnan(rate) else f"{rate:.2f}"


def layer_table(results: Sequence[Result], layers: Sequence[int]) -> str:
    """The planner's hit rates: a line a layer, a column a budget, in rows a layer."""
    columns = [result.counts[PLANNER].layer_hit_rates for result in results]
    lines = [["layer", *(f"{result.rows_a_layer:.4g}" for result in results)]]
    lines += [
        [str(layer), *map(_percent, rates)]
        for layer, rates in zip(layers, np.transpose(columns), strict=True)
    ]
    return _aligned(lines)


def plot(
    path: Path, title: str, results: Sequence[Result], cycle: int, layers: Sequence[int]
) -> None:
    """Draws hit rate against budget for each policy, and the planner's by layer and budget."""
    rows = [result.rows_a_layer for result in results]
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    curves, heat = figure.subplots(1, 2)
    figure.suptitle(title)
    for policy, marker in ((OPTIMUM, "^"), (PLANNER, "o"), (LFU, "s")):
        rates = [result.hit_rate(policy) for result in results]
        curves.plot(rows, rates, marker=marker, label=LABELS[policy])
    at = cycle / results[0].config.num_layers
    curves.axvline(at, color="gray", linestyle=":", label=f"one token's cycle, {cycle} rows")
    curves.set_xscale("log", base=2)
    curves.set_xticks(rows, [f"{x:.4g}" for x in rows], rotation=45)
    curves.minorticks_off()
    curves.set(xlabel="rows a layer", ylabel="hit rate, %", ylim=(-2, 102))
    curves.grid(alpha=0.3)
    curves.legend(loc="lower right")
    by_layer = np.transpose([result.counts[PLANNER].layer_hit_rates for result in results])
    image = heat.imshow(by_layer, aspect="auto", origin="lower", vmin=0, vmax=100)
    heat.set_xticks(range(len(rows)), [f"{x:.4g}" for x in rows], rotation=45)
    every = -(-len(layers) // 16)
    heat.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
    heat.set(xlabel="rows a layer", ylabel="layer", title="the planner, by layer")
    figure.colorbar(image, ax=heat, label="hit rate, %")
    figure.savefig(path, dpi=120)
