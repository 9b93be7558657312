"""`grouped_ffn`: the gated expert FFN of many lanes, straight from bank rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.config import INT32_MAX
from pallas_pool.expert_ffn import (
    ROUTER_DTYPES,
    X_DTYPES,
    check_array,
    check_bank,
    check_gpu,
    check_options,
    check_routes,
    flat_leaf,
    read_in_pairs,
)
from pallas_pool.kernels import ffn
from pallas_pool.kernels.grouped import Tiles, hidden_kernel, output_kernel
from pallas_pool.kernels.lanes import next_power_of_two
from pallas_pool.state import vary_alike


def grouped_ffn(
    x: jax.Array,
    bank: Mapping[str, Any],
    routes: jax.Array,
    weights: jax.Array,
    *,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    interpret: bool | None = None,
) -> jax.Array:
    """What `expert_ffn` computes, for any number of lanes: a row is read once for up to 64 lanes of its own.

    Lanes are sorted by row. Temporaries are of the size of the lanes, T * k * (f + d) float32, whatever
    the size of the bank. A lane's output does not depend on the row's number, nor on the other lanes, and
    a token's outputs are summed in the order of its lanes.

    Args:
      x: [T, d], as for `expert_ffn`.
      bank: as for `expert_ffn`.
      routes: integers [n] with n >= T * k, or [T, k]: the bank row of each lane; whatever is no row
        contributes nothing.
      weights: [T, k] router weights; not looked at where the lane has no row.
      activation: as for `expert_ffn`.
      interpret: None compiles the kernels for a GPU and interprets them on any other device; True always
        interprets, False always compiles.

    Returns:
      y [T, d] of x's dtype.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, its value and what is allowed.
    """
    x = check_array("x", x, X_DTYPES)
    weights = check_array("weights", weights, ROUTER_DTYPES)
    if x.ndim != 2 or weights.ndim != 2 or len(x) != len(weights) or not (x.shape[1] and weights.shape[1]):
        raise ValueError(
            "x and weights must be [T, d] and [T, k] with d >= 1 and k >= 1, got "
            f"{list(x.shape)} and {list(weights.shape)}"
        )
    tokens, top_k = weights.shape
    n = tokens * top_k
    row = check_routes(routes, tokens, top_k)[:n]
    experts = Experts.of(bank, x.shape[1], check_options(activation, interpret))
    if not n:
        return jnp.zeros_like(x)
    rows = experts.rows
    group = jnp.where((row >= 0) & (row < rows), row, INT32_MAX)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    group = group[order]
    lanes = tile_lanes(n, min(rows, n))
    start, end = make_tiles(group, rows, lanes)
    tile_row = group.at[start].get(mode="fill", fill_value=INT32_MAX)
    tiles = Tiles(start, end, jnp.where(tile_row < rows, tile_row, -1))
    out = experts.run(x, order, tiles, zeros_for(x, start[0], n), top_k, lanes, interpret)
    return combine(out, (row >= 0) & (row < rows), weights, x.dtype)


def zeros_for(x: jax.Array, count: jax.Array, lanes: int) -> jax.Array:
    """Zeros [lanes, d] float32 that cannot be made before `x` [T, d] and `count`, an int32 scalar >= 0.

    Plain ones depend on nothing: XLA would make those of all layers of a program at its start, and keep
    memory for each.
    """
    zero = jnp.minimum(count, 0) * (x[0, 0] > 0).astype(jnp.int32)
    return jnp.full((lanes, x.shape[1]), zero.astype(jnp.float32))


def make_tiles(group: jax.Array, most: int, lanes: int) -> tuple[jax.Array, jax.Array]:
    """Cuts sorted lanes into tiles of at most `lanes` lanes of one group.

    Args:
      group: int32 [n], ascending; INT32_MAX: lanes of no tile.
      most: at most so many groups there are.
      lanes: of a full tile.

    Returns:
      int32 [n // lanes + min(most, n)] each: the place of a tile's first lane and one past its last,
      in the order of the groups. Tiles that there are not begin and end at n.
    """
    n = group.size
    place = jnp.arange(n, dtype=jnp.int32)
    is_first = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])
    run_start = lax.cummax(jnp.where(is_first, place, 0))
    is_last = jnp.concatenate([is_first[1:], jnp.ones(1, bool)])
    run_end = lax.cummin(jnp.where(is_last, place + 1, n), reverse=True)
    starts_tile = ((place - run_start) % lanes == 0) & (group != INT32_MAX)
    # A group has a tile for every full `lanes` of it, and one for the rest.
    tiles = n // lanes + min(most, n)
    tile = jnp.where(starts_tile, jnp.cumsum(starts_tile, dtype=jnp.int32) - 1, tiles)
    start = jnp.full(tiles, n, jnp.int32).at[tile].set(place, mode="drop")
    end = jnp.minimum(start + lanes, run_end.at[start].get(mode="fill", fill_value=n))
    return start, end


def tile_lanes(lanes: int, groups: int) -> int:
    """Lanes of a full tile: about as many as a group has on average, 16 to 64."""
    return min(max(next_power_of_two(max(lanes // groups, 1)), ffn.DOT_MEMBERS), 64)


def combine(out: jax.Array, valid: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
    """Each token's weighted sum of its lanes, in their order, in float32.

    Args:
      out: [T * k, d] float32; 0 where a lane is not valid.
      valid: [T * k] whether the lane's weight counts; it is not looked at otherwise.
      weights: [T, k]
      dtype: of the result, [T, d].
    """
    tokens, top_k = weights.shape
    share = jnp.where(valid.reshape(tokens, top_k), weights.astype(jnp.float32), 0)
    lanes = out.reshape(tokens, top_k, -1)
    terms = [lanes[:, j] * share[:, j, None] for j in range(top_k)]
    return functools.reduce(jnp.add, terms).astype(dtype)


class Experts(NamedTuple):
    """A bank, checked, and what its FFN is.

    Attributes:
      leaves: the matrices by name, [rows, ...].
      scales: the scales of some of them, [rows, 1 or columns].
      activation: a function.
    """

    leaves: dict[str, jax.Array]
    scales: dict[str, jax.Array]
    activation: Callable[[jax.Array], jax.Array]

    @classmethod
    def of(cls, bank: Any, width: int, activation: Callable[[jax.Array], jax.Array]) -> Experts:
        """Checks a bank of experts that take [width]."""
        return cls(*check_bank(bank, width), activation)

    @property
    def rows(self) -> int:
        return self.leaves["down"].shape[0]

    def run(
        self,
        x: jax.Array,
        order: jax.Array,
        tiles: Tiles,
        out: jax.Array,
        top_k: int,
        lanes: int,
        interpret: bool | None,
    ) -> jax.Array:
        """Writes the FFN's outputs of the lanes of all tiles, without weights, into `out`, in place.

        Args:
          x: [T, d]
          order: int32 [n], the lanes as the tiles take them.
          tiles: which row serves which places of `order`.
          out: [n, d] float32.
          top_k: lane i is one of token i // top_k.
          lanes: of a full tile.
        """
        call = functools.partial(_call, self.activation, top_k, lanes)
        operands = (x, self.leaves, self.scales, order, tiles, out)
        if interpret is not None:
            return call(interpret, *operands)
        return lax.platform_dependent(
            *operands, cuda=functools.partial(call, False), default=functools.partial(call, True)
        )


def _call(activation, top_k, lanes, interpret, x, leaves, scales, order, tiles, out):
    x, leaves, scales, order, tiles, out = vary_alike((x, leaves, scales, order, tiles, out))
    if not interpret:
        check_gpu(x, leaves)
    n, (tokens, width) = order.size, x.shape
    rows, hidden_width, _ = leaves["down"].shape
    up_tile, down_tile = (_tile(*size, interpret) for size in ((width, hidden_width), (hidden_width, width)))
    static = ffn.Static(tokens, top_k, rows, lanes, activation, interpret)
    flat = {name: flat_leaf(name, leaf, read_in_pairs(leaf)) for name, leaf in leaves.items()}
    varying = jax.typeof(x).manual_axis_type

    def matrix(refs, scale_refs, name, first=0, columns=None) -> ffn.Matrix:
        _, k, stride = leaves[name].shape
        paired, dtype = read_in_pairs(leaves[name]), leaves[name].dtype
        return ffn.Matrix(
            refs[name], scale_refs.get(name), dtype, k, columns or stride, stride, first, paired
        )

    def grouped_ffn_hidden(tiles, order, x, refs, scale_refs, hidden):
        if "gate_up" in refs:
            gate = matrix(refs, scale_refs, "gate_up", 0, hidden_width)
            up = matrix(refs, scale_refs, "gate_up", hidden_width, hidden_width)
        else:
            gate, up = (matrix(refs, scale_refs, name) for name in ("gate", "up"))
        hidden_kernel(static, up_tile, tiles, order, x, gate, up, hidden)

    def grouped_ffn_output(tiles, order, hidden, refs, scale_refs, before, out):
        del before  # Aliased to `out`.
        output_kernel(static, down_tile, tiles, order, hidden, matrix(refs, scale_refs, "down"), out)

    def run(body, tile, columns, *operands, **options):
        shape = jax.ShapeDtypeStruct((n, columns), jnp.float32, manual_axis_type=varying)
        return pl.pallas_call(
            body,
            out_shape=shape,
            grid=(tiles.start.size, pl.cdiv(columns, tile.n)),
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name=body.__name__,
            **options,
        )(tiles, order, *operands)

    def split(tree, down):
        return {name: each for name, each in tree.items() if (name == "down") == down}

    hidden = run(grouped_ffn_hidden, up_tile, hidden_width, x, split(flat, False), split(scales, False))
    operands = (hidden, split(flat, True), split(scales, True), out)
    last = len(jax.tree.leaves((tiles, order, operands))) - 1
    return run(grouped_ffn_output, down_tile, width, *operands, input_output_aliases={last: 0})


def _tile(k: int, n: int, interpret: bool) -> ffn.Tile:
    # Interpreted, the cost is that of the number of programs and turns.
    most = 1024 if interpret else 64
    k, n = (min(max(next_power_of_two(size), ffn.DOT_MEMBERS), most) for size in (k, n))
    return ffn.Tile(k, n, unroll=1, warps=4, stages=1 if interpret else 3)
