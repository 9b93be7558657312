"""What other policies make of a trace, in plain Python, apart from the planner: the offline
optimum, least-frequently-used, and least-recently-used, which is the planner's own as long as its
controls stand at their defaults.

All keep to the planner's rules. The rows are shared by all layers. A step of one layer finds the
experts that it selects resident (hits) or not (misses), and takes each miss into a row of the pool,
whose owner it evicts, or stages it for this step alone. An expert that is selected in a step is not
evicted in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import pallas_pool as pp
from bench.counts import Counts
from bench.traces import selected_lanes

Residents = Sequence[Sequence[int]]


class _Worth(NamedTuple):
    """Which rows a policy gives up: those that are worth least, of equal ones the lowest.

    Attributes:
      selected: of each key that each step selects: what it is worth from then on.
      initial: of each key that is resident at the start: what it is worth at first.
      stages: whether a miss is staged that is not worth more than the row that it would take.
    """

    selected: list[list[int]]
    initial: list[int]
    stages: bool


def _next_use(config: pp.PoolConfig, steps: list[list[int]]) -> _Worth:
    """Worth more, the sooner a key is selected again; of keys that one step selects next, the
    sooner they are selected after that, and so on."""
    never = (len(steps) + 1) * config.width
    following = [never] * config.keys  # Of each key, its next step and its rank in it, in one int.
    worth = []
    for step in range(len(steps) - 1, -1, -1):
        worth.append([-following[key] for key in steps[step]])
        for rank, key in enumerate(sorted(steps[step], key=following.__getitem__)):
            following[key] = step * config.width + rank
    return _Worth(worth[::-1], [-next_step for next_step in following], stages=True)


def _frequency(config: pp.PoolConfig, steps: list[list[int]]) -> _Worth:
    """Worth its number of selections so far; of equal ones the latest is worth most."""
    counts, worth = [0] * config.keys, []
    for clock, keys in enumerate(steps, 1):
        for key in keys:
            counts[key] += 1
        worth.append([counts[key] * (len(steps) + 1) + clock for key in keys])
    return _Worth(worth, [0] * config.keys, stages=False)


def _recency(config: pp.PoolConfig, steps: list[list[int]]) -> _Worth:
    """Worth the step that selected it last."""
    worth = [[clock] * len(keys) for clock, keys in enumerate(steps, 1)]
    return _Worth(worth, [0] * config.keys, stages=False)


def optimum(config: pp.PoolConfig, ids: np.ndarray, residents: Residents) -> Counts:
    """Belady's: the most hits that any policy can make that keeps to the rules above, whatever it
    knows, and copies an expert only in a step that selects it.

    Beside its hits, a step keeps those of the other residents and of the misses that are selected
    again soonest; a miss that is not among them is staged. Of two pools that differ in one expert,
    the one whose expert is selected sooner never makes fewer hits from there on. Where one step
    selects both next, it hits one and misses the other in either pool, but must keep the hit:
    better the one that is selected sooner after that.
    """
    return _replay(config, ids, residents, _next_use)


def least_frequent(config: pp.PoolConfig, ids: np.ndarray, residents: Residents) -> Counts:
    """Least-frequently-used: evicts the expert with the fewest selections so far in the trace, of
    equal ones the longest unused. An evicted expert keeps its count. Every miss that finds a
    victim gets its row."""
    return _replay(config, ids, residents, _frequency)


def least_recent(config: pp.PoolConfig, ids: np.ndarray, residents: Residents) -> Counts:
    """Least-recently-used: what the planner does while every control stands at its default."""
    return _replay(config, ids, residents, _recency)


def _steps(config: pp.PoolConfig, ids: np.ndarray) -> list[list[int]]:
    """The distinct keys that each step selects, in the order of their first lanes."""
    token, layer, lane = np.nonzero(selected_lanes(ids))
    keys = (layer * config.num_experts + ids[token, layer, lane]).tolist()
    number = np.prod(ids.shape[:2])
    ends = np.searchsorted(token * ids.shape[1] + layer, np.arange(number), side="right").tolist()
    return [keys[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _replay(
    config: pp.PoolConfig,
    ids: np.ndarray,
    residents: Residents,
    policy: Callable[[pp.PoolConfig, list[list[int]]], _Worth],
) -> Counts:
    steps = _steps(config, ids)
    selected, initial, stages = policy(config, steps)
    owner = [
        layer * config.num_experts + int(expert)
        for layer, experts in enumerate(residents)
        for expert in experts
    ]
    row_of = {key: row for row, key in enumerate(owner)}
    worth = [initial[key] for key in owner]
    # (worth, row) of every worth that a row has had; those that it no longer has are passed over.
    heap = [(value, row) for row, value in enumerate(worth)]
    heapq.heapify(heap)
    promoted, staged = [0] * len(steps), [0] * len(steps)
    for step, keys in enumerate(steps):
        stamped, misses = [], []
        for key, value in zip(keys, selected[step], strict=True):
            row = row_of.get(key)
            if row is None:
                misses.append((value, key))
            else:
                worth[row] = value
                stamped.append(row)
        if stages:
            misses.sort(reverse=True)
        for value, key in misses:
            # The rows that this step has stamped are not on the heap yet: none is a victim.
            while heap and worth[heap[0][1]] != heap[0][0]:
                heapq.heappop(heap)
            if not heap or (stages and value <= heap[0][0]):
                staged[step] += 1
                continue
            _, row = heapq.heappop(heap)
            del row_of[owner[row]]
            row_of[key], owner[row], worth[row] = row, key, value
            stamped.append(row)
            promoted[step] += 1
        for row in stamped:
            heapq.heappush(heap, (worth[row], row))
    return Counts.of(ids, *(np.reshape(counts, ids.shape[:2]) for counts in (promoted, staged)))
