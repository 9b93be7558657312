"""A pool saved and restored with orbax in mid-stream goes on as if nothing had happened."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_pool as pp
from pallas_pool import state as fields
from tests.oracle import Oracle
from tests.support import (
    CONFIG,
    EDGE,
    IMPLEMENTATIONS,
    KERNELS,
    PIECE,
    aged,
    assert_same,
    assert_same_steps,
    run_oracle,
    run_steps,
)

TABLES = tuple(name for name in fields.STATE_FIELDS if name != "queue")
CONTROLS = {"promote_min_misses": 2, "promote_limit": 3, "protect_recent": 1}


def stream(seed, steps=PIECE):
    rng = np.random.default_rng(seed)
    layers = np.arange(steps) % CONFIG.num_layers
    return layers, rng.integers(-1, CONFIG.num_experts, (steps, CONFIG.width), np.int32)


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def target(config):
    """The shapes and dtypes to restore, as a state."""
    return jax.eval_shape(lambda: pp.init_state(config))


def of_dict(state):
    """A state of the dict that orbax restores without a target."""
    return pp.PoolState.tree_unflatten(None, [state[name] for name in fields.STATE_FIELDS])


def on_host(state):
    """In NumPy arrays: those that orbax puts on a device make JAX compile once more."""
    return jax.device_get(state)


def mid_stream(name, clock):
    """A state in use at that clock, and the oracle beside it."""
    state, oracle = aged(CONFIG, clock, clock // CONFIG.num_layers)
    oracle.set_controls(**CONTROLS)
    lanes = stream(0)
    run_oracle(oracle, *lanes)
    _, state = run_steps(name, CONFIG, pp.set_controls(state, **CONTROLS), *lanes)
    return state, oracle


def live_entries(state):
    head, tail = np.asarray(state.queue)[[fields.QUEUE_HEAD, fields.QUEUE_TAIL]]
    return int(head), int(tail)


# The second clock crosses the edge of its low word after the restore.
@pytest.mark.parametrize("clock", [0, EDGE - PIECE - 5])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_decisions_go_on_exactly_as_without(tmp_path, name, clock):
    state, oracle = mid_stream(name, clock)
    save(tmp_path / "pool", state)
    restored = restore(tmp_path / "pool", target(CONFIG))
    pp.check_state(CONFIG, restored)
    assert isinstance(restored, pp.PoolState)
    for field in fields.STATE_FIELDS:
        assert np.array_equal(getattr(restored, field), getattr(state, field)), field
    if name != "fused":
        restored = on_host(restored)

    lanes = stream(1)
    want = run_oracle(oracle, *lanes)
    assert all(any(plan[count] for plan, _ in want) for count in ("promoted_count", "staged_count"))
    without, state = run_steps(name, CONFIG, state, *lanes)
    with_restore, restored = run_steps(name, CONFIG, restored, *lanes)
    assert_same_steps(without, want, f"{name}, without")
    assert_same_steps(with_restore, want, f"{name}, restored")
    # The queue too, which no snapshot shows: the restored one was used, and not made anew.
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.array_equal(one, other)


def half_used(controls):
    """A state of the fused kernel whose queue has lost some entries, and has some left."""
    state = pp.set_controls(pp.init_state(CONFIG), **controls)
    oracle = Oracle.of(CONFIG)
    oracle.set_controls(**controls)
    layers, ids = stream(2, 5)
    for t in range(1, 6):
        run_oracle(oracle, layers[t - 1 : t], ids[t - 1 : t])
        _, state = run_steps("fused", CONFIG, state, layers[t - 1 : t], ids[t - 1 : t])
        head, tail = live_entries(state)
        if 0 < head < tail:
            return state, oracle
    raise AssertionError("the queue was never half used")


@pytest.mark.parametrize("name", KERNELS)
def test_a_queue_half_used_is_restored_and_used_on(tmp_path, name):
    """By the fused kernel, which saved it, and by the others, which pass it by."""
    state, oracle = half_used({"promote_limit": 1})
    head, tail = live_entries(state)
    save(tmp_path / "pool", state)
    restored = restore(tmp_path / "pool", target(CONFIG))
    pp.check_state(CONFIG, restored)
    assert live_entries(restored) == (head, tail)
    restored = on_host(restored)
    for start in range(3):
        layers, ids = stream(10 + start)
        want = run_oracle(oracle, layers, ids)
        # Kernels take turns, so that the restored queue is used after others have stepped.
        kernel = name if start != 1 else "fused"
        got, restored = run_steps(kernel, CONFIG, restored, layers, ids)
        assert_same_steps(got, want, f"{kernel}, {start}")
        pp.check_state(CONFIG, restored)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_tables_alone_are_enough(tmp_path, name):
    """The constructor makes a state of them with an empty queue, which decides the same."""
    state, oracle = half_used(CONTROLS | {"promote_min_misses": 1})
    save(tmp_path / "tables", {table: getattr(state, table) for table in TABLES})
    restored = pp.PoolState(**on_host(restore(tmp_path / "tables")))
    pp.check_state(CONFIG, restored)
    assert live_entries(restored) == (0, 0)
    assert_same(pp.snapshot(CONFIG, restored), oracle.snapshot())
    lanes = stream(3)
    want = run_oracle(oracle, *lanes)
    got, restored = run_steps(name, CONFIG, restored, *lanes)
    assert_same_steps(got, want, name)
    pp.check_state(CONFIG, restored)


def test_restored_without_a_target(tmp_path):
    """Orbax gives a dict of the fields then, and the state is made of it."""
    state, oracle = half_used({})
    save(tmp_path / "pool", state)
    fields_by_name = restore(tmp_path / "pool")
    assert set(fields_by_name) == set(fields.STATE_FIELDS)
    restored = of_dict(fields_by_name)
    pp.check_state(CONFIG, restored)
    assert_same(pp.snapshot(CONFIG, restored), oracle.snapshot())


def test_a_pool_a_device(tmp_path):
    """Stacked states, one a device, come back on the devices where they were."""
    devices = jax.devices() if len(jax.devices()) >= 2 else jax.devices("cpu")
    sharding = NamedSharding(Mesh(np.array(devices[:2]), ("d",)), P("d"))
    pools = [half_used({})[0], pp.init_state(CONFIG)]
    stacked = jax.tree.map(lambda *x: jax.device_put(np.stack(x), sharding), *pools)
    save(tmp_path / "pools", stacked)
    restored = restore(
        tmp_path / "pools",
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), stacked),
    )
    for device, pool in enumerate(pools):
        mine = jax.tree.map(lambda x, device=device: x[device], restored)
        pp.check_state(CONFIG, mine)
        assert_same(pp.snapshot(CONFIG, mine), pp.snapshot(CONFIG, pool), f"device {device}")
    assert all(x.sharding == sharding for x in jax.tree.leaves(restored))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where a state of `CONFIG` is saved."""
    path = tmp_path_factory.mktemp("saved") / "pool"
    save(path, half_used({})[0])
    return path


@pytest.mark.parametrize(
    "change, field",
    [
        ({"num_experts": 9}, "key_row"),
        ({"num_layers": 4, "rows_per_layer": (3, 0, 4, 0)}, "key_row"),
        ({"rows_per_layer": (3, 1, 4)}, "row_key"),
        ({"rows_per_layer": (3, 1, 4), "staging_rows": 3}, "row_used"),
        ({"staging_rows": 5}, "row_key"),
    ],
)
def test_another_geometry_is_refused(saved, change, field):
    """One pool's checkpoint for the config of another; orbax itself does not know the config."""
    other = dataclasses.replace(CONFIG, **change)
    for restored in (restore(saved, target(CONFIG)), of_dict(restore(saved))):
        with pytest.raises(
            pp.PoolError, match=rf"^state\.{field} must be int32\[.* for this config"
        ):
            pp.check_state(other, restored)
        with pytest.raises(ValueError, match=rf"^state\.{field} must be int32"):
            pp.step(other, restored, 0, [0])


def test_as_many_keys_of_fewer_layers_are_refused(saved):
    """Every array has the right shape, and every key would name another expert."""
    other = dataclasses.replace(CONFIG, num_layers=2, num_experts=12, rows_per_layer=(3, 4))
    assert other.keys == CONFIG.keys and other.bank_rows == CONFIG.bank_rows
    with pytest.raises(pp.PoolError, match="made for 3 layers, the config has 2"):
        pp.check_state(other, restore(saved, target(other)))


@pytest.mark.parametrize("dtype", [jnp.int16, jnp.uint32, jnp.float32])
@pytest.mark.parametrize("field", fields.STATE_FIELDS)
def test_another_dtype_is_refused(saved, field, dtype):
    """Orbax casts to the dtype of the target that it is given, and says nothing."""
    wrong = target(CONFIG)
    leaf = getattr(wrong, field)
    wrong = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype) if x is leaf else x, wrong)
    restored = restore(saved, wrong)
    message = rf"^state\.{field} must be int32\[.*, got {jnp.dtype(dtype)}\["
    with pytest.raises(pp.PoolError, match=message):
        pp.check_state(CONFIG, restored)


def test_tables_of_two_checkpoints_are_refused(tmp_path, saved):
    """A checkpoint put together of two: the tables contradict each other, or the queue does."""
    later, _ = mid_stream("fused", 0)
    save(tmp_path / "later", pp.set_controls(later, promote_limit=0))
    old, new = restore(saved), restore(tmp_path / "later")
    for mixed in ("key_row", "row_key", "row_used", "queue"):
        with pytest.raises(pp.PoolError):
            pp.check_state(CONFIG, of_dict(old | {mixed: new[mixed]}))
