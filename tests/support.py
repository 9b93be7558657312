"""What the tests share: every implementation under one face, runs of many steps, comparisons."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_pool as pp
import reference
from pallas_pool import state as fields
from tests.oracle import Oracle

KERNELS = tuple(pp.KERNELS)
# What runs in JAX: takes and returns a `PoolState`. The oracle judges them all.
IMPLEMENTATIONS = ("reference", *KERNELS)
EDGE = 2**31
MOST = EDGE - 1
PIECE = 24  # steps that one scan runs
# The geometry of tests that need no other: what is compiled for one serves the next.
CONFIG = pp.PoolConfig(
    num_layers=3, num_experts=8, rows_per_layer=(3, 0, 4), staging_rows=4, width=4
)


def step_function(name, **options):
    """`step(config, state, layer, ids, weights=None)` of an implementation."""
    if name == "reference":
        return reference.step
    return functools.partial(pp.step, kernel=name, **options)


@functools.cache
def one_step(name, config):
    """(state, layer, ids, weights=None) -> (plan, state), compiled once a shape.

    A kernel's call does that by itself, the reference's needs a `jit`.
    """
    step = functools.partial(step_function(name), config)
    return jax.jit(step) if name == "reference" else step


@functools.cache
def scanned_steps(name, config):
    """Steps under `jit` and `scan`: (state, layers, ids, weights) -> plans and states, stacked."""

    @jax.jit
    def run(state, layers, ids, weights):
        def body(state, x):
            plan, state = step_function(name)(config, state, *x)
            return state, (plan, state)

        return lax.scan(body, state, (layers, ids, weights))[1]

    return run


def plan_dict(plan):
    """A plan's fields on the host; one that the config leaves out is not there."""
    return {name: x for name, x in jax.device_get(plan)._asdict().items() if x is not None}


def assert_same(got, want, where=""):
    """Two dicts of arrays and ints (plans or snapshots) have the same fields and values."""
    names = set(got) | (set(want) - {"step_map"})
    for name in sorted(names):
        assert name in got and name in want, f"{where}: {name} is in one alone"
        if not np.array_equal(got[name], want[name]):
            raise AssertionError(
                f"{where}: {name} differs\n  got  {np.asarray(got[name]).tolist()}"
                f"\n  want {np.asarray(want[name]).tolist()}"
            )


def run_steps(name, config, state, layers, ids, weights=None):
    """Runs steps; returns a (plan, snapshot) a step, as dicts, and the state after the last.

    The steps run in pieces of `PIECE`, the last filled up and the surplus thrown away, so that a
    geometry is compiled once whatever the number of steps.
    """
    steps = len(layers)
    piece = functools.partial(_piece, steps, np.asarray(layers, np.int32), np.asarray(ids), weights)
    results = []
    for start in range(0, steps, PIECE):
        plans, states = jax.device_get(scanned_steps(name, config)(state, *piece(start)))
        for t in range(min(PIECE, steps - start)):
            plan, after = jax.tree.map(lambda x, t=t: x[t], (plans, states))
            results.append((plan_dict(plan), pp.snapshot(config, after)))
        state = jax.tree.map(jnp.asarray, after)
    return results, state


def _piece(steps, layers, ids, weights, start):
    index = np.minimum(start + np.arange(PIECE), steps - 1)
    return layers[index], ids[index], None if weights is None else np.asarray(weights)[index]


def run_oracle(oracle, layers, ids, weights=None):
    """The same of the oracle, which it moves on."""
    results = []
    for t, layer in enumerate(np.asarray(layers).tolist()):
        plan = oracle.step(layer, ids[t], None if weights is None else weights[t])
        results.append((plan, oracle.snapshot()))
    return results


def assert_same_steps(got, want, where=""):
    assert len(got) == len(want)
    for t, (one, other) in enumerate(zip(got, want, strict=True)):
        for got_dict, want_dict in zip(one, other, strict=True):
            assert_same(got_dict, want_dict, f"{where}, step {t}")


class Pool:
    """One implementation, the oracle among them, stepped eagerly; plans are dicts."""

    def __init__(self, name, config, residents=None):
        self.name, self.config = name, config
        if name == "oracle":
            self.oracle = Oracle.of(config, residents)
        else:
            self.state = pp.init_state(config, residents)

    def set(self, **controls):
        if self.name == "oracle":
            self.oracle.set_controls(**controls)
        else:
            self.state = pp.set_controls(self.state, **controls)

    def step(self, layer, ids, weights=None):
        """`ids` are padded to the width of the config, to compile once."""
        padding = self.config.width - len(ids)
        ids = np.array(list(ids) + [-1] * padding, np.int32)
        if weights is not None:
            weights = np.array(list(weights) + [np.nan] * padding, np.float32)
        if self.name == "oracle":
            return self.oracle.step(layer, ids, weights)
        layer = jnp.asarray(layer, jnp.int32)
        plan, self.state = one_step(self.name, self.config)(self.state, layer, ids, weights)
        return plan_dict(plan)

    def snapshot(self):
        if self.name == "oracle":
            return self.oracle.snapshot()
        return pp.snapshot(self.config, self.state)


def with_words(state, words=None, **arrays):
    """A state with words of its scalars and whole tables replaced; for states never stepped yet.

    Args:
      state: fresh from `init_state`.
      words: index in `state.scalars` -> value.
      **arrays: field -> array.
    """
    scalars = np.array(state.scalars)
    for index, value in (words or {}).items():
        scalars[index] = value
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
    return dataclasses.replace(state, scalars=jnp.asarray(scalars), **arrays)


def aged(config, clock, forwards, row_used=None, miss_count=None, residents=None):
    """A state that looks long used, and an oracle of the same, with unbounded ints.

    Args:
      clock, forwards: any ints from 0 on, forwards <= clock.
      row_used: clock of every pool row, <= clock; by default all at `clock`.
      miss_count: key -> misses, of keys that are not resident.
    """
    oracle = Oracle.of(config, residents)
    oracle.clock, oracle.forwards = clock, forwards
    oracle.used = [clock] * config.rows if row_used is None else [int(x) for x in row_used]
    oracle.misses = dict(miss_count or {})
    misses = np.zeros(config.keys, np.int64)
    for key, count in oracle.misses.items():
        misses[key] = count
    used = np.array(oracle.used, np.int64)
    state = with_words(
        pp.init_state(config, residents),
        {
            fields.CLOCK: clock % EDGE,
            fields.CLOCK_EPOCH: clock // EDGE,
            fields.FORWARDS: forwards % EDGE,
            fields.FORWARDS_EPOCH: forwards // EDGE,
        },
        row_used=used % EDGE,
        row_epoch=used // EDGE,
        miss_count=misses,
    )
    assert_same(pp.snapshot(config, state), oracle.snapshot(), "an aged state")
    return state, oracle


def check_all(config, state, oracle, layers, ids, weights=None, names=IMPLEMENTATIONS):
    """Runs the steps by every implementation and compares each state and plan with the oracle's.

    Returns the state after the last step by name.
    """
    want = run_oracle(oracle, layers, np.asarray(ids), weights)
    states = {}
    for name in names:
        start = state[name] if isinstance(state, dict) else state
        got, states[name] = run_steps(name, config, start, layers, ids, weights)
        assert_same_steps(got, want, name)
    return states


def abstract_gpus(count=1, axis="x"):
    """A mesh of GPUs to lower for, whether there are any or not."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((count,), (axis,), axis_types=auto, abstract_device=device)


def host_shapes(tree, mesh, spec=None):
    """Shapes of arrays that are in pinned host memory."""
    sharding = NamedSharding(mesh, spec or P(), memory_kind="pinned_host")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def lower_for_cuda(function, *args, mesh=None, **jit_options):
    """Lowers `jit(function)` as for a GPU; `args` may be mere shapes."""
    with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh or abstract_gpus()):
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        return jax.jit(function, **jit_options).trace(*args).lower(lowering_platforms=("cuda",))
