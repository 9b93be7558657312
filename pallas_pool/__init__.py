"""A planner for JAX MoE models whose experts live in host memory, as Pallas GPU kernels."""

from pallas_pool.bank import init_bank, pin
from pallas_pool.config import PoolConfig
from pallas_pool.copy_rows import Copies, copy_rows
from pallas_pool.counters import counters_table, init_counters, read_counters
from pallas_pool.expert_ffn import expert_ffn
from pallas_pool.experts import expert_bytes
from pallas_pool.grouped_ffn import grouped_ffn
from pallas_pool.moe import moe
from pallas_pool.planner import KERNELS, step
from pallas_pool.pool import Pool, init_pool
from pallas_pool.state import (
    Plan,
    PoolError,
    PoolState,
    check_state,
    clear_error,
    controls,
    init_state,
    set_controls,
    snapshot,
)
from pallas_pool.version import __version__
from pallas_pool.warm_start import spread_rows, warm_start

__all__ = [
    "KERNELS",
    "Copies",
    "Plan",
    "Pool",
    "PoolConfig",
    "PoolError",
    "PoolState",
    "__version__",
    "check_state",
    "clear_error",
    "controls",
    "copy_rows",
    "counters_table",
    "expert_bytes",
    "expert_ffn",
    "grouped_ffn",
    "init_bank",
    "init_counters",
    "init_pool",
    "init_state",
    "moe",
    "pin",
    "read_counters",
    "set_controls",
    "snapshot",
    "spread_rows",
    "step",
    "warm_start",
]
