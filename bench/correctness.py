"""The 111 state comparisons: every plan and the state of each implementation against the oracle.

Widths 1, 16 and 64; gate open and closed; six patterns of ids; after the first, second and third
visit of a layer; and, for each width, experts that are staged first and promoted later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import pallas_pool as pp
from bench.implementations import Implementation
from tests.oracle import Oracle

WIDTHS = (1, 16, 64)
LAYERS = (0, 2, 0)  # The layers that the three visits are of.
EXPERTS = 200
LAYER_ROWS = (50, 41, 60)


class Comparison(NamedTuple):
    """A run to be compared: the plan of each visit, and the state after the last.

    Attributes:
      name: unique.
      config: the geometry; the default residents.
      controls: as for `pp.set_controls`.
      visits: a layer and its ids each.
    """

    name: str
    config: pp.PoolConfig
    controls: dict[str, int]
    visits: tuple[tuple[int, np.ndarray], ...]


# A pattern: (width, rows, visit) -> ids. Experts below `rows` are resident at the start.
Pattern = Callable[[int, int, int], np.ndarray]


def _none(width: int, rows: int, visit: int) -> np.ndarray:
    return np.empty(0, np.int32)


def _all_padding(width: int, rows: int, visit: int) -> np.ndarray:
    return np.full(width, -1, np.int32)


def _one_resident_repeated(width: int, rows: int, visit: int) -> np.ndarray:
    return np.full(width, rows // 2, np.int32)


def _all_distinct_misses(width: int, rows: int, visit: int) -> np.ndarray:
    misses = np.random.default_rng(rows).permutation(np.arange(rows, EXPERTS, dtype=np.int32))
    first = visit // 2 * width  # The third visit is of the first one's layer: misses again.
    return misses[first : first + width]


def _one_miss_repeated(width: int, rows: int, visit: int) -> np.ndarray:
    return np.full(width, rows + visit, np.int32)


def _mix(width: int, rows: int, visit: int) -> np.ndarray:
    rng = np.random.default_rng((width, rows, visit))
    kinds = (
        lambda ids: rng.integers(rows),  # most likely a hit
        lambda ids: rng.integers(rows, EXPERTS),  # most likely a miss
        lambda ids: rng.choice([-2, EXPERTS, 2**31 - 1]),  # invalid
        lambda ids: rng.choice(ids),  # a duplicate
        lambda ids: -1,
    )
    ids: list[int] = []
    for lane in range(width):
        ids.append(int(kinds[(lane + visit) % len(kinds)](ids)))
    return np.array(ids, np.int32)


PATTERNS: dict[str, Pattern] = {
    "none": _none,
    "all_padding": _all_padding,
    "one_resident_repeated": _one_resident_repeated,
    "all_distinct_misses": _all_distinct_misses,
    "one_miss_repeated": _one_miss_repeated,
    "mix": _mix,
}


def comparisons() -> Iterator[Comparison]:
    """All comparisons, in a fixed order."""
    for width in WIDTHS:
        config = pp.PoolConfig(len(LAYER_ROWS), EXPERTS, LAYER_ROWS, width, width)
        for gate in (0, 1):
            for name, pattern in PATTERNS.items():
                visits = [
                    (layer, pattern(width, LAYER_ROWS[layer], visit))
                    for visit, layer in enumerate(LAYERS)
                ]
                for last in range(len(visits)):
                    yield Comparison(
                        f"width_{width}-gate_{gate}-{name}-visit_{last}",
                        config,
                        {"gate": gate},
                        tuple(visits[: last + 1]),
                    )
        misses = LAYER_ROWS[0] + np.arange(width, dtype=np.int32)
        first_half = np.where(np.arange(width) < (width + 1) // 2, misses, -1)
        yield Comparison(
            f"width_{width}-promoted_and_staged",
            config,
            {"promote_min_misses": 2},
            ((0, first_half), (0, misses)),
        )


def first_difference(got: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Names the first field, and the first place in it, where two plans or two snapshots differ."""
    if set(got) != set(expected):
        return f"fields {sorted(got)}, not {sorted(expected)}"
    for name, want in expected.items():
        a, b = np.asarray(got[name]), np.asarray(want)
        if a.shape != b.shape:
            return f"{name} has shape {a.shape}, not {b.shape}"
        wrong = np.argwhere(a != b)
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            return f"{name}{list(at) if at else ''} is {a[at]}, not {b[at]}"
    return None


def expected_of(comparison: Comparison) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The oracle's plan of each visit, and its state after the last."""
    oracle = Oracle.of(comparison.config)
    oracle.set_controls(**comparison.controls)
    plans = [oracle.step(layer, ids) for layer, ids in comparison.visits]
    return plans, oracle.snapshot()


@functools.cache
def _jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(step, static_argnums=0)


def difference(
    comparison: Comparison,
    implementation: Implementation,
    expected: tuple[list[dict[str, Any]], dict[str, Any]],
) -> str | None:
    """Runs a comparison; says where an implementation first differs from `expected`, if it does."""
    config, step = comparison.config, _jitted(implementation.step)
    state = pp.set_controls(pp.init_state(config), **comparison.controls)
    plans, snapshot = expected
    where = f"{comparison.name}: {implementation.name}"
    for visit, (layer, ids) in enumerate(comparison.visits):
        plan, state = step(config, state, np.int32(layer), ids)
        found = first_difference(jax.device_get(plan)._asdict(), plans[visit])
        if found:
            return f"{where}: plan {visit}: {found}"
    found = first_difference(pp.snapshot(config, state), snapshot)
    return f"{where}: state: {found}" if found else None


def differences(implementations: Iterable[Implementation]) -> Iterator[tuple[str, list[str]]]:
    """For each comparison its name, and what differs: nothing, if all is well."""
    implementations = list(implementations)
    for comparison in comparisons():
        expected = expected_of(comparison)
        found = (difference(comparison, each, expected) for each in implementations)
        yield comparison.name, [text for text in found if text]
