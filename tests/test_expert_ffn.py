"""`expert_ffn` against the formula in NumPy; interpreted on a CPU, and lowered for CUDA."""

import functools
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_pool as pp
from bench.artifacts import CUSTOM_CALL, triton_kernels, write
from pallas_pool import expert_ffn as exported
from pallas_pool.expert_ffn import default_tiling, tiled_ffn
from pallas_pool.kernels.ffn import Tile, Tiling
from tests.ffn_reference import assert_close, ffn, make_bank, make_lanes
from tests.support import abstract_gpus, lower_for_cuda
from tests.test_triton_ir import custom_calls

bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
int8, e4m3, e5m2 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2

# Every way through the kernels: turns alone and ahead, with and without a rest, split sums, passes of
# one, some and sixteen members, lanes summed in the kernel or after it.
TILINGS = {
    "default": None,
    "one": Tiling(Tile(16, 16, 2, 4), Tile(8, 32, 1, 4), 1, 1),
    "ahead": Tiling(Tile(8, 16, 1, 4, 2, True), Tile(8, 32, 3, 4, 2, True), 1, 2),
    "four": Tiling(Tile(8, 16, 1, 4, 2), Tile(16, 32, 1, 4), 4, 4),
    "dot": Tiling(Tile(16, 16, 2, 4), Tile(16, 32, 1, 4), 16, 16),
    "dot, one": Tiling(Tile(16, 16, 1, 4), Tile(8, 16, 1, 4, 2, True), 16, 1),
}


def run(x, bank, routes, weights, **options):
    """`tiled_ffn` under `jit`; on a CPU without what the compiler would take its time for."""
    function = jax.jit(functools.partial(tiled_ffn, **options))
    if jax.default_backend() != "cpu":
        return function(x, bank, routes, weights)
    args = x, bank, jnp.asarray(routes), weights
    compiled = function.lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})
    return compiled(*args)


def check(rng, tokens, top_k, d, f, x_dtype=f32, rows=5, tiling=None, **bank_options):
    bank = make_bank(rng, rows, d, f, **bank_options)
    x, routes, weights = make_lanes(rng, tokens, top_k, d, rows, x_dtype)
    y = run(x, bank, routes, weights, tiling=tiling)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert_close(y, ffn(x, bank, routes, weights), x_dtype)
    return x, bank, routes, weights, y


@pytest.mark.parametrize(
    "tokens, tiling",
    [*((3, tiling) for tiling in TILINGS), (1, "default"), (1, "ahead"), (1, "dot, one"), (1, "dot")],
)
def test_every_tiling(tokens, tiling):
    """d divides by the tiles, f does not by any."""
    check(np.random.default_rng(1), tokens, 2, 64, 35, rows=3, tiling=TILINGS[tiling])


@pytest.mark.parametrize(
    "tiling, x_dtype, dtype, scale, fused",
    [
        ("dot", f32, f32, "channel", True),
        ("ahead", bf16, bf16, None, False),
        ("dot", f32, bf16, "row", True),
        ("dot", f16, f16, "channel", False),
        ("four", f16, int8, "channel", True),
        ("dot", f32, int8, "column of rows", False),
        ("ahead", bf16, e4m3, "channel", False),
        ("dot", f32, e5m2, "row", True),
    ],
)
def test_dtypes_scales_and_fused_gate_up(tiling, x_dtype, dtype, scale, fused):
    rng, tiling = np.random.default_rng(2), TILINGS[tiling]
    options = {"dtype": dtype, "scale": scale, "fused": fused, "tiling": tiling}
    args = check(rng, 3, 2, 20, 18, x_dtype, rows=3, **options)[:-1]
    if dtype in (int8, e4m3):
        # As in a bank of more than 2**31 of them.
        assert_close(run(*args, tiling=tiling, paired=True), ffn(*args), x_dtype)


def test_leaves_of_different_dtypes_and_scales_of_bfloat16():
    rng = np.random.default_rng(3)
    bank = make_bank(rng, 4, 24, 16, int8, scale="channel", scale_dtype=bf16)
    bank["down"] = make_bank(rng, 4, 24, 16, f16)["down"]
    del bank["down_scale"]
    x, routes, weights = make_lanes(rng, 3, 2, 24, 4, bf16)
    y = pp.expert_ffn(x, bank, routes, weights.astype(f16))
    assert_close(y, ffn(x, bank, routes, weights.astype(f16)), bf16)


@pytest.mark.parametrize("d, f", [(1, 1), (33, 5)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_odd_sizes(d, f, tokens):
    rng = np.random.default_rng(4)
    dtypes = jnp.dtype(f32), jnp.dtype(f32)
    check(rng, tokens, 2, d, f, tiling=default_tiling(tokens, 2, d, f, *dtypes))


@pytest.mark.parametrize("tiling", ["one", "four", "dot"])
def test_what_is_not_routed_is_not_looked_at(tiling):
    """NaN in other rows, in tokens without rows, in router weights of lanes without, past T * k."""
    rng = np.random.default_rng(5)
    bank = make_bank(rng, 6, 32, 16)
    x, _, weights = make_lanes(rng, 4, 3, 32, 6)
    routes = np.array([[4, -1, 2], [-1, 6, -7], [2, 2, -1], [2**31 - 1, -(2**31), -1]], np.int32)
    bank = {name: leaf.at[jnp.array([0, 1, 3, 5])].set(jnp.nan) for name, leaf in bank.items()}
    x = x.at[jnp.array([1, 3])].set(jnp.nan)
    weights = jnp.where((routes >= 0) & (routes < 6), weights, jnp.nan)
    lanes = np.concatenate([routes.reshape(-1), np.full(4, 1)]).astype(np.int32)
    y = np.asarray(run(x, bank, lanes, weights, tiling=TILINGS[tiling]))
    clean = {name: jnp.nan_to_num(leaf) for name, leaf in bank.items()}
    assert_close(y, ffn(np.nan_to_num(x), clean, routes, np.nan_to_num(weights)), f32)
    assert (y[[1, 3]] == 0).all() and not np.signbit(y[[1, 3]]).any()


@pytest.mark.parametrize("tiling", ["one", "four", "dot"])
def test_what_is_not_finite_stays_with_its_token(tiling):
    """A NaN or an infinity of one token or weight shows there, and there alone."""
    rng = np.random.default_rng(6)
    bank = make_bank(rng, 3, 32, 16, bf16)
    x, _, weights = make_lanes(rng, 4, 2, 32, 3)
    routes = jnp.array([[0, 1], [0, 1], [1, 0], [0, 2]], jnp.int32)
    x = x.at[1, 5].set(jnp.nan)
    bank["down"] = bank["down"].at[2].set(jnp.inf)
    weights = weights.at[2, 0].set(jnp.nan)
    y = np.asarray(run(x, bank, routes, weights, tiling=TILINGS[tiling]))
    assert np.isnan(y[1]).all() and np.isnan(y[2]).all() and not np.isfinite(y[3]).any()
    assert_close(y[:1], ffn(x[:1], bank, routes[:1], weights[:1]), f32)


@pytest.mark.parametrize("tiling", ["one", "four", "dot"])
def test_rows_that_many_lanes_share(tiling):
    """More lanes of a row than a pass serves, in one token too."""
    rng = np.random.default_rng(7)
    bank = make_bank(rng, 3, 16, 8)
    x, _, weights = make_lanes(rng, 20, 3, 16, 3)
    routes = np.ones((20, 3), np.int32)
    routes[7], routes[19, 1] = 2, -1
    y = run(x, bank, routes, weights, tiling=TILINGS[tiling])
    assert_close(y, ffn(x, bank, routes, weights), f32)


def test_all_lanes_there_can_be():
    rng = np.random.default_rng(8)
    check(rng, 256, 4, 8, 4, rows=9)
    check(rng, 1, 40, 8, 4, rows=9)  # More than are summed in the kernel, or written out.


def test_routes_of_every_form():
    rng = np.random.default_rng(9)
    bank = make_bank(rng, 5, 16, 8)
    x, routes, weights = make_lanes(rng, 2, 3, 16, 5)
    y = np.asarray(pp.expert_ffn(x, bank, routes, weights))
    flat = np.asarray(routes).reshape(-1)
    padded = np.concatenate([flat, [3, 3]])
    big = np.where(flat < 0, 2**32, flat.astype(np.int64))  # Wrapped round to 32 bits it would be row 0.
    for same in (padded.astype(np.int16), np.where(flat < 0, 200, flat).astype(np.uint8), big):
        np.testing.assert_array_equal(np.asarray(pp.expert_ffn(x, bank, same, weights)), y)


def test_no_tokens():
    bank = make_bank(np.random.default_rng(0), 2, 16, 8)
    y = pp.expert_ffn(jnp.zeros((0, 16), bf16), bank, jnp.zeros(4, jnp.int32), jnp.zeros((0, 2)))
    assert y.shape == (0, 16) and y.dtype == bf16


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_activations_by_name(activation):
    rng = np.random.default_rng(10)
    bank = make_bank(rng, 3, 16, 8)
    x, routes, weights = make_lanes(rng, 2, 3, 16, 3)
    y = run(x, bank, routes, weights, activation=activation)
    assert_close(y, ffn(x, bank, routes, weights, activation), f32)


@pytest.mark.parametrize("tiling", ["ahead", "four", "dot"])
def test_an_activation_of_ones_own(tiling):
    """It is traced into the kernel, and may be what it likes at the 0 that stands for no value."""
    rng = np.random.default_rng(11)
    bank = make_bank(rng, 3, 32, 11)
    x, routes, weights = make_lanes(rng, 3, 2, 32, 3)

    def activation(g):
        return jnp.where(g == 0, jnp.inf, jnp.tanh(3 * g))

    y = run(x, bank, routes, weights, tiling=TILINGS[tiling], activation=activation)
    assert_close(y, ffn(x, bank, routes, weights, lambda g: np.tanh(3 * g)), f32)


def test_the_same_bits_again_and_in_a_scan():
    rng = np.random.default_rng(12)
    bank = make_bank(rng, 6, 16, 8, bf16)
    steps = 3
    xs, routes, weights = (
        jnp.stack(each)
        for each in zip(*(make_lanes(rng, 2, 2, 16, 6, bf16) for _ in range(steps)), strict=True)
    )
    body = lambda carry, lanes: (carry, pp.expert_ffn(lanes[0], bank, *lanes[1:]))  # noqa: E731
    _, ys = jax.jit(lambda *lanes: lax.scan(body, 0, lanes))(xs, routes, weights)
    for i in range(steps):
        y = pp.expert_ffn(xs[i], bank, routes[i], weights[i])
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(ys[i], np.float32))


def sharded(mesh, check_vma):
    def one(x, bank, routes, weights):
        bank, routes = jax.tree.map(lambda leaf: leaf[0], (bank, routes))
        return lax.psum(pp.expert_ffn(x, bank, routes, weights), "d")

    # Tokens on all devices, experts on each its own: the outputs add up.
    specs = P(), P("d"), P("d"), P()
    return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)


def test_experts_on_two_devices():
    rng = np.random.default_rng(13)
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    bank = make_bank(rng, 6, 16, 8)
    x, _, weights = make_lanes(rng, 4, 2, 16, 6)
    routes = rng.integers(0, 6, (4, 2)).astype(np.int32)
    own = np.stack([np.where(routes // 3 == device, routes % 3, -1) for device in range(2)])
    halves = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), bank)
    y = jax.jit(sharded(mesh, check_vma=False))(x, halves, own, weights)
    assert_close(y, ffn(x, bank, routes, weights), f32)


def shapes(rows, d, f, tokens, top_k, dtype, x_dtype=bf16, fused=False):
    shape = jax.ShapeDtypeStruct
    bank = {"gate_up": (d, 2 * f)} if fused else {"gate": (d, f), "up": (d, f)}
    bank = {name: shape((rows, *size), dtype) for name, size in (bank | {"down": (f, d)}).items()}
    lanes = tokens, top_k
    return shape((tokens, d), x_dtype), bank, shape(lanes, jnp.int32), shape(lanes, f32)


def test_varying_axes_checked_lower_for_a_gpu():
    mesh = abstract_gpus(2, "d")
    x, bank, routes, weights = shapes(3, 32, 16, 2, 2, bf16)
    doubled = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), (bank, routes))
    text = lower_for_cuda(sharded(mesh, check_vma=True), x, *doubled, weights, mesh=mesh).as_text()
    assert text.count(CUSTOM_CALL) == 2


# Qwen3-30B-A3B and a narrow one, in every dtype; and sizes that no tile divides.
@pytest.mark.parametrize("dtype", [f32, bf16, f16, int8, e4m3, e5m2])
@pytest.mark.parametrize("geometry", [(1500, 2048, 768, 1, 8), (40, 2048, 512, 4, 10), (9, 100, 33, 4, 3)])
def test_it_is_two_kernels_for_cuda(dtype, geometry):
    """And nothing of the bank's size is gathered, converted or copied for them."""
    args = shapes(*geometry, dtype)
    assert custom_calls(pp.expert_ffn, *args) == [CUSTOM_CALL] * 2
    sizes = {leaf.size for leaf in args[1].values()}
    for equation in equations(jax.make_jaxpr(functools.partial(pp.expert_ffn, interpret=False))(*args).jaxpr):
        if any(var.aval.size in sizes for var in equation.outvars):
            assert equation.primitive.name in ("reshape", "jit", "pjit"), equation


def equations(jaxpr):
    """Of a jaxpr and the functions that it calls, but not within kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name in ("jit", "pjit"):
            yield from equations(equation.params["jaxpr"].jaxpr)


def pointers(dtype, rows):
    """Elements and offsets of the pointers to weights in the kernels' Triton IR, of a fused bank."""
    kernels = triton_kernels(pp.expert_ffn, *shapes(rows, 2048, 768, 4, 8, dtype, fused=True))
    return [set(re.findall(r"addptr .*x!tt.ptr<(\w+)>>, tensor<\d+x\d+x(i\d\d)>", k.ttir)) for k in kernels]


def test_offsets_in_banks_past_two_and_four_gibibytes():
    """Of 32 bits up to 2**32 bytes, which is past 2**31 1-byte weights: those go in pairs."""
    # Two thirds of a row are gate and up: the larger leaf passes the limits first.
    up, down = pointers(int8, 682)
    assert ("i8", "i32") in up and ("i8", "i32") in down
    up, down = pointers(int8, 684)
    assert ("i16", "i32") in up and "i8" not in dict(up) and ("i8", "i32") in down
    up, down = pointers(int8, 1367)
    assert ("i8", "i64") in up and ("i16", "i32") in down and "i8" not in dict(down)
    up, down = pointers(bf16, 684)
    assert ("bf16", "i64") in up and ("bf16", "i32") in down


def test_a_bank_that_must_go_in_pairs_and_cannot():
    args = shapes(2**31 // (2048 * 333) + 1, 2048, 333, 1, 8, int8)
    with pytest.raises(ValueError, match=r"even number of columns.*\[3149, 2048, 333\]"):
        jax.eval_shape(lambda *args: pp.expert_ffn(*args, interpret=True), *args)


GOOD = shapes(4, 16, 8, 2, 3, bf16)


def changed(index, value):
    args = list(GOOD)
    args[index] = value
    return args


def with_leaf(name, *size, dtype=bf16):
    return changed(1, GOOD[1] | {name: jax.ShapeDtypeStruct(size, dtype)})


def turned(*names):
    """The bank with some matrices transposed."""
    shapes = {name: GOOD[1][name].shape for name in names}
    return GOOD[1] | {name: jax.ShapeDtypeStruct((r, b, a), bf16) for name, (r, a, b) in shapes.items()}


def without(*names):
    return changed(1, {name: leaf for name, leaf in GOOD[1].items() if name not in names})


def array(dtype, *size):
    return jax.ShapeDtypeStruct(size, dtype)


@pytest.mark.parametrize(
    "args, error, message",
    [
        (changed(0, array(f32, 2)), ValueError, r"x must be \[T, d\].*\[2\]"),
        (changed(0, array(f32, 2, 0)), ValueError, r"x must be .*d >= 1"),
        (changed(0, array(jnp.int32, 2, 16)), TypeError, "x must be of dtype .*float16; got int32"),
        (changed(0, [1.0]), TypeError, "x must be an array, got list"),
        (changed(0, array(f32, 2, 17)), ValueError, 'x has d = 17, but .* made for d = 16'),
        (changed(1, turned("gate", "up", "down")), ValueError, "made for d = 8. .*swapaxes"),
        (changed(1, turned("gate", "up")), ValueError, r'bank\["gate"\] must be \[4, 16, 8\].*swapaxes'),
        (changed(1, [1]), TypeError, "bank must be a mapping.*got list"),
        (without("up"), ValueError, r"\['up'\] missing"),
        (without("gate", "down"), ValueError, r"\['gate', 'down'\] missing"),
        (with_leaf("bias", 4, 8), ValueError, r"bank has \['bias'\]"),
        (with_leaf("gate_up", 4, 16, 16), ValueError, r"bank has \['gate', 'up'\]"),
        (with_leaf("down", 4, 16, 8), ValueError, r'bank\["gate"\] must be \[4, 16, 16\].*swapaxes'),
        (with_leaf("down", 5, 8, 16), ValueError, r'bank\["gate"\] must be \[5, 16, 8\]'),
        (with_leaf("up", 4, 16), ValueError, r'bank\["up"\] must be \[rows, d, columns\]'),
        (with_leaf("up", 4, 16, 8, dtype=jnp.int32), TypeError, r'bank\["up"\] must be of dtype .*int8'),
        (with_leaf("up_scale", 4, 16), ValueError, r'"up_scale".*\[4\], \[4, 1\] or \[4, 8\]; got \[4, 16\]'),
        (with_leaf("up_scale", 4, dtype=f16), TypeError, "up_scale.* must be of dtype float32, bfloat16"),
        (changed(2, array(f32, 6)), TypeError, "routes must be an array of integers, got float32"),
        (changed(2, [1, 2]), TypeError, "routes must be an array of integers, got list"),
        (changed(2, array(jnp.int32, 5)), ValueError, r"n >= T \* k = 6, or .*\[2, 3\].*; got \[5\]"),
        (changed(2, array(jnp.int32, 3, 2)), ValueError, r"got \[3, 2\]"),
        (changed(3, array(f32, 6)), ValueError, r"weights must be \[T, k\] with T = 2"),
        (changed(3, array(f32, 2, 0)), ValueError, r"k >= 1, got \[2, 0\]"),
        (changed(3, array(jnp.int32, 2, 3)), TypeError, "weights must be of dtype"),
        (changed(3, array(f32, 2, 513)), ValueError, r"at most T \* k = 1024 lanes, got 2 \* 513 = 1026"),
    ],
)
def test_bad_arguments_are_refused(args, error, message):
    # Only arrays, of which no more than the shapes are needed, can be arguments of what is traced.
    traced = {i: arg for i, arg in enumerate(args) if not isinstance(arg, list)}
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda traced: pp.expert_ffn(*(traced.get(i, args[i]) for i in range(4))), traced)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"activation": "swish"}, ValueError, "activation must be one of silu, gelu, relu or a function"),
        ({"activation": 3}, TypeError, "activation must be a name or a function, got int"),
        ({"activation": jnp.sum}, ValueError, r"activation must be an elementwise function, .* it made \[\]"),
        ({"interpret": "no"}, TypeError, "interpret must be None, True or False, got 'no'"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda *args: pp.expert_ffn(*args, **options), *GOOD)


def test_the_name_is_the_function():
    assert exported is pp.expert_ffn and callable(exported)


SMALL, LARGE = 99 * 1024, 163 * 1024  # Shared memory of a block, of compute capability 8.6 and of 8.0.


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs the package triton")
@pytest.mark.parametrize("large, limit, sm", [(False, SMALL, 120), (True, LARGE, 90)])
@pytest.mark.parametrize("x_dtype", [bf16, f32])
def test_one_token_fits_in_the_shared_memory(large, limit, sm, x_dtype, tmp_path, monkeypatch):
    """Of any GPU, unless it is known to have more."""
    module = sys.modules["pallas_pool.expert_ffn"]
    monkeypatch.setattr(module, "has_large_shared_memory", lambda x: large)
    jax.clear_caches()  # Of what was traced for another.
    shapes = {"gate": (2048, 768), "up": (2048, 768), "down": (768, 2048)}
    bank = {name: jax.ShapeDtypeStruct((8, *shape), bf16) for name, shape in shapes.items()}
    x, routes = jax.ShapeDtypeStruct((1, 2048), x_dtype), jax.ShapeDtypeStruct((1, 8), jnp.int32)
    function = functools.partial(pp.expert_ffn, interpret=False)
    kernels = triton_kernels(function, x, bank, routes, jax.ShapeDtypeStruct((1, 8), f32))
    assert len(kernels) == 2
    for kernel in kernels:
        used = write(kernel, sm, tmp_path, kernel.name)["shared_bytes"]
        assert used <= limit
        if kernel.name == "expert_ffn_up":  # The limit of the small is what sets them apart.
            assert (used > SMALL) == large


@pytest.mark.parametrize("function", [pp.expert_ffn, pp.grouped_ffn])
def test_weights_that_the_gpu_does_not_know(function, monkeypatch):
    """Where it is not refused the compiler ends the process."""
    shapes = {"gate": (32, 16), "up": (32, 16), "down": (16, 32)}
    bank = {name: jax.ShapeDtypeStruct((4, *shape), e4m3) for name, shape in shapes.items()}
    x, weights = jax.ShapeDtypeStruct((3, 32), bf16), jax.ShapeDtypeStruct((3, 2), f32)
    arguments = x, bank, jax.ShapeDtypeStruct((3, 2), jnp.int32), weights

    def lower():
        jax.clear_caches()
        lower_for_cuda(functools.partial(function, interpret=False), *arguments)

    module = sys.modules["pallas_pool.expert_ffn"]
    monkeypatch.setattr(module, "compute_capability", lambda x: (8, 0))
    with pytest.raises(TypeError, match=r'bank\["\w+"\] is of float8_e4m3fn.* 8.9 or more; this one has 8.0'):
        lower()
    for known in ((8, 9), (12, 0), None):
        monkeypatch.setattr(module, "compute_capability", lambda x, known=known: known)
        lower()


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("tokens, x_dtype, dtype", [(1, bf16, bf16), (5, f32, f32), (5, bf16, int8)])
def test_every_tiling_compiled(tiling, tokens, x_dtype, dtype):
    scale = "channel" if dtype == int8 else None
    check(
        np.random.default_rng(14),
        tokens,
        3,
        64,
        40,
        x_dtype,
        dtype=dtype,
        scale=scale,
        tiling=TILINGS[tiling],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, rows", [(int8, 2731), (int8, 1400), (bf16, 1400)])
def test_the_last_row_of_a_large_bank(dtype, rows):
    """Past 2**31 and 2**32 weights, on the device: a row there is the row that one gets alone."""
    rng = np.random.default_rng(15)
    small = make_bank(rng, 2, 2048, 768, dtype, fused=True)
    small = {name: leaf if dtype == bf16 else (leaf // 64) for name, leaf in small.items()}
    bank = {name: jnp.zeros((rows, *leaf.shape[1:]), dtype).at[-2:].set(leaf) for name, leaf in small.items()}
    for tokens in (1, 4):
        x, _, weights = make_lanes(rng, tokens, 2, 2048, 2, bf16)
        routes = jnp.asarray(rng.integers(0, 2, (tokens, 2)), jnp.int32)
        got = pp.expert_ffn(x, bank, routes + rows - 2, weights)
        want = pp.expert_ffn(x, small, routes, weights)
        assert np.any(np.asarray(want, np.float32))
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
