"""What a run ran on, and from which sources."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pallas_pool/**/*.py", "reference/**/*.py", "bench/*.py", "tests/oracle.py")
PACKAGES = ("jax", "jaxlib", "numpy", "triton")


def _output(*command: str) -> str:
    """What a command prints, or why there is nothing."""
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return f"missing: {command[0]} not found"
    except subprocess.CalledProcessError as error:
        return f"missing: {error.stderr.strip() or error}"
    return run.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"missing: {package} is not installed"


def _git() -> dict[str, Any]:
    commit = _output("git", "rev-parse", "HEAD")
    if commit.startswith("missing"):
        return {"commit": commit, "dirty": None}
    return {"commit": commit, "dirty": bool(_output("git", "status", "--porcelain"))}


def manifest(argv: Sequence[str], flags: dict[str, Any]) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a run."""
    files = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "argv": list(argv),
        "flags": flags,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
        "git": _git(),
        "sources": {
            str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        },
    }
