"""The kernels by name. Each is one file; a new one needs one line here."""

from __future__ import annotations

from typing import NamedTuple

from pallas_pool.kernels import loop, masked


class Kernel(NamedTuple):
    """A kernel body and how it is compiled.

    Attributes:
      body: `body(config, interpret, layer_ref, ids_ref, weights_ref, state, plan)`; see
        `sequential.plan_step`.
      num_warps: width -> warps of the one program that runs a step.
    """

    body: object
    num_warps: object


KERNELS = {
    "loop": Kernel(loop.kernel, lambda width: 4),
    "masked": Kernel(masked.kernel, lambda width: 4),
}
