"""`step` under `shard_map` on two devices, each with its own pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_pool as pp
from tests.oracle import Oracle
from tests.support import CONFIG, IMPLEMENTATIONS, assert_same, plan_dict, step_function

DEVICES = 2


def mesh(axis_type):
    """Two GPUs where there are two, else the host posing as two devices."""
    devices = jax.devices() if len(jax.devices()) >= DEVICES else jax.devices("cpu")
    return jax.make_mesh((DEVICES,), ("d",), (axis_type,), devices=devices[:DEVICES])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_pool_on_each_device(name, axis_type):
    def one(state, layer, ids, weights):
        state, layer, ids, weights = jax.tree.map(lambda x: x[0], (state, layer, ids, weights))
        result = step_function(name)(CONFIG, state, layer, ids, weights)
        return jax.tree.map(lambda x: x[None], result)

    here = mesh(axis_type)
    sharded = functools.partial(jax.device_put, device=NamedSharding(here, P("d")))
    run = jax.jit(jax.shard_map(one, mesh=here, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    states = sharded(jax.tree.map(lambda x: jnp.stack([x] * DEVICES), pp.init_state(CONFIG)))
    oracles = [Oracle.of(CONFIG) for _ in range(DEVICES)]
    rng = np.random.default_rng(2)
    for step in range(6):
        layers = rng.integers(0, CONFIG.num_layers, DEVICES, np.int32)
        ids = rng.integers(-1, CONFIG.num_experts, (DEVICES, CONFIG.width), np.int32)
        weights = rng.choice(np.array([1, 0.5, -1], np.float32), ids.shape)
        plans, states = run(states, *map(sharded, (layers, ids, weights)))
        assert len(plans.routes.sharding.device_set) == DEVICES
        for device, oracle in enumerate(oracles):
            want = oracle.step(int(layers[device]), ids[device], weights[device])
            got = plan_dict(jax.tree.map(lambda x, device=device: x[device], jax.device_get(plans)))
            assert_same(got, want, f"device {device}, step {step}")
    for device, oracle in enumerate(oracles):
        state = jax.tree.map(lambda x, device=device: x[device], jax.device_get(states))
        assert_same(pp.snapshot(CONFIG, state), oracle.snapshot(), f"device {device}")
