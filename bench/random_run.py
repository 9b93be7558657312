"""A long random run on the device: every array of every step of kernels against another planner.

Races between the warps of a kernel show only on a GPU, and only sometimes. States and plans stay on
the device; what comes back of a step is one bit for each array of each kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_pool as pp
from bench.implementations import IMPLEMENTATIONS, Implementation

CHUNK = 1000  # Steps a call of the device, under one setting of the controls.

# All tables that every kernel keeps; a queue of victims is one kernel's own.
TABLES = ("key_row", "row_key", "row_used", "row_epoch", "miss_count", "scalars")

GEOMETRIES = (
    pp.PoolConfig(3, 40, 11, 8, 8),
    pp.PoolConfig(4, 130, (20, 0, 130, 33), 32, 32),
    pp.PoolConfig(2, 96, 32, 64, 64),
    pp.PoolConfig(7, 1000, 700, 16, 16),
    pp.PoolConfig(48, 512, 258, 4, 4),
)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_chunk(
    config: pp.PoolConfig,
    implementations: tuple[Implementation, ...],
    states: tuple[pp.PoolState, ...],
    lanes: tuple[Any, ...],
) -> tuple[tuple[pp.PoolState, ...], dict[str, jax.Array]]:
    """Steps all states alike.

    Returns:
      The states, and for each array, [steps, kernels]: whether it differs from the first state's.
    """

    def arrays_of(plan: pp.Plan, state: pp.PoolState) -> dict[str, jax.Array]:
        arrays = plan._asdict() | {name: getattr(state, name) for name in TABLES}
        return {name: array for name, array in arrays.items() if array is not None}

    def step(states, lanes):
        layer, ids, weights = lanes
        results = [
            each.step(config, state, layer, ids, weights)
            for each, state in zip(implementations, states, strict=True)
        ]
        arrays = [arrays_of(*result) for result in results]
        differs = {
            name: jnp.stack([jnp.any(other[name] != array) for other in arrays[1:]])
            for name, array in arrays[0].items()
        }
        return tuple(state for _, state in results), differs

    return lax.scan(step, states, lanes)


def _random_lanes(
    config: pp.PoolConfig, rng: np.random.Generator, steps: int, with_weights: bool
) -> tuple[Any, ...]:
    """Layers, ids and weights of `steps` steps: popular experts, which change slowly, padding, and
    a few invalid layers, ids and weights."""
    experts, shape = config.num_experts, (steps, config.width)
    layers = np.arange(steps) % config.num_layers
    popularity = rng.geometric(rng.uniform(1 / experts, 0.2), shape) - 1
    drift = np.arange(steps)[:, None] // (4 * config.num_layers) + 7 * layers[:, None]
    ids = (popularity + drift) % experts
    ids[rng.random(shape) < 0.1] = -1
    ids[np.arange(config.width) >= rng.integers(1, config.width + 1, (steps, 1))] = -1
    ids[rng.random(shape) < 1e-4] = experts
    layers[rng.random(steps) < 1e-3] = config.num_layers
    weights = rng.random(shape, np.float32)
    weights[rng.random(shape) < 1e-3] = np.nan
    return layers.astype(np.int32), ids.astype(np.int32), weights if with_weights else None


def _random_controls(rng: np.random.Generator) -> dict[str, int]:
    choices = {
        "gate": (0, 1, 1, 1),
        "promote_limit": (0, 0, 1, 5),
        "promote_interval": (1, 1, 2, 3),
        "promote_min_misses": (1, 1, 2, 4),
        "protect_recent": (0, 0, 1, 2),
    }
    return {name: int(rng.choice(values)) for name, values in choices.items()}


def random_run(
    config: pp.PoolConfig,
    steps: int,
    seed: int,
    kernels: Sequence[str],
    expected: str = "reference",
) -> Iterator[int]:
    """Yields the number of steps done so far, after each chunk.

    Args:
      config: the geometry.
      steps: steps to run, rounded up to whole chunks.
      seed: of ids, weights and controls.
      kernels: names of the implementations that are compared.
      expected: the implementation that they are compared with.

    Raises:
      AssertionError: an array differs; names the step, the kernel and the array.
      PoolError: after a chunk, a state breaks an invariant.
    """
    rng = np.random.default_rng(seed)
    implementations = tuple(IMPLEMENTATIONS[name] for name in (expected, *kernels))
    states = tuple(pp.init_state(config) for _ in implementations)
    for done in range(0, steps, CHUNK):
        controls = _random_controls(rng)
        states = tuple(pp.set_controls(pp.clear_error(state), **controls) for state in states)
        lanes = _random_lanes(config, rng, CHUNK, with_weights=bool(rng.integers(2)))
        states, differs = _run_chunk(config, implementations, states, lanes)
        found = {name: np.argwhere(bits)[0] for name, bits in differs.items() if bits.any()}
        if found:
            name, (step, kernel) = min(found.items(), key=lambda item: tuple(item[1]))
            raise AssertionError(
                f"{config}, seed {seed}, step {done + step}, {controls}: "
                f"{name} of {kernels[kernel]} differs from that of {expected}"
            )
        for state in states:
            pp.check_state(config, pp.clear_error(state))
        yield done + CHUNK
