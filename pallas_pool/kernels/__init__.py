"""The kernels by name. Each is one file; a new one needs one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pallas_pool.config import PoolConfig
from pallas_pool.kernels import fused, loop, masked, victims
from pallas_pool.kernels.lanes import Call


class Kernel(NamedTuple):
    """A kernel body and how it is compiled.

    Attributes:
      body: plans one step, given its `Call`.
      num_warps: width -> warps of the one program that runs a step.
      scratch_words: config -> int32 words of memory for the kernel's own use during a step.
    """

    body: Callable[[Call], None]
    num_warps: Callable[[int], int]
    scratch_words: Callable[[PoolConfig], int] = lambda config: 0


KERNELS = {
    "fused": Kernel(fused.plan_step, lambda width: 4 if width <= 256 else 8, victims.scratch_words),
    "loop": Kernel(loop.kernel, lambda width: 4),
    "masked": Kernel(masked.kernel, lambda width: 4),
}
