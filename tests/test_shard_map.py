"""`step` under `shard_map` on two devices, each with its own pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_pool as pp
from bench.artifacts import CUSTOM_CALL
from tests.oracle import Oracle
from tests.support import (
    CONFIG,
    IMPLEMENTATIONS,
    KERNELS,
    abstract_gpus,
    assert_same,
    lower_for_cuda,
    plan_dict,
    step_function,
)

# All devices plan the same layer, each for ids of its own: the layer does not vary, the rest does.
SPECS = (P("d"), P(), P("d"), P("d"))


def mesh_of(devices, axis_type=AxisType.Auto):
    return jax.make_mesh((len(devices),), ("d",), (axis_type,), devices=devices)


def two_devices():
    """Two GPUs where there are two, else the host posing as two devices."""
    return (jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu"))[:2]


def sharded_step(name, mesh, check_vma):
    def one(state, layer, ids, weights):
        state, ids, weights = jax.tree.map(lambda x: x[0], (state, ids, weights))
        result = step_function(name)(CONFIG, state, layer, ids, weights)
        return jax.tree.map(lambda x: x[None], result)

    return jax.shard_map(one, mesh=mesh, in_specs=SPECS, out_specs=P("d"), check_vma=check_vma)


def arguments(mesh, rng, states):
    lanes = len(mesh.devices), CONFIG.width
    layer = rng.integers(0, CONFIG.num_layers, dtype=np.int32)
    ids = rng.integers(-1, CONFIG.num_experts, lanes, np.int32)
    weights = rng.choice(np.array([1, 0.5, -1], np.float32), lanes)
    shardings = [NamedSharding(mesh, spec) for spec in SPECS]
    return jax.device_put((states, layer, ids, weights), tuple(shardings))


def check(name, mesh, check_vma):
    devices = len(mesh.devices)
    run = jax.jit(sharded_step(name, mesh, check_vma))
    states = jax.tree.map(lambda x: jnp.stack([x] * devices), pp.init_state(CONFIG))
    oracles = [Oracle.of(CONFIG) for _ in range(devices)]
    rng = np.random.default_rng(2)
    for step in range(6):
        states, layer, ids, weights = arguments(mesh, rng, states)
        plans, states = run(states, layer, ids, weights)
        assert len(plans.routes.sharding.device_set) == devices
        host = jax.device_get(plans)
        for i, oracle in enumerate(oracles):
            want = oracle.step(int(layer), np.asarray(ids)[i], np.asarray(weights)[i])
            got = plan_dict(jax.tree.map(lambda x, i=i: x[i], host))
            assert_same(got, want, f"device {i}, step {step}")
    host = jax.device_get(states)
    for i, oracle in enumerate(oracles):
        state = jax.tree.map(lambda x, i=i: x[i], host)
        assert_same(pp.snapshot(CONFIG, state), oracle.snapshot(), f"device {i}")


@pytest.mark.parametrize(
    "name, axis_type",
    [*((name, AxisType.Auto) for name in IMPLEMENTATIONS), ("masked", AxisType.Explicit)],
)
def test_a_pool_on_each_device(name, axis_type):
    check(name, mesh_of(two_devices(), axis_type), check_vma=False)


def test_the_reference_with_varying_axes_checked():
    check("reference", mesh_of(two_devices()), check_vma=True)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_with_varying_axes_checked_lowers_for_a_gpu(name):
    """As far as one gets without a GPU: JAX's interpreter of Pallas does not know these checks."""
    mesh = abstract_gpus(2, "d")
    state = jax.eval_shape(lambda: pp.init_state(CONFIG))
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), state)
    layer, ids = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((), (2, CONFIG.width)))
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    step = sharded_step(name, mesh, check_vma=True)
    assert CUSTOM_CALL in lower_for_cuda(step, states, layer, ids, weights, mesh=mesh).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_with_varying_axes_checked(name):
    check(name, mesh_of(jax.devices()[:2]), check_vma=True)
