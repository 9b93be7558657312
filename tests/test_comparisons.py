"""The 111 state comparisons of the original experiment, for every kernel and the reference."""

import functools

import pytest

from bench.correctness import comparisons, difference, expected_of
from bench.implementations import IMPLEMENTATIONS as ALL
from tests.support import IMPLEMENTATIONS

COMPARISONS = {comparison.name: comparison for comparison in comparisons()}
expected = functools.cache(lambda name: expected_of(COMPARISONS[name]))


def test_there_are_111():
    assert len(list(comparisons())) == len(COMPARISONS) == 111


@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_plans_and_state_equal(implementation, comparison):
    found = difference(COMPARISONS[comparison], ALL[implementation], expected(comparison))
    assert found is None, found


def test_the_cases_do_what_their_names_say():
    """Where nothing was promoted, staged or invalid, equal results would prove little."""
    seen = set()
    for name in COMPARISONS:
        plans, snapshot = expected(name)
        kinds = {kind for kind in ("promoted", "staged") if plans[-1][f"{kind}_count"]}
        kinds |= {"error"} & {"error" * snapshot["error"]}
        seen |= {(name.split("-")[0], kind) for kind in kinds}
        if "promoted_and_staged" in name and "width_1-" not in name:
            assert {"promoted", "staged"} <= kinds
    widths = ("width_1", "width_16", "width_64")
    assert seen >= {(width, kind) for width in widths for kind in ("promoted", "staged", "error")}
