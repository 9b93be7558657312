"""Durations of the kernels that a call launches, by CUPTI, and which part of a decode step each is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

# A part of the step: what the names of its kernels contain. All else is the rest: the dense blocks, the
# router, the head, and what little the model does around them.
PARTS = {
    "planner": ("pool_step_",),
    "copies": ("pool_copy_rows",),
    "ffn": ("expert_ffn",),
}
REST = "rest"


class Launch(NamedTuple):
    """A kernel's name, and its duration in microseconds."""

    name: str
    microseconds: float


class NoProfile(RuntimeError):
    """CUPTI gave nothing that could be used."""


def part_of(name: str) -> str:
    """The part of the step that a kernel belongs to."""
    return next(
        (part for part, texts in PARTS.items() if any(text in name for text in texts)), REST
    )


def _by_mosaic(run: Callable[[], Any]) -> list[Launch]:
    # `profiler.measure` would call a function twice, and these donate what they are called with.
    from jax.experimental.mosaic.gpu import profiler

    library = profiler.mosaic_gpu_lib
    if library is None:
        raise NoProfile("this jaxlib has no CUPTI")
    library._mosaic_gpu_ext._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        timings = library._mosaic_gpu_ext._cupti_get_timings(True)
    return [Launch(name, 1e3 * milliseconds) for name, milliseconds in timings or ()]


def _by_jax(run: Callable[[], Any]) -> list[Launch]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        found = list(Path(folder).rglob("*.xplane.pb"))
        if not found:
            raise NoProfile("the JAX profiler left no trace")
        data = jax.profiler.ProfileData.from_file(str(found[0]))
        return [
            Launch(event.name, 1e-3 * event.duration_ns)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]


PROFILERS = {"mosaic": _by_mosaic, "jax": _by_jax}


def profile(
    prepare: Callable[[], Callable[[], Any]], expected: dict[str, int]
) -> tuple[str, list[Launch]]:
    """Runs something under CUPTI, by the first profiler that sees all of it.

    Args:
      prepare: returns what to run, which may donate; called anew for each attempt.
      expected: for some parts, how many launches there must be.

    Returns:
      The profiler's name, and the launches.

    Raises:
      NoProfile: no profiler saw what was expected; the message says what each saw.
    """
    seen = []
    for name, profiler in PROFILERS.items():
        try:
            launches = profiler(prepare())
        except Exception as error:  # Whatever is missing on this machine: the next one may do.
            seen.append(f"{name}: {type(error).__name__}: {error}")
            continue
        counts = {part: sum(part_of(each.name) == part for each in launches) for part in expected}
        if launches and counts == expected:
            return name, launches
        seen.append(f"{name}: {len(launches)} launches, {counts} where {expected} was expected")
    raise NoProfile("; ".join(seen))


def durations(launches: Sequence[Launch], part: str) -> list[float]:
    """Microseconds of each launch of a part, in order."""
    return [round(each.microseconds, 3) for each in launches if part_of(each.name) == part]


def by_name(launches: Iterable[Launch]) -> dict[str, list[float]]:
    """Of each kernel, the number of its launches and their microseconds together."""
    totals: dict[str, list[float]] = {}
    for name, microseconds in launches:
        count, total = totals.get(name[:80], (0, 0.0))
        totals[name[:80]] = [count + 1, round(total + microseconds, 3)]
    return totals
