"""What the tests of `moe` share: tiny experts, the same sum written plainly, and pools of both kinds."""

from __future__ import annotations

import functools

import jax
import numpy as np

import pallas_pool as pp

LAYERS, EXPERTS, TOP_K, D, F = 2, 8, 2, 16, 8
# Few rows, so that every other step evicts; fewer staging rows than experts, so that prefill needs passes.
CONFIG = pp.PoolConfig(LAYERS, EXPERTS, rows_per_layer=(3, 1), staging_rows=3, width=4, step_map=False)
# All kernels of the planner decide alike. Interpreted, this one compiles faster.
KERNEL = "fused" if jax.default_backend() == "gpu" else "masked"


@functools.cache
def numpy_experts():
    rng = np.random.default_rng(0)
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    return {
        name: (rng.standard_normal((LAYERS, EXPERTS, *shape)) * shape[0] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


@functools.cache
def pinned_experts():
    return pp.pin(numpy_experts(), progress=False)


def judged(ids, weights):
    """The ids with -1 where a lane is padding or invalid."""
    with np.errstate(invalid="ignore"):
        valid = (ids >= 0) & (ids < EXPERTS) & np.isfinite(weights) & (weights >= 0)
    return np.where(valid, ids, -1)


def plain(layer, x, ids, weights):
    """The weighted sum of the experts in float64, lane by lane."""
    experts = {name: leaf[layer].astype(np.float64) for name, leaf in numpy_experts().items()}
    y = np.zeros(x.shape)
    for token, lane in np.argwhere(judged(ids, weights) >= 0):
        gate, up, down = (experts[name][ids[token, lane]] for name in ("gate", "up", "down"))
        g = x[token] @ gate
        y[token] += weights[token, lane] * ((g / (1 + np.exp(-g)) * (x[token] @ up)) @ down)
    return y


def tokens(rng, count, bad=0.2):
    """(x, ids, weights) of random tokens, some lanes of which are padding or invalid."""
    x = rng.standard_normal((count, D)).astype(np.float32)
    ids = rng.integers(0, EXPERTS, (count, TOP_K), np.int32)
    weights = rng.random((count, TOP_K)).astype(np.float32)
    strange = rng.random(ids.shape) < bad
    ids = np.where(strange & (rng.random(ids.shape) < 0.5), rng.choice([-1, -7, EXPERTS, 2**31 - 1]), ids)
    broken = rng.choice(np.array([np.nan, np.inf, -1], np.float32), ids.shape)
    return x, ids.astype(np.int32), np.where(strange & (ids >= 0), broken, weights).astype(np.float32)


@functools.cache
def runner(config, path="auto", updates=False):
    """Jitted (pool, experts, layer, x, ids, weights) -> (y, pool), the pool donated."""

    def run(pool, experts, layer, x, ids, weights):
        return pp.moe(
            config, pool, experts, layer, x, ids, weights, kernel=KERNEL, path=path, prefill_updates=updates
        )

    return jax.jit(run, donate_argnums=0)


def assert_bank_holds_residents(config, pool):
    """Every pool row has the weights of the expert that the tables say owns it."""
    row_key = np.asarray(pool.state.row_key)[: config.rows]
    for name, leaf in numpy_experts().items():
        rows = np.asarray(pool.bank[name])[: config.rows]
        np.testing.assert_array_equal(rows, leaf[row_key // EXPERTS, row_key % EXPERTS])
