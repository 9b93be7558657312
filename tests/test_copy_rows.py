"""`copy_rows`: the listed rows of every leaf, all bits of them, and not a byte beside them."""

import functools
import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

import pallas_pool as pp
from bench import artifacts
from bench.artifacts import CUSTOM_CALL
from tests.support import abstract_gpus, host_shapes, lower_for_cuda

# The package has the function under the module's name.
module = importlib.import_module("pallas_pool.copy_rows")

L, E, N = 3, 6, 9
# Two tiles and a piece of each, of a kernel that is launched like this.
SMALL = module.TUNING._replace(programs=4, tile_words=8)
# Row shapes: whole vectors, whole words only, half-words, odd bytes; one tile and many; a scalar; nothing.
ROWS = {
    "weights": ("bfloat16", (8, 6)),
    "odd words": ("float32", (5, 7)),
    "half-words": ("bfloat16", (5, 7)),
    "float16": ("float16", (3, 2)),
    "bytes": ("int8", (33,)),
    "unsigned": ("uint8", (34,)),
    "e4m3": ("float8_e4m3fn", (36,)),
    "e5m2": ("float8_e5m2", (5,)),
    "bool": ("bool", (7,)),
    "int16": ("int16", (3,)),
    "uint32": ("uint32", (2, 1, 2)),
    "nibbles": ("int4", (3, 8)),
    "scale": ("float32", ()),
    "one byte": ("float8_e4m3fn", (1,)),
    "nothing": ("float32", (0,)),
}
SRC = np.array([3, 0, -1, E, 5, 1, 2, 2**31 - 1, -(2**31)], np.int32)
DST = np.array([8, 2, 1, 1, N, -1, 0, 3, 4], np.int32)


def random_bits(rng, shape, dtype):
    """An array of random bits, NaNs of all kinds among them."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_ or dtype == jnp.int4:
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def make(rows=None, seed=0):
    """Random experts and a random bank, on the host."""
    rng = np.random.default_rng(seed)
    rows = ROWS if rows is None else rows
    experts = {name: random_bits(rng, (L, E, *shape), dtype) for name, (dtype, shape) in rows.items()}
    bank = {name: random_bits(rng, (N, *shape), dtype) for name, (dtype, shape) in rows.items()}
    return experts, bank


def expected(bank, experts, layer, src, dst, count):
    """What one copy after the other makes of the bank."""
    bank = jax.tree.map(np.copy, bank)
    for i in range(min(count, len(src))):
        if 0 <= layer < L and 0 <= src[i] < E and 0 <= dst[i] < N:
            for name in bank:
                bank[name][dst[i]] = experts[name][layer, src[i]]
    return bank


def assert_same_bits(got, want):
    assert set(got) == set(want)
    for name in want:
        a, b = (np.ascontiguousarray(x[name]).reshape(-1) for x in (got, want))
        assert a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)), name


@functools.cache
def jitted(tuning):
    return jax.jit(functools.partial(module.tuned, tuning))


def copies(src=SRC, dst=DST, count=None):
    return pp.Copies(jnp.asarray(src), jnp.asarray(dst), jnp.int32(len(src) if count is None else count))


@pytest.mark.parametrize("tuning", [module.TUNING, SMALL])
@pytest.mark.parametrize("layer, count", [(0, 0), (1, 1), (2, 5), (1, 9), (0, 100), (2, -3), (L, 9), (-1, 9)])
def test_every_dtype_and_size_with_bad_entries(tuning, layer, count):
    experts, bank = make()
    got = jitted(tuning)(bank, pp.pin(experts), jnp.int32(layer), copies(count=count))
    assert_same_bits(got, expected(bank, experts, layer, SRC, DST, count))


def test_the_cases_above_are_of_use():
    """Rows do move there, and so do all that an out-of-range entry stands among."""
    experts, bank = make()
    moved = expected(bank, experts, 1, SRC, DST, 9)
    changed = [r for r in range(N) if not np.array_equal(moved["bytes"][r], bank["bytes"][r])]
    assert changed == [0, 2, 8]


@pytest.mark.parametrize("programs", [1, 2, 5, 64])
def test_any_number_of_programs_shares_the_tiles(programs):
    experts, bank = make({"a": ("int8", (52,)), "b": ("float32", (70,)), "c": ("float32", ())})
    tuning = module.TUNING._replace(programs=programs, tile_words=4)
    src, dst = [5, 0, 3, 1], [0, 4, 8, 7]
    got = jitted(tuning)(bank, pp.pin(experts), jnp.int32(2), copies(src, dst))
    assert_same_bits(got, expected(bank, experts, 2, src, dst, 4))


def test_layers_in_a_sequence():
    experts, bank = make()
    layers = [jax.tree.map(lambda x, i=i: x[i], experts) for i in range(L)]
    for form in (pp.pin(layers), tuple(pp.pin(layers))):
        got = pp.copy_rows(bank, form, 2, copies())
        assert_same_bits(got, expected(bank, experts, 2, SRC, DST, 9))


def test_any_plan_with_the_three_fields():
    experts, bank = make({"a": ("float32", (3,)), "b": ("int8", (2,))})
    plan = types.SimpleNamespace(copy_src=[5, 0, 3], copy_dst=[1, 2, 3], copy_count=2)
    got = pp.copy_rows(bank, pp.pin(experts), 1, plan)
    assert_same_bits(got, expected(bank, experts, 1, [5, 0], [1, 2], 2))
    with pytest.raises(TypeError, match="plan must have copy_src, copy_dst, copy_count, got dict"):
        pp.copy_rows(bank, pp.pin(experts), 0, vars(plan))


def test_lists_of_other_integers_and_of_nothing():
    experts, bank = make({"a": ("float32", (3,))})
    pinned = pp.pin(experts)
    with jax.enable_x64(True):
        big = np.array([2**32 + 1, 4], np.int64)
        plan = pp.Copies(jnp.asarray(big), jnp.asarray([0, 7], jnp.uint8), jnp.asarray(2, jnp.int64))
        got = pp.copy_rows(bank, pinned, np.int64(1), plan)
    assert_same_bits(got, expected(bank, experts, 1, [-1, 4], [0, 7], 2))
    # With 64-bit types off JAX would wrap them round, to an expert, a row and a count that there are.
    dst = np.array([0, 7])
    for plan in (pp.Copies(big, dst, 2), pp.Copies(np.array([-1, 4]), dst, np.int64(2**32))):
        got = pp.copy_rows(bank, pinned, 1, plan)
        assert_same_bits(got, expected(bank, experts, 1, [-1, 4], [0, 7], 2))
    none = pp.Copies(np.zeros(0, np.int32), np.zeros(0, np.int32), 0)
    assert_same_bits(pp.copy_rows(bank, pinned, 0, none), bank)


def test_doubles():
    with jax.enable_x64(True):
        experts, bank = make({"a": ("float64", (3,)), "b": ("int64", ()), "c": ("uint64", (2, 2))})
        got = pp.copy_rows(bank, pp.pin(experts), 1, copies())
        assert_same_bits(got, expected(bank, experts, 1, SRC, DST, 9))


def test_arrays_in_pinned_memory_of_a_cpu():
    """Where JAX knows them to be on the host, and lets them meet nothing else."""
    experts, bank = make({"a": ("bfloat16", (3, 5)), "b": ("float32", ())})
    cpu = jax.devices("cpu")[0]
    host = jax.device_put(experts, jax.sharding.SingleDeviceSharding(cpu, memory_kind="pinned_host"))
    assert module.in_host_memory(host["a"])
    with jax.default_device(cpu):
        got = jax.jit(pp.copy_rows, static_argnums=2)(jax.device_put(bank, cpu), host, 1, copies())
    assert got["a"].sharding.memory_kind == "device"
    assert_same_bits(got, expected(bank, experts, 1, SRC, DST, 9))


def test_in_a_scan_over_layers():
    experts, bank = make({"a": ("float32", (3,)), "b": ("int8", (5,))})
    rng = np.random.default_rng(3)
    src = np.stack([rng.permutation(E)[:4] for _ in range(L)]).astype(np.int32)
    dst = np.stack([rng.permutation(N)[:4] for _ in range(L)]).astype(np.int32)
    counts = np.array([4, 0, 2], np.int32)

    @jax.jit
    def run(bank, experts):
        def body(bank, x):
            return pp.copy_rows(bank, experts, x[0], pp.Copies(*x[1:])), None

        return jax.lax.scan(body, bank, (jnp.arange(L), src, dst, counts))[0]

    want = bank
    for layer in range(L):
        want = expected(want, experts, layer, src[layer], dst[layer], counts[layer])
    assert_same_bits(run(bank, pp.pin(experts)), want)


def test_a_bank_on_each_device():
    devices = (jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu"))[:2]
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=devices)
    experts, _ = make({"a": ("bfloat16", (3,)), "b": ("float32", ())})
    bank = jax.tree.map(lambda x: np.zeros((2 * N, *x.shape[2:]), x.dtype), experts)
    src = np.array([[2, 1], [0, E], [2, 1]], np.int32)[:2]
    dst = np.array([[0, 8], [3, 2]], np.int32)
    experts_sharding, sharding = NamedSharding(mesh, P(None, "d")), NamedSharding(mesh, P("d"))

    def one(bank, experts, src, dst, count):
        return pp.copy_rows(bank, experts, 1, pp.Copies(src[0], dst[0], count[0]))

    specs = P("d"), P(None, "d"), P("d"), P("d"), P("d")
    run = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=False))
    pinned = pp.pin(experts, device=experts_sharding)
    rest = jax.device_put((src, dst, np.array([2, 2], np.int32)), sharding)
    got = jax.device_get(run(jax.device_put(bank, sharding), pinned, *rest))
    for name, x in experts.items():
        want = np.zeros_like(bank[name])
        want[0], want[8], want[N + 3] = x[1, 2], x[1, 1], x[1, E // 2]
        assert np.array_equal(got[name], want), name


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def operations(lowered):
    found = []
    lowered.compiler_ir("stablehlo").operation.walk(lambda op: (found.append(op), ir.WalkResult.ADVANCE)[1])
    return found


def test_lowered_for_cuda_a_layer_is_one_kernel_that_writes_in_place():
    experts, bank = make()
    plan = copies()

    def run(bank, experts, plan):
        for layer in range(L):
            bank = pp.copy_rows(bank, experts, layer, plan)
        return bank

    mesh = abstract_gpus()
    arguments = shapes(bank), host_shapes(experts, mesh), shapes(plan)
    lowered = lower_for_cuda(run, *arguments, mesh=mesh, donate_argnums=0)
    found = operations(lowered)
    calls = [op for op in found if op.name == "stablehlo.custom_call"]
    targets = [ir.StringAttr(op.attributes["call_target_name"]).value for op in calls]
    assert targets and set(targets) == {CUSTOM_CALL}  # Layers may share the function that has it.
    moving = sum(x.size > 0 for x in bank.values())
    for op in calls:
        assert str(op.attributes["output_operand_aliases"]).count("operand_index") == moving
    main = next(op for op in found if op.name == "func.func" and "main" in str(op.attributes["sym_name"]))
    aliased = [str(x) for x in main.attributes["arg_attrs"] if "tf.aliasing_output" in str(x)]
    assert len(aliased) == len(bank)
    # What else touches a bank or the experts only calls the same bytes by another name.
    small = {"reshape", "bitcast_convert", "custom_call", "case", "return", "constant"}
    kinds = {op.name.removeprefix("stablehlo.") for op in found if op.name.startswith("stablehlo.")}
    for op in found:
        if op.name.startswith("stablehlo.") and any(
            int(np.prod(ir.RankedTensorType(r.type).shape)) > 4 * len(SRC) for r in op.results
        ):
            assert op.name.removeprefix("stablehlo.") in small, (op.name, kinds)


def test_a_kernel_with_varying_axes_checked_lowers_for_a_gpu():
    experts, bank = make({"a": ("bfloat16", (3,)), "b": ("float32", ())})
    mesh = abstract_gpus(2, "d")
    bank = jax.tree.map(lambda x: np.concatenate([x, x]), bank)
    for spec in (P(None, "d"), P()):
        run = jax.shard_map(
            lambda bank, experts, plan: pp.copy_rows(bank, experts, 0, plan),
            mesh=mesh,
            in_specs=(P("d"), spec, P()),
            out_specs=P("d"),
        )
        arguments = shapes(bank), host_shapes(experts, mesh, spec), shapes(copies())
        assert CUSTOM_CALL in lower_for_cuda(run, *arguments, mesh=mesh).as_text()


@pytest.mark.parametrize(
    "dtype, elements, bits",
    [
        ("int8", 2**31, 32),
        ("int8", 2**32, 32),  # Offsets of the bytes themselves would pass 2**31.
        ("int8", 2**32 + 2**20, 64),
        ("bfloat16", 2**31, 32),
        ("bfloat16", 2**33, 64),
    ],
)
def test_billions_of_elements_are_addressed_rightly(dtype, elements, bits):
    """Pallas computes signed offsets, of 32 bits up to 4 GiB: words must keep those within 2**31."""
    row = 2**20
    bank = {"a": jax.ShapeDtypeStruct((elements // row, row), dtype)}
    experts = host_shapes({"a": jax.ShapeDtypeStruct((1, 4, row), dtype)}, abstract_gpus())
    run = functools.partial(pp.copy_rows, interpret=False)
    (kernel,) = artifacts.triton_kernels(lambda b, e, p: run(b, e, 0, p), bank, experts, shapes(copies()))
    tile = module.TUNING.tile_words
    offsets = re.findall(rf"tt.addptr .*tensor<{tile}x!tt.ptr<(i\d+)>>, tensor<{tile}xi(\d+)>", kernel.ttir)
    assert offsets == [("i32", "32"), ("i32", str(bits))]  # Of the experts, then of the bank.
    assert elements * jnp.dtype(dtype).itemsize // 4 <= 2**31 or bits == 64


@pytest.mark.parametrize("dtype, row", [("int8", 2**20 + 1), ("bool", 2**20)])
def test_what_cannot_be_addressed_is_refused(dtype, row):
    bank = {"a": jax.ShapeDtypeStruct((3000, row), dtype)}
    experts = host_shapes({"a": jax.ShapeDtypeStruct((1, 4, row), dtype)}, abstract_gpus())
    with pytest.raises(ValueError, match="pad them to an even number of bytes"):
        lower_for_cuda(lambda b, e, p: pp.copy_rows(b, e, 0, p), bank, experts, shapes(copies()))


BAD = [
    ({"interpret": 1.5}, TypeError, "interpret must be None, True or False, got 1.5"),
    ({"layer": L}, ValueError, rf"layer must be in \[0, {L - 1}\], got {L}"),
    ({"layer": 0.5}, TypeError, "layer must be an int, got 0.5"),
    ({"layer": jnp.zeros(1, jnp.int32)}, TypeError, r"layer must be an integer scalar, got int32\[1\]"),
    ({"bank": {"a": np.zeros((N, 4), np.float32)}}, ValueError, r"bank\['a'\] must be float32\[R\+S, 3\]"),
    ({"bank": {"a": np.zeros((N, 3), np.float16)}}, ValueError, r"got float16\[9, 3\]"),
    ({"bank": {"a": 1}}, ValueError, r"bank\['a'\] must be float32\[R\+S, 3\] to fit the experts, got int"),
    ({"bank": {"b": np.zeros((N, 3), np.float32)}}, ValueError, "bank must have the structure"),
    ({"plan": copies(SRC[:3])}, ValueError, r"vectors of one length, got \[3\] and \[9\]"),
    ({"plan": copies(SRC.astype(np.float32))}, TypeError, "copy_src must have an integer dtype, got float32"),
    ({"plan": pp.Copies(SRC, DST, SRC)}, ValueError, r"copy_count must be a scalar, got \[9\]"),
    ({"experts": {"a": 3}}, TypeError, r"experts\['a'\] must be an array \[L, E, ...\], got 3"),
    ({"experts": {}}, ValueError, "experts holds no array"),
    ({"experts": {"a": np.zeros((L, E, 3), np.complex64)}, "bank": {"a": np.zeros((N, 3), np.complex64)}},
     TypeError, "complex"),
    ({"experts": [{"a": np.zeros((E, 3), np.float32)}], "layer": jnp.int32(0)}, TypeError,
     "layer must be an int where experts is a list or tuple"),
]  # fmt: skip


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_arguments_are_refused(changes, error, message):
    experts, bank = make({"a": ("float32", (3,))})
    arguments = {"bank": bank, "experts": experts, "layer": 0, "plan": copies(), **changes}
    leaves = jax.tree.leaves(arguments["experts"])
    if leaves and all(isinstance(leaf, np.ndarray) for leaf in leaves):
        # As a GPU asks for it: else that would be the error.
        pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        arguments["experts"] = jax.device_put(arguments["experts"], pinned)
    with pytest.raises(error, match=message):
        pp.copy_rows(**arguments)


def test_leaves_of_a_bank_must_have_the_same_rows():
    experts, bank = make({"a": ("float32", (3,)), "b": ("int8", ())})
    with pytest.raises(ValueError, match=r"bank\['b'\] must be int8\[9\] to fit the experts, got int8\[8\]"):
        pp.copy_rows({**bank, "b": bank["b"][:8]}, pp.pin(experts), 0, copies())


def test_experts_that_a_gpu_would_be_sent_are_refused():
    """Under `shard_map` the platform is known without one."""
    experts, bank = make({"a": ("float32", (3,))})
    mesh = abstract_gpus(2, "d")
    run = jax.shard_map(
        lambda bank, experts, plan: pp.copy_rows(bank, experts, 0, plan),
        mesh=mesh,
        in_specs=(P(), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=r"experts\['a'\] must be in pinned host memory.*pallas_pool.pin"):
        lower_for_cuda(run, *shapes((bank, experts, copies())), mesh=mesh)


@pytest.mark.gpu
def test_experts_in_gpu_memory_are_refused():
    experts, bank = make({"a": ("float32", (3,))})
    for given in (experts, jax.device_put(experts)):
        with pytest.raises(ValueError, match=r"experts\['a'\] must be in pinned host memory"):
            pp.copy_rows(bank, given, 0, copies())
        with pytest.raises(ValueError, match=r"experts\['a'\] must be in pinned host memory"):
            jax.jit(pp.copy_rows, static_argnums=2)(bank, given, 0, copies())


@pytest.mark.gpu
def test_compiled_for_the_gpu_nothing_is_copied():
    experts, bank = make({"a": ("bfloat16", (256, 64)), "b": ("int8", (1024,))})
    run = jax.jit(pp.copy_rows, static_argnums=2, donate_argnums=0)
    compiled = run.lower(bank, pp.pin(experts), 1, copies()).compile()
    assert " copy(" not in compiled.as_text() and "copy-start" not in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < bank["b"].nbytes
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in bank.values())
