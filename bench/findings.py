"""What a sweep says: where the hit rate flattens, where it falls off, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Bend(NamedTuple):
    """Where a curve of hit rates flattens.

    Attributes:
      at: index of the budget.
      before, after: points of hit rate that a row a layer gains on average up to there, and from
        there on.
    """

    at: int
    before: float
    after: float


def bend(rows: Sequence[float], hit_rates: Sequence[float]) -> Bend | None:
    """The budget that lies highest above the straight line from the first budget to the last:
    before it a row gains more than the average row of the sweep, beyond it less, and there at the
    most half as much.

    Args:
      rows: a layer, rising.
      hit_rates: in percent.

    Returns:
      The bend, or None where the curve is straighter than that.
    """
    if len(rows) < 3:
        return None
    x, y = np.asarray(rows, float), np.asarray(hit_rates, float)
    above = y - y[0] - (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0])
    at = int(np.argmax(above))
    if above[at] <= 0:
        return None
    before, after = (y[at] - y[0]) / (x[at] - x[0]), (y[-1] - y[at]) / (x[-1] - x[at])
    return Bend(at, float(before), float(after)) if after <= before / 2 else None


def _rows(layers: int, pool_rows: int) -> str:
    return f"{pool_rows / layers:.4g} rows a layer"


def flattening(layers: int, pool_rows: Sequence[int], hit_rates: Sequence[float]) -> str:
    """A sentence on where the hit rate flattens; budgets are pool rows, rising."""
    if len(pool_rows) < 3:
        return "Where the hit rate flattens, three budgets or more would show."
    a_layer = [rows / layers for rows in pool_rows]
    found = bend(a_layer, hit_rates)
    last = (
        f"the last step, from {a_layer[-2]:.4g} to {a_layer[-1]:.4g} rows, gains "
        f"{hit_rates[-1] - hit_rates[-2]:.2f} points"
    )
    if max(hit_rates) - min(hit_rates) < 0.005:
        return "The hit rate is the same at all these budgets."
    if found is None:
        return f"The hit rate does not flatten within these budgets: {last}."
    return (
        f"The hit rate flattens beyond {_rows(layers, pool_rows[found.at])}: up to there a row a "
        f"layer gains {found.before:.2f} points on average, beyond {found.after:.2f}; {last}."
    )


def cliff(
    layers: int, cycles: np.ndarray, pool_rows: Sequence[int], hit_rates: Sequence[float]
) -> str:
    """A sentence on the rows below which the pool cannot hold what one token selects."""
    most = int(cycles.max())
    text = (
        f"One token selects up to {most} distinct experts over all {layers} layers. A pool of "
        f"fewer rows ({most / layers:.4g} a layer) cannot hold one token's cycle: what a token has "
        "selected is evicted by that same token's later layers."
    )
    below = [
        f"{rows / layers:.4g} rows a layer, fewer than {100 * np.mean(cycles > rows):.0f} % of the "
        f"tokens need ({rate:.2f} % hits)"
        for rows, rate in zip(pool_rows, hit_rates, strict=True)
        if rows < most
    ]
    return f"{text} Below that: {'; '.join(below) or 'none of these budgets'}."


def limits(layers: int, pool_rows: int, planner: float, optimum: float, lfu: float) -> str:
    """A sentence on what keeps the hit rate of a budget from 100 %."""
    if planner == 100:
        return f"At {_rows(layers, pool_rows)} everything hits."
    text = (
        f"At {_rows(layers, pool_rows)} the planner hits {planner:.2f} %, LFU {lfu:.2f} %, the "
        f"optimum {optimum:.2f} %: of the {100 - planner:.2f} points that are missing, a better "
        f"policy could gain {optimum - planner:.2f}, and only more rows or other initial residents "
        f"{100 - optimum:.2f}"
    )
    most = "policy" if optimum - planner > 100 - optimum else "size"
    return f"{text}: {most} limits most."
