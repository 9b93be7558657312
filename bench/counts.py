"""What a replay counts, and the figures that follow from it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench.traces import selected_lanes


class Counts(NamedTuple):
    """Of one policy on a trace, summed over its tokens.

    Attributes:
      tokens: of the trace.
      selected: [L] distinct experts that each layer selected.
      promoted: [L] of them, those copied into a row of the pool.
      staged: [L] of them, those copied into a staging row.
    """

    tokens: int
    selected: np.ndarray
    promoted: np.ndarray
    staged: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, promoted: np.ndarray, staged: np.ndarray) -> Counts:
        """Of a trace [T, L, K], from the counts of every step, [T, L] each."""
        selected = selected_lanes(ids).sum(axis=(0, 2))
        return cls(len(ids), selected, promoted.sum(0), staged.sum(0))

    @property
    def hits(self) -> np.ndarray:
        return self.selected - self.promoted - self.staged

    @property
    def hit_rate(self) -> float:
        """Hits in percent of the selections."""
        return 100 * float(self.hits.sum() / self.selected.sum())

    @property
    def layer_hit_rates(self) -> np.ndarray:
        """[L] the same of each layer; NaN where a layer selected nothing."""
        selected = np.where(self.selected, self.selected, np.nan)
        return 100 * self.hits / selected

    def a_token(self, counts: np.ndarray) -> float:
        return float(counts.sum() / self.tokens)

    @property
    def copies(self) -> float:
        """Expert rows copied from the host a token."""
        return self.a_token(self.promoted + self.staged)
