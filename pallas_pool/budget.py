"""`PoolConfig.from_budget`: how many rows fit into so many bytes."""

from __future__ import annotations

import math
import numbers
from typing import Any

from pallas_pool.config import INT32_MAX, MAX_WIDTH, PoolConfig, check_int
from pallas_pool.experts import shapes_of


def config_of_budget(
    experts: Any, *, bank_bytes: Any, top_k: Any, max_tokens: Any, step_map: bool
) -> PoolConfig:
    """See `PoolConfig.from_budget`."""
    shapes = shapes_of(experts)
    top_k = check_int("top_k", top_k, 1, shapes.experts)
    max_tokens = check_int("max_tokens", max_tokens, 1, INT32_MAX)
    lanes = top_k * max_tokens
    if lanes > MAX_WIDTH:
        most = MAX_WIDTH // top_k
        raise ValueError(
            f"max_tokens={max_tokens} with top_k={top_k} needs {lanes} lanes, and a step has at most "
            f"{MAX_WIDTH}: "
            + (f"lower max_tokens to {most} or less" if most else f"top_k alone is more than {MAX_WIDTH}")
            + ". It bounds the tokens of a decode step, not those of a prompt"
        )
    if not shapes.row_bytes:
        raise ValueError("experts has no byte: every leaf is empty")
    size = _check_bytes(bank_bytes)
    # Every lane of a step may need a staging row. Below top_k pool rows not even one token's experts
    # could ever be resident.
    staging_rows = lanes
    total = size // shapes.row_bytes
    rows = min(total - staging_rows, shapes.layers * shapes.experts)
    if rows < top_k:
        least = (staging_rows + top_k) * shapes.row_bytes
        raise ValueError(
            f"bank_bytes={size} holds {total} rows of {shapes.row_bytes} bytes, too few for "
            f"top_k={top_k}: a step of max_tokens={max_tokens} needs {staging_rows} staging rows, and "
            f"the pool at least {top_k}. Give bank_bytes={least} or more"
            + (", or lower max_tokens" if max_tokens > 1 else "")
        )
    each, extra = divmod(rows, shapes.layers)
    return PoolConfig(
        num_layers=shapes.layers,
        num_experts=shapes.experts,
        rows_per_layer=(each + 1,) * extra + (each,) * (shapes.layers - extra) if extra else each,
        staging_rows=staging_rows,
        width=1 << (lanes - 1).bit_length(),
        step_map=step_map,
    )


def _check_bytes(bank_bytes: Any) -> int:
    if isinstance(bank_bytes, bool) or not isinstance(bank_bytes, numbers.Real):
        raise TypeError(f"bank_bytes must be a number of bytes, got {bank_bytes!r}")
    size = float(bank_bytes)
    if not math.isfinite(size) or size < 0:
        raise ValueError(f"bank_bytes must be finite and at least 0, got {bank_bytes}")
    return int(bank_bytes) if isinstance(bank_bytes, numbers.Integral) else int(size)
