"""Initial residents from what the router chose before: a trace, or frequencies of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_pool.config import PoolConfig, check_int


def warm_start(config: PoolConfig, routing: Any) -> list[list[int]]:
    """The residents to start with: each layer's most frequent experts, as many as its rows.

    Of equally frequent experts the lower id is preferred. A layer's most frequent expert comes
    last: of rows that were never selected a pool evicts the lowest first.

    Args:
      config: the geometry of the pool.
      routing: a trace [tokens, L, top_k] of expert ids, -1 for none, or a table [L, E] of how often
        each expert is selected, counts or shares.

    Returns:
      What `init_state` takes as `residents`.

    Raises:
      TypeError, ValueError: `routing` is neither, or does not fit the geometry.

    >>> import pallas_pool as pp
    >>> config = pp.PoolConfig(2, 4, rows_per_layer=2, staging_rows=1, width=1)
    >>> frequencies = [[5, 0, 9, 1], [0, 0, 0, 7]]
    >>> pp.warm_start(config, frequencies)
    [[0, 2], [0, 3]]
    >>> state = pp.init_state(config, pp.warm_start(config, frequencies))
    """
    ranked = _ranked(_frequency(config, routing))
    return [
        experts[:rows][::-1].tolist()
        for experts, rows in zip(ranked, config.layer_rows, strict=True)
    ]


def spread_rows(config: PoolConfig, routing: Any, rows: int | None = None) -> PoolConfig:
    """A config whose pool rows are spread over the layers by frequency, so that `warm_start` begins
    with the most frequent experts of all layers together.

    Of equally frequent experts the one that ranks higher in its own layer is preferred, then the
    one of the lower layer.

    Args:
      config: the geometry of the pool.
      routing: as for `warm_start`. A table's shares must have the same base in every layer.
      rows: the number of pool rows, 1 to L * E; by default that of `config`.

    Raises:
      TypeError, ValueError: as `warm_start`; or `rows` is out of range.

    >>> import pallas_pool as pp
    >>> config = pp.PoolConfig(2, 4, rows_per_layer=2, staging_rows=1, width=1)
    >>> pp.spread_rows(config, [[5, 0, 9, 1], [0, 0, 0, 7]]).rows_per_layer
    (3, 1)
    """
    rows = config.rows if rows is None else check_int("rows", rows, 1, config.keys)
    frequency = _frequency(config, routing)
    ranked = np.take_along_axis(frequency, _ranked(frequency), axis=1)
    layer, rank = np.indices(ranked.shape)
    order = np.lexsort((layer.ravel(), rank.ravel(), -ranked.ravel()))
    counts = np.bincount(order[:rows] // config.num_experts, minlength=config.num_layers)
    return dataclasses.replace(config, rows_per_layer=tuple(counts.tolist()))


def _ranked(frequency: np.ndarray) -> np.ndarray:
    """[L, E] expert ids of each layer, the most frequent first."""
    return np.argsort(-frequency, axis=1, kind="stable")


def _frequency(config: PoolConfig, routing: Any) -> np.ndarray:
    """[L, E] float64."""
    routing = np.asarray(routing)
    layers, experts = config.num_layers, config.num_experts
    table = routing.shape == (layers, experts)
    if not table and (routing.ndim != 3 or routing.shape[1] != layers):
        raise ValueError(
            f"routing must be a trace [tokens, {layers}, top_k] or a table [{layers}, {experts}] "
            f"for this config, got {list(routing.shape)}"
        )
    if routing.dtype.kind not in ("iuf" if table else "iu"):
        kind = "table must have a number" if table else "trace must have an integer"
        raise TypeError(f"routing: a {kind} dtype, got {routing.dtype}")
    if table:
        bad, allowed = ~((routing >= 0) & np.isfinite(routing)), "finite and at least 0"
    else:
        bad, allowed = (routing < -1) | (routing >= experts), f"in [-1, {experts})"
    if bad.any():
        at = tuple(int(x) for x in np.argwhere(bad)[0])
        raise ValueError(f"routing{list(at)} must be {allowed}, got {routing[at]}")
    if table:
        return routing.astype(np.float64)
    # Each expert counts once a token, whatever the number of lanes that name it.
    lanes = np.sort(routing, axis=2)
    selected = lanes >= 0
    selected[..., 1:] &= lanes[..., 1:] != lanes[..., :-1]
    _, layer, _ = np.nonzero(selected)
    key = layer * experts + lanes[selected].astype(np.int64)
    return np.bincount(key, minlength=config.keys).reshape(layers, experts).astype(np.float64)
