"""Budgets of a sweep: rows a layer, or bytes of the bank, and the pools that they make."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

import pallas_pool as pp
from bench.traces import Trace, selected_lanes

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]I?B)?", re.IGNORECASE)


class Geometry(NamedTuple):
    """What all budgets share.

    Attributes:
      layers, experts: L and E.
      lanes: the most experts that one step selects.
    """

    layers: int
    experts: int
    lanes: int

    @classmethod
    def of(cls, trace: Trace, experts: int) -> Geometry:
        return cls(trace.ids.shape[1], experts, trace.ids.shape[2])

    @property
    def width(self) -> int:
        """Lanes of the planner, a power of two; as many staging rows follow the pool."""
        return 1 << (self.lanes - 1).bit_length()

    def pool(self, rows: int) -> pp.PoolConfig:
        """A pool of that many rows in all, spread evenly over the layers, the first ones taking
        what is left over."""
        share, more = divmod(rows, self.layers)
        layer_rows = tuple(share + (layer < more) for layer in range(self.layers))
        return pp.PoolConfig(
            self.layers,
            self.experts,
            layer_rows if more else share,
            self.width,
            self.width,
            step_map=False,
        )


def parse_bytes(text: str) -> int:
    """Bytes of texts like `9437184`, `1.5GB` or `24GiB`."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is no size like 9437184, 1.5GB or 24GiB")
    return int(float(match[1]) * UNITS[(match[2] or "").upper()])


def rows_of_bytes(geometry: Geometry, size: int, row_bytes: int) -> int:
    """Pool rows of a bank of `size` bytes, less its staging rows; all experts at the most."""
    rows = size // row_bytes - geometry.width
    if rows < 1:
        raise ValueError(
            f"{size} bytes hold {size // row_bytes} rows of {row_bytes} bytes: no pool beside the "
            f"{geometry.width} staging rows"
        )
    return min(rows, geometry.layers * geometry.experts)


def cycles(trace: Trace) -> np.ndarray:
    """[T] distinct experts that each token selects over all layers."""
    return selected_lanes(trace.ids).sum(axis=(1, 2))


def default_rows(geometry: Geometry, cycle: int) -> list[int]:
    """Rows a layer to sweep: below and at the cliff, then in half octaves up to all experts."""
    cliff = -(-cycle // geometry.layers)
    octaves = [2**n for n in range(geometry.experts.bit_length())]
    beyond = {n for o in octaves for n in (o, o * 3 // 2) if cliff < n < geometry.experts}
    return sorted({n for n in (cliff - 1, cliff) if n} | beyond | {geometry.experts})
