"""What the benchmark compares: the library's kernels, and two planners without Pallas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pallas_pool as pp
import reference
from bench import vectorized

# (config, state, layer, expert_ids, weights=None) -> (plan, state)
Step = Callable[..., tuple[pp.Plan, pp.PoolState]]


class Implementation(NamedTuple):
    """One way to plan a step.

    Attributes:
      name: a kernel's name, or that of a planner without Pallas.
      step: plans one step; `config` is its static first argument.
      is_kernel: whether a step is a Pallas kernel, which always writes the whole plan.
    """

    name: str
    step: Step
    is_kernel: bool


def _all() -> dict[str, Implementation]:
    kernels = [
        Implementation(name, functools.partial(pp.step, kernel=name), True) for name in pp.KERNELS
    ]
    plain = [
        Implementation("vectorized", vectorized.step, False),
        Implementation("reference", reference.step, False),
    ]
    return {implementation.name: implementation for implementation in kernels + plain}


IMPLEMENTATIONS = _all()
KERNELS = tuple(name for name, i in IMPLEMENTATIONS.items() if i.is_kernel)
PLAIN = tuple(name for name, i in IMPLEMENTATIONS.items() if not i.is_kernel)
