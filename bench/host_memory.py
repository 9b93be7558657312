"""Memory of this machine, and what JAX must be told of it before it starts. Does not import JAX."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {name}")


def _cgroup(name: str) -> int | None:
    """A figure of the container's memory controller, or None where there is no such limit."""
    path = CGROUP / name
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def total() -> int:
    """Bytes that this process may use at most, the container's limit included."""
    limit = _cgroup("memory.max")
    return min(_meminfo("MemTotal"), limit or 2**62)


def available() -> int:
    """Bytes that are free now, the container's limit included."""
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    free = _meminfo("MemAvailable")
    return free if limit is None or used is None else min(free, limit - used)


def prepare_environment() -> None:
    """Lets JAX pin nine tenths of the host's memory, where 64 GB is the default, and use nearly all of
    the GPU's. Only what is not set yet is set, and only before JAX starts does it matter."""
    os.environ.setdefault(LIMIT, str(int(0.9 * total() / GIB)))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
