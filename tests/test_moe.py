"""`moe` by the decode path: plan, copies and FFN as one; its arguments; donation, scan and shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

import pallas_pool as pp
from bench.artifacts import CUSTOM_CALL
from pallas_pool.counters import COUNTED
from tests.moe_support import (
    CONFIG,
    EXPERTS,
    KERNEL,
    LAYERS,
    TOP_K,
    D,
    F,
    assert_bank_holds_residents,
    judged,
    numpy_experts,
    pinned_experts,
    plain,
    runner,
    tokens,
)
from tests.oracle import Oracle
from tests.support import abstract_gpus, assert_same, host_shapes, lower_for_cuda


def steps(count, seed=3):
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(LAYERS)), *tokens(rng, 1)) for _ in range(count)]


def test_decoding_is_exact_in_tables_and_counters_and_close_in_the_result():
    """Against the oracle and the plain sum, with evictions, padding and invalid lanes."""
    run, oracle = runner(CONFIG), Oracle.of(CONFIG)
    pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
    counts = np.zeros((LAYERS, len(COUNTED)), np.int64)
    for layer, x, ids, weights in steps(60):
        y, pool = run(pool, pinned_experts(), jnp.int32(layer), x, ids, weights)
        plan = oracle.step(layer, ids.ravel(), weights.ravel())
        distinct = len(set(judged(ids, weights).ravel().tolist()) - {-1})
        counts[layer] += 1, distinct - plan["copy_count"], plan["promoted_count"], plan["staged_count"]
        np.testing.assert_allclose(y, plain(layer, x, ids, weights), rtol=1e-5, atol=1e-5)
        assert_same(pp.snapshot(CONFIG, pool.state), oracle.snapshot())
        nothing = (judged(ids, weights) < 0).all(axis=1)
        assert (np.asarray(y)[nothing] == 0).all()
        assert_bank_holds_residents(CONFIG, pool)
    assert (counts[:, :3] > 3).all()
    assert pp.snapshot(CONFIG, pool.state)["error"] == 1
    read = pp.read_counters(pool)
    assert list(read) == ["calls", "hits", "misses", "promotions", "staged", "bytes_copied"]
    assert all(values.dtype == np.int64 and values.shape == (LAYERS,) for values in read.values())
    for i, name in enumerate(COUNTED):
        np.testing.assert_array_equal(read[name], counts[:, i], name)
    np.testing.assert_array_equal(read["misses"], counts[:, 2] + counts[:, 3])
    row = sum(leaf[0, 0].nbytes for leaf in numpy_experts().values())
    np.testing.assert_array_equal(read["bytes_copied"], read["misses"] * row)


def test_where_the_experts_are_does_not_change_a_bit():
    """A pool that evicts, and a full bank without any planner."""
    pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
    bank = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in numpy_experts().items()}
    full = jax.jit(pp.expert_ffn)
    for layer, x, ids, weights in steps(40, seed=4):
        y, pool = runner(CONFIG)(pool, pinned_experts(), jnp.int32(layer), x, ids, weights)
        safe = judged(ids, weights)
        rows = np.where(safe >= 0, layer * EXPERTS + safe, -1).astype(np.int32)
        np.testing.assert_array_equal(y, full(x, bank, rows, weights))
    assert pp.read_counters(pool)["promotions"].sum() > 10


def test_layers_may_be_a_sequence_and_tokens_have_any_leading_axes():
    experts = pp.pin([{name: leaf[layer] for name, leaf in numpy_experts().items()} for layer in range(2)])
    pool = pp.init_pool(CONFIG, experts)
    x, ids, weights = tokens(np.random.default_rng(5), 1)
    axes = (1, 1, 1)

    @jax.jit
    def run(pool, experts):
        arrays = [array.reshape(*axes, -1) for array in (x, ids, weights)]
        return pp.moe(CONFIG, pool, experts, 1, *arrays, kernel=KERNEL)

    y, _ = run(pool, experts)
    assert y.shape == (*axes, D)
    np.testing.assert_allclose(y.reshape(1, D), plain(1, x, ids, weights), rtol=1e-5, atol=1e-5)


def test_quantized_rows_with_scales_in_both_paths():
    """int8 values that stand for float32 ones exactly: what leaves there are, `moe` carries along."""
    rng = np.random.default_rng(6)
    stored = {
        "gate_up": rng.integers(-127, 128, (LAYERS, EXPERTS, D, 2 * F), np.int8),
        "gate_up_scale": rng.uniform(0.01, 0.02, (LAYERS, EXPERTS, 2 * F)).astype(np.float32),
        "down": rng.integers(-127, 128, (LAYERS, EXPERTS, F, D), np.int8),
        "down_scale": rng.uniform(0.01, 0.02, (LAYERS, EXPERTS, 1)).astype(np.float32),
    }
    gate_up = stored["gate_up"] * stored["gate_up_scale"][:, :, None]
    down = stored["down"] * stored["down_scale"][..., None]
    wide = {"gate": gate_up[..., :F], "up": gate_up[..., F:], "down": down}
    x, ids, weights = tokens(rng, 1, bad=0)

    def run(experts, path):
        pool = pp.init_pool(CONFIG, experts)
        return jax.jit(
            lambda pool, experts: pp.moe(
                CONFIG, pool, experts, 1, x, ids, weights, activation="gelu", kernel=KERNEL, path=path
            )
        )(pool, experts)[0]

    want = run(pp.pin(wide), "decode")
    for path in ("decode", "prefill"):
        np.testing.assert_allclose(run(pp.pin(stored), path), want, rtol=1e-5, atol=1e-4)  # Up to 10.


def test_a_scan_over_layers_is_the_same_as_layers_one_by_one():
    x, ids, weights = tokens(np.random.default_rng(7), 1)

    @jax.jit
    def scanned(pool, experts, x):
        def body(carry, layer):
            x, pool = carry
            y, pool = pp.moe(CONFIG, pool, experts, layer, x, ids, weights, kernel=KERNEL)
            return (x + y, pool), None

        return lax.scan(body, (x, pool), jnp.arange(LAYERS))[0]

    got, pool = scanned(pp.init_pool(CONFIG, pinned_experts(), counters=True), pinned_experts(), x)
    other = pp.init_pool(CONFIG, pinned_experts(), counters=True)
    want = x
    for layer in range(LAYERS):
        y, other = runner(CONFIG)(other, pinned_experts(), jnp.int32(layer), want, ids, weights)
        want = want + np.asarray(y)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(pool), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_both_paths_give_the_same_result():
    x, ids, weights = tokens(np.random.default_rng(3), 1, bad=0)
    ys = []
    for path in ("auto", "prefill"):
        pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
        run = runner(CONFIG, path)
        ys.append(run(pool, pinned_experts(), jnp.int32(1), x, ids, weights)[0])
    np.testing.assert_allclose(*ys, rtol=1e-5, atol=1e-6)


def test_an_unknown_layer_on_the_device_gives_nothing_and_an_error():
    x, ids, weights = tokens(np.random.default_rng(8), 1, bad=0)
    for path in ("auto", "prefill"):
        pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
        before = pp.snapshot(CONFIG, pool.state)
        y, pool = runner(CONFIG, path)(pool, pinned_experts(), jnp.int32(LAYERS), x, ids, weights)
        assert (np.asarray(y) == 0).all()
        assert_bank_holds_residents(CONFIG, pool)
        after = pp.snapshot(CONFIG, pool.state)
        assert after["error"] == 1 and np.array_equal(after["row_key"], before["row_key"])
        assert all((counts == 0).all() for counts in pp.read_counters(pool).values())


def test_a_donated_pool_is_updated_in_place():
    """Compiled for whatever device is here."""
    x, ids, weights = tokens(np.random.default_rng(9), 1)
    for path in ("auto", "prefill"):
        pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
        run = runner(CONFIG, path)
        arguments = (pool, pinned_experts(), jnp.int32(1), x, ids, weights)
        header = run.lower(*arguments).compile().as_text().splitlines()[0]
        assert header.count("may-alias") + header.count("must-alias") == len(jax.tree.leaves(pool))
        run(*arguments)
        assert all(array.is_deleted() for array in jax.tree.leaves(pool))


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def pool_shapes(config):
    """Shapes of a pool that counts."""
    bank = {
        name: jax.ShapeDtypeStruct((config.bank_rows, *leaf.shape[2:]), leaf.dtype)
        for name, leaf in numpy_experts().items()
    }
    state, counters = jax.eval_shape(lambda: (pp.init_state(config), pp.init_counters(config)))
    return pp.Pool(state, bank, counters)


def all_layers(config, **options):
    def run(pool, experts, x, ids, weights):
        for layer in range(LAYERS):
            y, pool = pp.moe(config, pool, experts, layer, x, ids, weights, interpret=False, **options)
            x = x + y
        return x, pool

    return run


@pytest.mark.parametrize("count, updates", [(1, False), (9, False), (9, True)])
def test_lowered_for_cuda_only_kernels_touch_bank_and_tables(count, updates):
    """Every array of the pool is aliased from input to output; between, it goes from kernel to kernel, in
    and out of loops, as it is."""
    pool = pool_shapes(CONFIG)
    experts = host_shapes(numpy_experts(), abstract_gpus())
    arguments = (pool, experts, *shapes_of(tokens(np.random.default_rng(10), count)))
    run = all_layers(CONFIG, prefill_updates=updates)
    lowered = lower_for_cuda(run, *arguments, donate_argnums=0)
    module = lowered.compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if "main" in str(op.attributes["sym_name"]))
    aliased = [str(x) for x in main.attributes["arg_attrs"] if "tf.aliasing_output" in str(x)]
    assert len(aliased) == len(jax.tree.leaves(pool))

    carriers = {"func.func", "func.call", "func.return", "stablehlo.custom_call", "stablehlo.while"}
    carriers |= {"stablehlo.case"}  # The choice of a platform, with the one branch that is left of it.
    carriers |= {"stablehlo.reshape", "stablehlo.bitcast_convert"}  # Of a whole array: the same memory.
    banks = kernels = 0

    def visit(op):
        nonlocal banks, kernels
        if op.name == "stablehlo.custom_call":
            kernels += ir.StringAttr(op.attributes["call_target_name"]).value == CUSTOM_CALL
        # Of the arrays of the program those of the bank alone have as many rows.
        if any(str(result.type).startswith(f"tensor<{CONFIG.bank_rows}x") for result in op.results):
            banks += 1
            assert op.name in carriers, op.name
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    assert banks and kernels


@pytest.mark.gpu
def test_temporaries_of_prefill_do_not_add_up_over_layers():
    """XLA makes what depends on nothing, zeros say, at the start of a program, for all layers at once."""
    lanes = 1024
    config = pp.PoolConfig(LAYERS, EXPERTS, rows_per_layer=1, staging_rows=3, width=4, step_map=False)
    pool = pp.init_pool(config, pinned_experts())
    x, ids, weights = tokens(np.random.default_rng(10), lanes // TOP_K)

    def temporaries(layers):
        def run(pool, experts, x):
            for layer in layers:
                y, pool = pp.moe(config, pool, experts, layer, x, ids, weights)
                x = x + y
            return x, pool

        compiled = jax.jit(run, donate_argnums=0).lower(pool, pinned_experts(), x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # A layer's outputs, lane by lane, are lanes * D floats.
    assert temporaries([0, 1, 0, 1]) < temporaries([0]) + lanes * D * 4


@pytest.mark.gpu
@pytest.mark.parametrize("count, updates", [(1, False), (9, False), (9, True)])
def test_compiled_for_the_gpu_no_bank_is_copied(count, updates):
    pool = pp.init_pool(CONFIG, pinned_experts(), counters=True)
    x, ids, weights = tokens(np.random.default_rng(10), count)
    run = jax.jit(all_layers(CONFIG, prefill_updates=updates), donate_argnums=0)
    compiled = run.lower(pool, pinned_experts(), x, ids, weights).compile()
    rows = f"f32[{CONFIG.bank_rows},"
    made = [line.split(" = ", 1)[1] for line in compiled.as_text().splitlines() if " = " in line]
    assert not [line for line in made if line.startswith(rows) and (" copy(" in line or " fusion(" in line)]


def two_devices():
    return (jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu"))[:2]


HALF = EXPERTS // 2
SHARE = pp.PoolConfig(LAYERS, HALF, rows_per_layer=1, staging_rows=2, width=2, step_map=False)


def on_each_device(mesh, check_vma, **options):
    """Each device has half of the experts; lanes of the other half are padding to it, and y is summed."""

    def one(pools, experts, layer, x, ids, weights):
        pool = jax.tree.map(lambda x: x[0], pools)
        own = ids - lax.axis_index("expert") * HALF
        own = jnp.where((own >= 0) & (own < HALF), own, -1)
        y, pool = pp.moe(SHARE, pool, experts, layer, x, own, weights, **options)
        return lax.psum(y, "expert"), jax.tree.map(lambda x: x[None], pool)

    in_specs = (P("expert"), P("expert"), P(), P(), P(), P())
    return jax.shard_map(
        one, mesh=mesh, in_specs=in_specs, out_specs=(P(), P("expert")), check_vma=check_vma
    )


@pytest.mark.parametrize("count", [1, 5])
def test_expert_parallel_each_device_with_a_pool_of_its_experts(count):
    devices = two_devices()
    mesh = jax.make_mesh((2,), ("expert",), (AxisType.Auto,), devices=devices)
    sharded, everywhere = NamedSharding(mesh, P("expert")), NamedSharding(mesh, P())
    shares = [jax.tree.map(lambda x, i=i: x[:, i * HALF : (i + 1) * HALF], numpy_experts()) for i in range(2)]
    experts = jax.tree.map(lambda *x: np.concatenate(x), *shares)  # [2 * L, HALF, ...]
    with jax.default_device(devices[0]):
        pools = [pp.init_pool(SHARE, pp.pin(share), counters=True) for share in shares]
        pools = jax.device_put(jax.tree.map(lambda *x: jnp.stack(x), *pools), sharded)
        experts = pp.pin(experts, device=sharded)
    # Interpreted, the check does not know what the interpreter does.
    run = jax.jit(on_each_device(mesh, check_vma=devices[0].platform == "gpu", kernel=KERNEL))
    rng = np.random.default_rng(11)
    for _ in range(8):
        layer = int(rng.integers(LAYERS))
        x, ids, weights = tokens(rng, count, bad=0)
        arrays = jax.device_put((np.int32(layer), x, ids, weights), everywhere)
        y, pools = run(pools, experts, *arrays)
        np.testing.assert_allclose(y, plain(layer, x, ids, weights), rtol=1e-5, atol=1e-5)
    read = pp.read_counters(pools)
    assert read["misses"].shape == (2, LAYERS) and read["misses"].sum() > 0
    for i in range(2):
        pp.check_state(SHARE, jax.tree.map(lambda x, i=i: x[i], jax.device_get(pools.state)))


@pytest.mark.parametrize("count, updates", [(1, False), (5, False), (5, True)])
def test_with_varying_axes_checked_it_lowers_for_gpus(count, updates):
    mesh = abstract_gpus(2, "expert")
    pinned = NamedSharding(mesh, P("expert"), memory_kind="pinned_host")
    experts = {
        name: jax.ShapeDtypeStruct((2 * LAYERS, HALF, *leaf.shape[2:]), leaf.dtype, sharding=pinned)
        for name, leaf in numpy_experts().items()
    }
    pools = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), pool_shapes(SHARE))
    layer, rest = jax.ShapeDtypeStruct((), jnp.int32), shapes_of(tokens(np.random.default_rng(0), count))
    run = on_each_device(mesh, check_vma=True, prefill_updates=updates)
    assert CUSTOM_CALL in lower_for_cuda(run, pools, experts, layer, *rest, mesh=mesh).as_text()


def call(**changes):
    """A good call of `moe` but for the given arguments; traced, never compiled."""
    x, ids, weights = tokens(np.random.default_rng(12), 1)
    arguments = {
        "config": CONFIG,
        "pool": changes.get("pool") or pp.init_pool(CONFIG, pinned_experts()),
        "experts": pinned_experts(),
        "layer": 0,
        "x": x,
        "expert_ids": ids,
        "weights": weights,
    }
    arguments |= changes
    return jax.eval_shape(lambda: pp.moe(**arguments))


def three_rows_more():
    config = pp.PoolConfig(LAYERS, EXPERTS, rows_per_layer=(3, 4), staging_rows=3, width=4, step_map=False)
    return pp.init_pool(config, pinned_experts())


def pool_with(**changes):
    return pp.init_pool(CONFIG, pinned_experts())._replace(**changes)


X = np.zeros((3, D), np.float32)
IDS = np.zeros((3, TOP_K), np.int32)
WEIGHTS = np.zeros((3, TOP_K), np.float32)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"config": "x"}, TypeError, "config must be a PoolConfig"),
        ({"pool": (1, 2, 3)}, TypeError, "pool must be a Pool"),
        ({"path": "both"}, ValueError, "path must be one of auto, decode, prefill"),
        ({"prefill_updates": 1}, TypeError, "prefill_updates must be True or False"),
        ({"kernel": "none"}, ValueError, "kernel must be one of"),
        ({"activation": "none"}, ValueError, "activation must be one of"),
        ({"layer": LAYERS}, ValueError, r"layer must be in \[0, 1\]"),
        ({"experts": {"gate": X}}, ValueError, "experts"),
        ({"experts": jax.tree.map(lambda x: x[:1], numpy_experts())}, ValueError, "num_layers=2"),
        ({"experts": jax.tree.map(lambda x: x[:, :4], numpy_experts())}, ValueError, "num_experts=8"),
        ({"experts": {"down": numpy_experts()["down"]}}, ValueError, "structure"),
        ({"pool": three_rows_more}, ValueError, "make the pool by init_pool"),
        ({"pool": lambda: pool_with(state=None)}, TypeError, "pool.state must be a PoolState"),
        ({"pool": lambda: pool_with(counters=7)}, ValueError, "pool.counters must .* got int"),
        ({"pool": lambda: pool_with(bank=dict.fromkeys(numpy_experts(), 7))}, ValueError, "got int"),
        ({"x": X.astype(np.int32)}, TypeError, "x must be float32, bfloat16 or float16"),
        ({"weights": IDS}, TypeError, "weights must be float16"),
        ({"expert_ids": WEIGHTS}, TypeError, "expert_ids must have an integer dtype"),
        ({"x": X}, ValueError, "same leading axes"),
        ({"x": X, "expert_ids": IDS}, ValueError, "same leading axes"),
        ({"x": X, "expert_ids": IDS, "weights": WEIGHTS[:, :1]}, ValueError, "same leading axes"),
        (
            {"x": X, "expert_ids": IDS, "weights": WEIGHTS, "path": "decode"},
            ValueError,
            "takes at most 3 lanes, the smaller of width=4 and staging_rows=3, got 6",
        ),
        (
            {"x": X[:1], "expert_ids": np.zeros((1, 4), np.int32), "weights": np.zeros((1, 4), np.float32)},
            ValueError,
            "top_k=4 experts a token.*staging_rows=3.*at least top_k",
        ),
    ],
)
def test_bad_use_is_refused(changes, error, message):
    changes = {name: value() if callable(value) else value for name, value in changes.items()}
    with pytest.raises(error, match=message):
        call(**changes)


def test_more_lanes_than_staging_rows_are_refused_by_the_decode_path_alone():
    arrays = {"x": X[:2], "expert_ids": IDS[:2], "weights": WEIGHTS[:2]}  # 4 lanes, 3 staging rows.
    with pytest.raises(ValueError, match=r"at most 3 lanes.*staging_rows=3, got 4 .*path=.auto. takes"):
        call(**arrays, path="decode")
    y, _ = call(**arrays)
    assert y.shape == (2, D)


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_both_paths_refuse_alike(path):
    """Also what one of them has no use for, and a state whose tables belong to another config."""
    other = pp.init_state(pp.PoolConfig(1, 2 * EXPERTS, rows_per_layer=4, staging_rows=4, width=4))
    with pytest.raises(ValueError, match=r"state\.row_key must be int32\[7\] .* got int32\[8\]"):
        call(path=path, pool=pool_with(state=other))
    with pytest.raises(ValueError, match="kernel must be one of"):
        call(path=path, kernel="none")
    with pytest.raises(TypeError, match="interpret must be"):
        call(path=path, interpret="no")


def test_no_token_is_no_work():
    pool = pp.init_pool(CONFIG, pinned_experts())
    y, after = pp.moe(CONFIG, pool, pinned_experts(), 0, X[:0], IDS[:0], WEIGHTS[:0])
    assert y.shape == (0, D) and after is pool


def test_counters_of_another_geometry_are_refused():
    pool = pp.init_pool(CONFIG, pinned_experts())._replace(counters=jnp.zeros((1, 4, 2), jnp.int32))
    with pytest.raises(ValueError, match=r"pool.counters must be int32\[2, 4, 2\]"):
        call(pool=pool)


def test_init_pool_refuses_what_does_not_fit():
    with pytest.raises(TypeError, match="config must be a PoolConfig, got dict"):
        pp.init_pool(pinned_experts(), CONFIG)
    with pytest.raises(TypeError, match="counters must be True or False"):
        pp.init_pool(CONFIG, pinned_experts(), counters=1)
    with pytest.raises(ValueError, match="residents"):
        pp.init_pool(CONFIG, pinned_experts(), [[0], [1]])


def test_init_pool_loads_the_residents_that_are_named():
    pool = pp.init_pool(CONFIG, pinned_experts(), [[7, 0, 3], [5]])
    assert np.array_equal(np.asarray(pool.state.row_key)[: CONFIG.rows], [7, 0, 3, EXPERTS + 5])
    assert pool.counters is None
    assert_bank_holds_residents(CONFIG, pool)
