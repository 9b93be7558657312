"""`expert_ffn`: the gated FFN of routed experts, straight from the rows of a bank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.config import INT32_MAX, MAX_WIDTH, as_device_integers, saturate_int32
from pallas_pool.devices import compute_capability, has_large_shared_memory
from pallas_pool.kernels import ffn
from pallas_pool.kernels.ffn import Tile, Tiling
from pallas_pool.state import vary_alike

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}
X_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
STORED_DTYPES = (*X_DTYPES, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
SCALE_DTYPES = (jnp.float32, jnp.bfloat16)
ROUTER_DTYPES = (*X_DTYPES, jnp.float64)
E4M3_CAPABILITY = (8, 9)  # From which on a GPU knows float8_e4m3fn.
# More terms than these are no longer worth writing out, to be fused into what uses the sum.
WRITTEN_OUT = 32


def expert_ffn(
    x: Any,
    bank: Mapping[str, Any],
    routes: Any,
    weights: Any,
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    interpret: bool | None = None,
) -> jax.Array:
    """The gated FFN of each token's experts, read where they are in the bank, and their weighted sum.

    `y[t] = sum_j weights[t, j] * ((act(x[t] @ gate[r]) * (x[t] @ up[r])) @ down[r])` with the bank row
    `r = routes[t * k + j]`. A row that several lanes share is read once, and nothing is gathered into a
    temporary. Sums and the hidden vectors are float32. The same arguments give the same bits.

    Pure, and usable under `jit`, in `lax.scan` and under `shard_map`.

    Args:
      x: [T, d] tokens; float32, bfloat16 or float16.
      bank: a mapping with "gate" [rows, d, f] and "up" [rows, d, f], or "gate_up" [rows, d, 2 * f] with
        gate first, and "down" [rows, f, d]; float32, bfloat16, float16, int8, float8_e4m3fn (on GPUs of
        compute capability 8.9 and more) or float8_e5m2, each its own. Each may have a scale, as
        "gate_scale": [rows] or [rows, 1], one an expert, or [rows, columns], one an output channel; float32
        or bfloat16. A weight is stored * scale.
      routes: integers [n] with n >= T * k, or [T, k]: the bank row of lane t * k + j is that of token t's
        j-th expert, as in `Plan.routes`. -1 and whatever else is no row contributes nothing. Lanes past
        T * k are not looked at. T * k <= 1024.
      weights: [T, k] router weights; float16, bfloat16, float32 or float64. Not looked at where the
        lane has no row.
      activation: "silu", "gelu" (the tanh approximation, as in `jax.nn.gelu`), "relu", or an elementwise
        function of jnp, which is traced into the kernel with a float32 array. Compiled for a GPU, it may
        use what Pallas knows there: exp, tanh, maximum, where and such, but no erf, which the gelu that
        is not approximate needs.
      interpret: None compiles the kernels for a GPU and interprets them on any other device; True
        always interprets, False always compiles.

    Returns:
      y [T, d] of x's dtype. Exactly 0 for a token none of whose lanes has a row.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, its value and what is allowed.
    """
    return tiled_ffn(x, bank, routes, weights, activation=activation, interpret=interpret)


def tiled_ffn(
    x: Any,
    bank: Mapping[str, Any],
    routes: Any,
    weights: Any,
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    interpret: bool | None = None,
    tiling: Tiling | None = None,
    paired: bool | None = None,
) -> jax.Array:
    """`expert_ffn` with a tiling other than `default_tiling`'s, and 1-byte weights read in pairs or not:
    for tests and tuning."""
    activation = check_options(activation, interpret)
    x = check_array("x", x, X_DTYPES)
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"x must be [T, d] with d >= 1, got {list(x.shape)}")
    tokens, width = x.shape
    weights = check_array("weights", weights, ROUTER_DTYPES)
    if weights.ndim != 2 or weights.shape[0] != tokens or not weights.shape[1]:
        raise ValueError(
            f"weights must be [T, k] with T = {tokens} as in x and k >= 1, got {list(weights.shape)}"
        )
    lanes = weights.size
    if lanes > MAX_WIDTH:
        raise ValueError(
            f"weights must have at most T * k = {MAX_WIDTH} lanes, got "
            f"{tokens} * {weights.shape[1]} = {lanes}"
        )
    routes = check_routes(routes, *weights.shape)
    leaves, scales = check_bank(bank, width)
    if not tokens:
        return jnp.zeros_like(x)
    if weights.dtype == jnp.float64:
        weights = weights.astype(jnp.float32)
    options = Options(weights.shape[1], activation, tiling, paired)
    return _ffn(options, interpret, x, leaves, scales, routes, weights.reshape(-1))


def check_options(
    activation: str | Callable[[jax.Array], jax.Array], interpret: bool | None
) -> Callable[[jax.Array], jax.Array]:
    """The activation as a function."""
    if interpret not in (None, True, False):
        raise TypeError(f"interpret must be None, True or False, got {interpret!r}")
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation must be one of {allowed} or a function, got {activation!r}")
        return ACTIVATIONS[activation]
    if not callable(activation):
        raise TypeError(f"activation must be a name or a function, got {type(activation).__name__}")
    return activation


def check_array(name: str, value: Any, dtypes: tuple[Any, ...]) -> jax.Array:
    """`value` as a JAX array of one of the dtypes."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    if value.dtype not in dtypes:
        allowed = ", ".join(jnp.dtype(each).name for each in dtypes)
        raise TypeError(f"{name} must be of dtype {allowed}; got {value.dtype}")
    return jnp.asarray(value)


def check_routes(routes: Any, tokens: int, top_k: int) -> jax.Array:
    """The routes flat and int32, what does not fit as no row."""
    lanes = tokens * top_k
    if not hasattr(routes, "dtype") or not jnp.issubdtype(routes.dtype, jnp.integer):
        got = getattr(routes, "dtype", type(routes).__name__)
        raise TypeError(f"routes must be an array of integers, got {got}")
    routes = as_device_integers(routes)
    if (routes.ndim == 1 and routes.size >= lanes) or routes.shape == (tokens, top_k):
        return saturate_int32(routes.reshape(-1))
    raise ValueError(
        f"routes must be [n] with n >= T * k = {lanes}, or [T, k] = [{tokens}, {top_k}] as in weights; "
        f"got {list(routes.shape)}"
    )


def _check_matrices(shapes: dict[str, tuple[int, ...]], width: int) -> None:
    """Raises where the matrices do not fit each other, or `x`."""

    def misfits(d: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """What matrices should have been, with rows and f as in "down"."""
        rows, f, _ = shapes["down"]
        wanted = {"gate": (rows, d, f), "up": (rows, d, f), "gate_up": (rows, d, 2 * f), "down": (rows, f, d)}
        return {name: wanted[name] for name, shape in shapes.items() if shape != wanted[name]}

    wrong = misfits(width, shapes)
    if not wrong:
        return
    turned = {name: (shape[0], shape[2], shape[1]) for name, shape in shapes.items()}
    others = ({"down": turned["down"]}, {n: s for n, s in turned.items() if n != "down"}, turned)
    made_for = shapes["down"][2]
    if not misfits(made_for, shapes):
        text = f'x has d = {width}, but bank["down"] is {list(shapes["down"])}: made for d = {made_for}'
    else:
        name, shape = next(iter(wrong.items()))
        text = (
            f'bank["{name}"] must be {list(shape)}: rows and f as in bank["down"] {list(shapes["down"])} and '
            f"d = {width} as in x; got {list(shapes[name])}"
        )
    if any(not misfits(width, shapes | other) for other in others):
        text += (
            '. Matrices seem to be transposed, as PyTorch keeps them: "gate" and "up" are [d, f], "down" is '
            "[f, d]; give w.swapaxes(-1, -2)"
        )
    raise ValueError(text)


def check_bank(bank: Any, width: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The matrices and the scales [rows, 1 or columns] of a bank, by name."""
    if not isinstance(bank, Mapping):
        raise TypeError(f'bank must be a mapping with "gate", "up" and "down", got {type(bank).__name__}')
    names = ("gate_up", "down") if "gate_up" in bank else ("gate", "up", "down")
    missing = [name for name in names if name not in bank]
    if missing:
        raise ValueError(
            f'bank must have "gate" and "up", or "gate_up", and "down"; {missing} missing in {sorted(bank)}'
        )
    unknown = sorted(set(bank) - set(names) - {f"{name}_scale" for name in names})
    if unknown:
        raise ValueError(
            f"bank has {unknown}, which this FFN would leave out; with {list(names)} only a scale of each, "
            'as "down_scale", is known'
        )
    leaves = {name: check_array(f'bank["{name}"]', bank[name], STORED_DTYPES) for name in names}
    for name, leaf in leaves.items():
        if leaf.ndim != 3 or not leaf.size:
            shape = "[rows, f, d]" if name == "down" else "[rows, d, columns]"
            raise ValueError(f'bank["{name}"] must be {shape}, none of them 0; got {list(leaf.shape)}')
        if leaf.shape[1] * leaf.shape[2] > INT32_MAX:
            raise ValueError(
                f'bank["{name}"] must have rows of less than 2**31 weights, got {list(leaf.shape)}'
            )
    _check_matrices({name: leaf.shape for name, leaf in leaves.items()}, width)
    rows = len(leaves["down"])
    scales = {}
    for name, leaf in leaves.items():
        key = f"{name}_scale"
        if key in bank:
            scale, columns = check_array(f'bank["{key}"]', bank[key], SCALE_DTYPES), leaf.shape[2]
            if scale.shape not in ((rows,), (rows, 1), (rows, columns)):
                raise ValueError(
                    f'bank["{key}"] must be [{rows}], [{rows}, 1] or [{rows}, {columns}]; '
                    f"got {list(scale.shape)}"
                )
            scales[name] = scale.reshape(rows, -1)
    return leaves, scales


def check_gpu(x: jax.Array, leaves: Mapping[str, jax.Array]) -> None:
    """Raises where the GPU, if it is known, has no instructions for the weights: its compiler would end
    the process."""
    capability = compute_capability(x)
    for name, leaf in leaves.items():
        if leaf.dtype == jnp.float8_e4m3fn and capability is not None and capability < E4M3_CAPABILITY:
            have, need = (".".join(map(str, each)) for each in (capability, E4M3_CAPABILITY))
            raise TypeError(
                f'bank["{name}"] is of float8_e4m3fn, for which a GPU must have compute capability {need} or '
                f"more; this one has {have}: store float8_e5m2, int8 or bfloat16"
            )


class Options(NamedTuple):
    """The static arguments besides `interpret`."""

    top_k: int
    activation: Callable[[jax.Array], jax.Array]
    tiling: Tiling | None
    paired: bool | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ffn(options, interpret, x, leaves, scales, routes, weights):
    operands = x, leaves, scales, routes, weights
    call = functools.partial(_call, options)
    if interpret is not None:
        return call(interpret, *operands)
    return lax.platform_dependent(
        *operands, cuda=functools.partial(call, False), default=functools.partial(call, True)
    )


def read_in_pairs(leaf: jax.Array) -> bool:
    """Whether Pallas would compute wrong addresses in a leaf: it has offsets of 32 bits, signed, up to
    2**32 bytes, and 1-byte weights are past 2**31 of them then. As pairs they are not."""
    return leaf.dtype.itemsize == 1 and 2**31 < leaf.size <= 2**32


def flat_leaf(name: str, leaf: jax.Array, paired: bool) -> jax.Array:
    """A leaf as [rows, size], for the compiler the same memory."""
    flat = leaf.reshape(leaf.shape[0], -1)
    if not paired:
        return flat
    if leaf.shape[2] % (4 if name == "gate_up" else 2):
        raise ValueError(
            f'bank["{name}"] of more than 2**31 and up to 2**32 1-byte weights must have an even number of '
            f"columns, of gate and of up; got {list(leaf.shape)}"
        )
    return lax.bitcast_convert_type(flat.reshape(leaf.shape[0], -1, 2), jnp.int16)


def _call(options, interpret, x, leaves, scales, routes, weights):
    x, leaves, scales, routes, weights = vary_alike((x, leaves, scales, routes, weights))
    tokens, width = x.shape
    rows, hidden_width, _ = leaves["down"].shape
    up_dtype = leaves["gate_up" if "gate_up" in leaves else "gate"].dtype
    if not interpret:
        check_gpu(x, leaves)
    tiling = options.tiling or default_tiling(
        *(tokens, options.top_k, width, hidden_width),
        *(up_dtype, leaves["down"].dtype),
        interpret=interpret,
        large_memory=has_large_shared_memory(x),
    )
    static = functools.partial(
        *(ffn.Static, tokens, options.top_k, rows), activation=options.activation, interpret=interpret
    )
    lanes = tokens * options.top_k
    paired = {
        name: leaf.dtype.itemsize == 1 if options.paired else read_in_pairs(leaf)
        for name, leaf in leaves.items()
    }
    flat = {name: flat_leaf(name, leaf, paired[name]) for name, leaf in leaves.items()}
    varying = jax.typeof(x).manual_axis_type

    def out(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying)

    def matrix(name: str, leaf, scale, first: int = 0, columns: int | None = None) -> ffn.Matrix:
        _, k, stride = leaves[name].shape
        return ffn.Matrix(leaf, scale, leaves[name].dtype, k, columns or stride, stride, first, paired[name])

    def run(body, name, tile, grid, out_shape, *operands):
        body.__name__ = name
        return pl.pallas_call(
            body,
            out_shape=out_shape,
            grid=grid,
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name=name,
        )(*operands)

    def up_body(x_ref, routes_ref, leaf_refs, scale_refs, hidden_ref):
        if "gate_up" in leaf_refs:
            leaf, scale = leaf_refs["gate_up"], scale_refs.get("gate_up")
            gate = matrix("gate_up", leaf, scale, 0, hidden_width)
            up = matrix("gate_up", leaf, scale, hidden_width, hidden_width)
        else:
            gate, up = (matrix(name, leaf_refs[name], scale_refs.get(name)) for name in ("gate", "up"))
        ffn.up_kernel(static(members=tiling.up_members), tiling.up, x_ref, routes_ref, gate, up, hidden_ref)

    def down_body(hidden_ref, routes_ref, weights_ref, leaf_ref, scale_ref, y_ref):
        down = matrix("down", leaf_ref, scale_ref)
        members = static(members=tiling.down_members)
        ffn.down_kernel(members, tiling.down, hidden_ref, routes_ref, weights_ref, down, y_ref)

    down, down_scale = flat.pop("down"), scales.get("down")
    up_scales = {name: scale for name, scale in scales.items() if name != "down"}
    hidden = run(
        up_body,
        "expert_ffn_up",
        tiling.up,
        (pl.cdiv(hidden_width, tiling.up.n), lanes),
        out(lanes, hidden_width),
        *(x, routes, flat, up_scales),
    )
    y = run(
        down_body,
        "expert_ffn_down",
        tiling.down,
        (pl.cdiv(width, tiling.down.n), lanes),
        out(lanes, width),
        *(hidden, routes, weights, down, down_scale),
    )
    y = y.reshape(tokens, options.top_k, width)
    if options.top_k > WRITTEN_OUT:
        return jnp.sum(y, axis=1).astype(x.dtype)
    return functools.reduce(jnp.add, [y[:, j] for j in range(options.top_k)]).astype(x.dtype)


def default_tiling(
    tokens: int,
    top_k: int,
    width: int,
    hidden: int,
    up_dtype: Any,
    down_dtype: Any,
    *,
    interpret: bool = False,
    large_memory: bool = False,
) -> Tiling:
    """The tiling for a shape.

    Args:
      tokens, top_k: T and k.
      width, hidden: d and f.
      up_dtype, down_dtype: of the stored weights.
      interpret: few programs and few turns, as the interpreter's cost is that of their number.
      large_memory: whether a block can have 160 KB of shared memory; else it takes less than 99.
    """
    # What bfloat16 does not hold is multiplied in float32, where there is no matrix unit to gain from.
    narrow = all(ffn.part_count(dtype) == 1 for dtype in (up_dtype, down_dtype))
    if interpret:
        members = down_members = 1 if tokens == 1 else ffn.DOT_MEMBERS
        up = down = Tile(k=1024, n=1024, unroll=1, warps=4)
    elif narrow:
        # A matrix unit that is nearly empty costs nothing, and its loads are pipelined without registers.
        members = down_members = ffn.DOT_MEMBERS
        up, down = Tile(64, 64, 1, 4, stages=4), Tile(32, 128, 1, 4, stages=4)
        if tokens == 1:
            down_members = 1
            # Six loads a turn are faster than four unless the last turn is not full (docs/bank-tuning.md).
            unroll = 4 if hidden % (6 * 32) else 6
            up = Tile(128, 64, 1, 4, stages=4) if large_memory else Tile(64, 64, 1, 4, stages=5)
            down = Tile(32, 64, unroll, 8, stages=2, fence=True)
    else:
        members = down_members = 1 if tokens == 1 else 4
        up, down = Tile(32, 64, 2, 8, stages=2, fence=True), Tile(32, 64, 2, 8, stages=2, fence=True)
        # 16 bytes a thread and load.
        up, down = (
            tile._replace(k=tile.k * 2 // dtype.itemsize)
            for tile, dtype in ((up, up_dtype), (down, down_dtype))
        )

    def fit(tile: Tile, members: int, k: int, n: int) -> Tile:
        """No larger than the matrix."""
        least = ffn.DOT_MEMBERS if members >= ffn.DOT_MEMBERS else 2
        k, n = (max(least, ffn.next_power_of_two(size)) for size in (k, n))
        return tile._replace(k=min(tile.k, k), n=min(tile.n, n))

    up, down = fit(up, members, width, hidden), fit(down, down_members, hidden, width)
    return Tiling(up, down, members, down_members)
