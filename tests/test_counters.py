"""Counters: past 2**31, and as a table. That they count what the plans say, the tests of `moe` see."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
from bench.artifacts import triton_kernels
from pallas_pool.counters import COUNTED, count, count_step
from tests.moe_support import CONFIG, LAYERS, pinned_experts

TENSOR = re.compile(r"tensor<((?:\d+x)+\w)")


def counted(counters):
    return pp.Pool(None, {"w": np.zeros((4, 3, 2), np.int8)}, counters)


def test_counts_run_past_32_bits():
    near = np.zeros((LAYERS, len(COUNTED), 2), np.int32)
    near[..., 0] = 2**31 - 3
    counters = jnp.asarray(near)
    for _ in range(3):
        counters = count(counters, jnp.int32(1), (2, 2**31 - 1, 0, 1))
    assert (np.asarray(counters) >= 0).all()
    read = pp.read_counters(counted(counters))
    assert read["calls"].tolist() == [2**31 - 3, 2**31 - 3 + 6]
    assert read["hits"].tolist() == [2**31 - 3, 2**31 - 3 + 3 * (2**31 - 1)]
    assert read["promotions"].tolist() == [2**31 - 3, 2**31 - 3]
    assert read["staged"].tolist() == [2**31 - 3, 2**31]
    assert read["bytes_copied"].tolist() == [6 * (2**32 - 6), 6 * (2**32 - 3)]


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_a_layer_that_there_is_not_counts_nowhere(layer):
    counters = count(pp.init_counters(CONFIG), jnp.int32(layer), (1, 1, 1, 1))
    assert not np.asarray(counters).any()


def test_nothing_is_counted_unless_asked_for():
    assert count(None, jnp.int32(0), (1, 1, 1, 1)) is None
    assert count_step(None, jnp.int32(0), None, 1, None) is None
    pool = pp.init_pool(CONFIG, pinned_experts())
    with pytest.raises(TypeError, match=r"init_pool\(\.\.\., counters=True\)"):
        pp.read_counters(pool)
    with pytest.raises(TypeError, match="got dict"):
        pp.counters_table(pp.read_counters({}))
    with pytest.raises(TypeError, match="config must be a PoolConfig"):
        pp.init_counters("x")
    pool = pool._replace(counters=pp.init_counters(CONFIG))
    assert not any(values.any() for values in pp.read_counters(pool).values())


@pytest.mark.parametrize("lanes", [1, 7, 64, 100, 1000])
def test_a_step_counts_distinct_rows_once_and_runs_past_32_bits(lanes):
    """Routes behind the lanes of the call are not looked at."""
    rng = np.random.default_rng(1)
    near = np.full((LAYERS, len(COUNTED), 2), [2**31 - 40, 5], np.int32)
    counters, want = jnp.asarray(near), near[..., 1].astype(np.int64) * 2**31 + near[..., 0]
    step = jax.jit(count_step, static_argnums=(3, 4))
    for layer in (0, 1, 1, LAYERS, -1):
        routes = rng.integers(-1, lanes // 2 + 1, max(128, lanes + 24)).astype(np.int32)
        staged, promoted = rng.integers(0, 50, 2)
        plan = pp.Plan(*[None] * 10)._replace(
            routes=jnp.asarray(routes),
            copy_count=jnp.int32(1),
            promoted_count=jnp.int32(promoted),
            staged_count=jnp.int32(staged),
        )
        counters = step(counters, jnp.int32(layer), plan, lanes, None)
        if 0 <= layer < LAYERS:
            distinct = len(set(routes[:lanes].tolist()) - {-1})
            want[layer] += 1, distinct - 1, promoted, staged
    words = np.asarray(counters)
    assert (words >= 0).all() and (lanes < 64 or (words[..., 1] > 5).any())
    np.testing.assert_array_equal(words[..., 1].astype(np.int64) * 2**31 + words[..., 0], want)


@pytest.mark.parametrize("lanes", [1, 64, 65, 200, 1024])
def test_what_a_warp_compares_at_once_fits_in_its_registers(lanes):
    def shape(*size):
        return jax.ShapeDtypeStruct(size, jnp.int32)

    plan = pp.Plan(*[None] * 10)._replace(
        routes=shape(lanes), copy_count=shape(), promoted_count=shape(), staged_count=shape()
    )
    [kernel] = triton_kernels(
        lambda *operands: count_step(*operands, lanes, False),
        *(shape(LAYERS, len(COUNTED), 2), shape(), plan),
    )
    sizes = [math.prod(map(int, size.split("x")[:-1])) for size in TENSOR.findall(kernel.ttir)]
    assert max(sizes) <= 64 * 32 * kernel.num_warps
    assert ("gpu.barrier" in kernel.ttir) == (kernel.num_warps > 1), kernel.ttir


def test_counting_a_prefill_is_some_small_fusions():
    """No gather over tables, no loop: elementwise work on some words, and an update in place."""
    shapes = (jax.eval_shape(lambda: pp.init_counters(CONFIG)), jax.ShapeDtypeStruct((), jnp.int32))
    counts = (jax.ShapeDtypeStruct((), jnp.int32),) * len(COUNTED)
    text = jax.jit(count, donate_argnums=0).lower(*shapes, counts).compile().as_text()
    entry = text[text.index("ENTRY") :]
    work = [line for line in entry.splitlines() if " = " in line and "parameter(" not in line]
    assert "may-alias" in text.splitlines()[0] or "must-alias" in text.splitlines()[0]
    assert "while(" not in entry and len(work) <= 6, entry


def test_the_table():
    words = np.zeros((LAYERS, len(COUNTED), 2), np.int32)
    words[0, :, 0] = 10, 30, 6, 4
    table = pp.counters_table(counted(jnp.asarray(words)))
    rows = [line.split() for line in table.splitlines()]
    assert table.splitlines()[0].split() == [
        "layer", "calls", "hits", "misses", "promotions", "staged", "bytes", "copied", "hit", "rate"
    ]  # fmt: skip
    assert rows[1] == ["0", "10", "30", "10", "6", "4", "60", "75.0%"]
    assert rows[2] == ["1", "0", "0", "0", "0", "0", "0", "-"]
    assert rows[3] == ["all", "10", "30", "10", "6", "4", "60", "75.0%"]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_stacked_pools():
    """As `shard_map` has them: an axis of devices before each array's own."""
    words = np.zeros((2, LAYERS, len(COUNTED), 2), np.int32)
    words[1, 0, 2, 0] = 5
    pool = pp.Pool(None, {"w": np.zeros((2, 4, 3, 2), np.int8)}, jnp.asarray(words))
    read = pp.read_counters(pool)
    assert read["bytes_copied"].tolist() == [[0, 0], [30, 0]]
    with pytest.raises(ValueError, match="pick one pool"):
        pp.counters_table(pool)
    summed = {name: values.sum(axis=0) for name, values in read.items()}
    assert pp.counters_table(summed).splitlines()[1].split()[3] == "5"
