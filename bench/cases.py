"""Workload patterns: streams of expert ids that make a known number of hits, promotions and staged
experts in every step, for as long as they are replayed.

A case holds the ids of some forwards, its turns, and is replayed in a circle. In `promote_k` every
layer has experts that each of its steps selects (hot), and k lanes that walk round its other ones
(cold). The cold experts of all layers are more than the pool has rows for, so each is gone, as the
least recently used one, before the walk comes back to it: every cold lane is a miss that evicts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

import pallas_pool as pp


class Case(NamedTuple):
    """A pattern for one geometry.

    Attributes:
      name: the pattern's name.
      gate: whether promotions may happen.
      promoted: experts promoted in every step of the steady state.
      staged: experts staged in every step.
      ids: [turns, L, W] distinct expert ids of each step.
    """

    name: str
    gate: bool
    promoted: int
    staged: int
    ids: np.ndarray

    @property
    def turns(self) -> int:
        """Forwards after which the stream begins again."""
        return len(self.ids)

    def initial_state(self, config: pp.PoolConfig) -> pp.PoolState:
        return pp.set_controls(pp.init_state(config), gate=self.gate)


def _frozen(config: pp.PoolConfig, rng: np.random.Generator, misses: int) -> np.ndarray:
    """One turn, in which `misses` lanes select experts that are not resident at the start."""
    ids = np.empty((1, config.num_layers, config.width), np.int32)
    for layer, rows in enumerate(config.layer_rows):
        hits = config.width - misses
        if rows < hits or config.num_experts - rows < misses:
            raise ValueError(
                f"layer {layer} has {rows} of {config.num_experts} experts resident: "
                f"no {hits} hits and {misses} misses"
            )
        resident = rng.permutation(rows)[:hits]
        other = rows + rng.permutation(config.num_experts - rows)[:misses]
        ids[0, layer] = rng.permutation(np.concatenate([resident, other]))
    return ids


def all_hit(config: pp.PoolConfig, rng: np.random.Generator) -> Case:
    return Case("all_hit", True, 0, 0, _frozen(config, rng, 0))


def one_staged(config: pp.PoolConfig, rng: np.random.Generator) -> Case:
    return Case("one_staged", False, 0, 1, _frozen(config, rng, 1))


def all_staged(config: pp.PoolConfig, rng: np.random.Generator) -> Case:
    return Case("all_staged", False, 0, config.width, _frozen(config, rng, config.width))


def fewest_turns(config: pp.PoolConfig, promoted: int) -> int:
    """Turns after which a cold expert may come back and miss.

    Between two selections of it all others are promoted, less those of its own step. They must fill
    the rows that the hot experts leave.
    """
    cold_rows = config.rows - config.num_layers * (config.width - promoted)
    return max(1, -(-(cold_rows + promoted) // (config.num_layers * promoted)))


def promote(
    config: pp.PoolConfig, rng: np.random.Generator, promoted: int, most_turns: int | None = None
) -> Case:
    """`promoted` promotions a step, each of which evicts; the other lanes hit.

    Args:
      config: the geometry.
      rng: of the ids.
      promoted: cold lanes a step.
      most_turns: where there are experts for more, the circle is cut short. By default it is not.
    """
    layers, experts, width = config.num_layers, config.num_experts, config.width
    hot = width - promoted
    turns = (experts - hot) // promoted
    if most_turns is not None:
        turns = min(turns, most_turns)
    if turns < fewest_turns(config, promoted):
        raise ValueError(
            f"{config.rows} pool rows hold all {turns * promoted + hot} experts that each of "
            f"{layers} layers selects: no {promoted} promotions a step"
        )
    ids = np.empty((turns, layers, width), np.int32)
    for layer in range(layers):
        shuffled = rng.permutation(experts)
        ids[:, layer, :hot] = shuffled[:hot]
        ids[:, layer, hot:] = shuffled[hot : hot + turns * promoted].reshape(turns, promoted)
    return Case(f"promote_{promoted}", True, promoted, 0, rng.permuted(ids, axis=2))


def patterns(
    width: int, promotions: Iterable[int]
) -> dict[str, Callable[[pp.PoolConfig, np.random.Generator], Case]]:
    """Builders of cases by name; promotions that the width has no lanes for are left out."""
    fixed = {build.__name__: build for build in (all_hit, one_staged, all_staged)}
    return fixed | {
        f"promote_{k}": functools.partial(promote, promoted=k) for k in promotions if k <= width
    }
