"""Bodies of the two kernels of `expert_ffn`: gate, up and activation, then down.

Both have a grid of (piece, lane) and the same shape. The first lane of a row works for all lanes of
that row, so that each row is read once; the programs of other lanes leave at once. Nothing passes
between programs of a kernel, and each sum has its fixed order: the same call gives the same bits.

A program multiplies the tokens of up to `Tiling.members` lanes by a piece of the row in one pass, and
makes more passes where more lanes have the row. One to eight members are multiplied elementwise in
float32. Sixteen or more go through matrix multiplication, where each factor is a sum of bfloat16
parts that holds all its bits (a weight and a bfloat16 x are one part, the hidden vector two), or
float32 throughout where the weights do not fit in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.kernels.lanes import Ref, lane_ids, load, next_power_of_two

# From this number of members on a pass is a matrix multiplication: the least that Triton's takes.
DOT_MEMBERS = 16


class Tile(NamedTuple):
    """How one kernel walks a weight matrix. Tuning only: it changes nothing but the order of sums.

    Attributes:
      k: rows of one load, a power of two.
      n: columns of one load and of one program, a power of two.
      unroll: loads of each matrix that are in flight in one turn of the loop.
      warps: warps a program.
      stages: software pipelining stages, for matrix multiplication.
    """

    k: int
    n: int
    unroll: int
    warps: int
    stages: int


class Tiling(NamedTuple):
    """Tuning of both kernels.

    Attributes:
      members: lanes of one row that a pass serves: 1, 2, 4, 8, or from 16 on.
      split: programs that share the sums over d of gate and up; the second kernel adds their parts.
      up, down: the tiles.
    """

    members: int
    split: int
    up: Tile
    down: Tile


class Matrix(NamedTuple):
    """One weight matrix of each bank row, as a ref and what is static about it.

    Attributes:
      ref: [rows, size], one bank row after another; of int16 if `paired`.
      scale: None, [rows, 1] or [rows, columns].
      dtype: of the stored weights.
      k, n: rows and columns used.
      stride: elements from one row to the next.
      first: column at which the matrix begins, in a row of `stride`.
      paired: `ref` has two 1-byte weights an element.
    """

    ref: Ref
    scale: Ref | None
    dtype: Any
    k: int
    n: int
    stride: int
    first: int
    paired: bool


class Lanes(NamedTuple):
    """The lanes that a program works for: those with the row of its own, if it is the first of them."""

    lane: jax.Array  # of this program
    row: jax.Array
    valid: jax.Array  # the row exists
    ids: jax.Array  # [lanes, padded]
    rank: jax.Array  # of each lane among those with the row; -1 elsewhere
    passes: jax.Array


class Static(NamedTuple):
    """What is known when the kernels are traced."""

    tokens: int
    top_k: int
    bank_rows: int
    tiling: Tiling
    activation: Callable[[jax.Array], jax.Array]
    interpret: bool

    @property
    def lanes(self) -> int:
        return self.tokens * self.top_k

    @property
    def dot(self) -> bool:
        return self.tiling.members >= DOT_MEMBERS


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def find_lanes(static: Static, routes: Ref, lane: jax.Array) -> Lanes:
    """Loads the routes and finds the lanes with the row of `lane`."""
    ids = lane_ids(next_power_of_two(static.lanes))
    every = load(routes, ids, ids < static.lanes, -1)
    row = routes[lane]
    valid = (row >= 0) & (row < static.bank_rows)
    same = (every == row) & (ids < static.lanes)
    first = jnp.min(jnp.where(same, ids, static.lanes))
    same_1 = same.astype(jnp.int32)
    rank = jnp.where(same, lax.cumsum(same_1) - 1, -1) if static.lanes > 1 else same_1 - 1
    count = jnp.sum(same_1, dtype=jnp.int32)
    members = static.tiling.members
    passes = jnp.where(valid & (first == lane), (count + (members - 1)) // members, 0)
    return Lanes(lane, row, valid, ids, rank, passes)


def pick(found: Lanes, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lanes of some ranks (a scalar or [m]): 0 where there is none, and whether there is one."""
    ids, ranks = found.ids, found.rank
    if rank.ndim:
        rank, ids, ranks = rank[:, None], ids[None, :], ranks[None, :]
    lane = jnp.max(jnp.where(ranks == rank, ids, -1), axis=-1)
    return jnp.maximum(lane, 0), lane >= 0


def load_weights(matrix: Matrix, row: jax.Array, k: jax.Array, n0: Any, columns: int, k_end: Any):
    """Rows `k` [K] and columns n0 .. n0+columns-1 of a matrix of bank row `row`, 0 past its end."""

    def place(width: int, per: int) -> tuple[jax.Array, jax.Array | None]:
        n = n0 + lane_ids(width)[None, :] * per
        inside = None
        if k_end is not None:
            inside = (k < k_end)[:, None]
        if matrix.n % columns:
            inside = n < matrix.n if inside is None else inside & (n < matrix.n)
        at = k[:, None] * (matrix.stride // per) + (n + matrix.first) // per
        return at, None if inside is None else jnp.broadcast_to(inside, at.shape)

    if not matrix.paired:
        at, inside = place(columns, 1)
        return _load(matrix.ref, row, at, inside)
    at, inside = place(columns // 2, 2)
    pair = _load(matrix.ref, row, at, inside)
    low, high = (pair << 8) >> 8, pair >> 8
    weights = jnp.stack([low, high], axis=-1).reshape(k.shape[0], columns).astype(jnp.int8)
    return lax.bitcast_convert_type(weights, matrix.dtype)


def _load(ref: Ref, row: jax.Array, at: jax.Array, inside: jax.Array | None) -> jax.Array:
    if inside is None:
        return plgpu.load(ref.at[row, at])
    return plgpu.load(ref.at[row, at], mask=inside, other=jnp.zeros((), ref.dtype))


def load_scale(matrix: Matrix, row: jax.Array, n: jax.Array) -> jax.Array | None:
    """The scale of columns `n`: None, a scalar or a vector, float32."""
    if matrix.scale is None:
        return None
    if matrix.scale.shape[1] == 1:
        return matrix.scale[row, 0].astype(jnp.float32)
    other = jnp.zeros((), matrix.scale.dtype)
    scale = plgpu.load(matrix.scale.at[row, matrix.first + n], mask=n < matrix.n, other=other)
    return scale.astype(jnp.float32)


def parts(values: jax.Array, most: int) -> list[jax.Array]:
    """bfloat16 arrays whose sum is `values` to 8 * most bits."""
    found = []
    for i in range(most):
        part = values.astype(jnp.bfloat16)
        found.append(part)
        if i + 1 < most:
            # Of an infinity there is no rest: inf - inf would be NaN.
            rest = values.astype(jnp.float32) - part.astype(jnp.float32)
            values = jnp.where(jnp.abs(part.astype(jnp.float32)) == jnp.inf, 0, rest)
    return found


def part_count(dtype: Any) -> int:
    """bfloat16 parts that hold all bits of a dtype."""
    return {2: 1 if dtype == jnp.bfloat16 else 2, 4: 3}.get(jnp.dtype(dtype).itemsize, 1)


def dot(static: Static, values: jax.Array, weights: jax.Array, most: int) -> jax.Array:
    """values [M, K] @ weights [K, N], float32."""

    def product(a, b):
        wide = static.interpret  # XLA has no product of bfloat16 on every CPU; the values are the same.
        if wide:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)

    if part_count(weights.dtype) > 1:
        return product(values.astype(jnp.float32), weights.astype(jnp.float32))
    weights = weights.astype(jnp.bfloat16)
    products = [product(part, weights) for part in parts(values, most)]
    return sum(products[1:], products[0])


def multiply(
    static: Static,
    tile: Tile,
    matrices: tuple[Matrix, ...],
    row: jax.Array,
    load_values: Callable[[Any, jax.Array, int | None], jax.Array],
    value_parts: int,
    members: Any,
    piece: jax.Array,
    begin: int | jax.Array,
    length: int,
) -> list[Any]:
    """The products of the members' values with a piece of columns of each matrix.

    Args:
      row: bank row.
      load_values: (member, k, k_end) -> the values at `k`, 0 from `k_end` on; [K], or [M, K] of all
        members.
      value_parts: bfloat16 parts of a value.
      members: a list of members, each for elementwise multiplication, or all of them as one.
      piece: which piece of `tile.n` columns.
      begin, length: rows `begin` to `begin + length - 1` are summed over.

    Returns:
      For each matrix a list of [N], one a member, or [M, N].
    """
    span = tile.k * tile.unroll
    full, rest = divmod(length, span)
    n0 = piece * tile.n
    if static.dot:
        zeros = [jnp.zeros((static.tiling.members, tile.n), jnp.float32) for _ in matrices]
    else:
        # Summed over the rows of a tile only at the end: what is within a thread stays there.
        zeros = [jnp.zeros((tile.k, tile.n), jnp.float32) for _ in matrices for _ in members]

    def turn(k0, sums, k_end):
        ks = [begin + k0 + i * tile.k + lane_ids(tile.k) for i in range(tile.unroll)]
        # All loads of a turn come first, to be in flight together.
        weights = [[load_weights(m, row, k, n0, tile.n, k_end) for m in matrices] for k in ks]
        sums = list(sums)
        for k, loaded in zip(ks, weights, strict=True):
            if static.dot:
                values = load_values(members, k, k_end)
                for i, each in enumerate(loaded):
                    sums[i] += dot(static, values, each, value_parts)
                continue
            values = [load_values(member, k, k_end).astype(jnp.float32)[:, None] for member in members]
            for i, each in enumerate(loaded):
                each = each.astype(jnp.float32)
                for j, value in enumerate(values):
                    sums[i * len(members) + j] += value * each
        return tuple(sums)

    sums = tuple(zeros)
    if full:
        bounds = np.int32(0), np.int32(full)
        sums = lax.fori_loop(*bounds, lambda i, sums: turn(i * span, sums, None), sums)
    if rest:
        sums = turn(full * span, sums, length)
    if static.dot:
        return list(sums)
    columns = [jnp.sum(each, axis=0) for each in sums]
    return [columns[i * len(members) : (i + 1) * len(members)] for i in range(len(matrices))]


def each_pass(static: Static, found: Lanes, work: Callable[[Any], None]) -> None:
    """Calls `work` with the members of each pass, (lane, there): a list of scalars, or one of [M]."""
    members = static.tiling.members

    def body(i, carry):
        first = i * members
        if static.dot:
            work(pick(found, first + lane_ids(members)))
        else:
            work([pick(found, first + j) for j in range(members)])
        return carry

    lax.fori_loop(jnp.int32(0), found.passes, body, None)


def load_values(ref: Ref, at: tuple[Any, ...], there: jax.Array, k: jax.Array, k_end: int | None):
    """ref[*at, k] of a member, or of [M] members with 0 for those not there; 0 from k_end on."""
    inside = None if k_end is None else k < k_end
    if there.ndim:
        at = tuple(each[:, None] if jnp.ndim(each) else each for each in at)
        k = k[None, :]
        inside = there[:, None] if inside is None else there[:, None] & inside[None, :]
        inside = jnp.broadcast_to(inside, (there.shape[0], k.shape[1]))
    if inside is None:
        return plgpu.load(ref.at[(*at, k)])
    return plgpu.load(ref.at[(*at, k)], mask=inside, other=jnp.zeros((), ref.dtype))


def store_lanes(ref: Ref, part: Any, members: Any, n: jax.Array, values: Any) -> None:
    """ref[part, lane, n] = values of each member that is there, where n is in range."""
    if isinstance(members, list):
        for (lane, there), value in zip(members, values, strict=True):
            plgpu.store(ref.at[part, lane, n], value, mask=there & (n < ref.shape[2]))
        return
    lane, there = members
    # Interpreted, a member that is not there would write back what it found and undo the store of
    # the lane whose number it bears: out of range it is dropped.
    lane = jnp.where(there, lane, ref.shape[1])[:, None]
    mask = jnp.broadcast_to(there[:, None] & (n < ref.shape[2])[None, :], values.shape)
    plgpu.store(ref.at[part, lane, n[None, :]], values, mask=mask)


def scaled(values: Any, scale: jax.Array | None) -> Any:
    """A list of [N], or [M, N], times the scale of the columns."""
    if scale is None:
        return values
    if isinstance(values, list):
        return [each * scale for each in values]
    return values * (scale[None, :] if scale.ndim else scale)


def up_kernel(static: Static, x: Ref, routes: Ref, gate: Matrix, up: Matrix, hidden: Ref) -> None:
    """The hidden vectors of all valid lanes, float32.

    Args:
      x: [tokens, d].
      routes: [lanes] or more.
      gate, up: of [d, f].
      hidden: [1, lanes, f], for act(x @ gate) * (x @ up); or where programs split the sums,
        [2 * split, lanes, f], for x @ gate and x @ up of each part of d. Left as it is where a lane is
        not valid.
    """
    tile, split = static.tiling.up, static.tiling.split
    piece, part = pl.program_id(0), jnp.int32(0)
    if split > 1:
        piece, part = piece // split, piece % split
    found = find_lanes(static, routes, pl.program_id(1))
    length = gate.k // split
    n = piece * tile.n + lane_ids(tile.n)

    def load_x(member, k, k_end):
        lane, there = member
        return load_values(x, (lane // static.top_k,), there, k, k_end)

    def work(members):
        products = multiply(
            static,
            tile,
            (gate, up),
            found.row,
            load_x,
            part_count(x.dtype),
            members,
            piece,
            part * length,
            length,
        )
        g, u = (
            scaled(each, load_scale(matrix, found.row, n))
            for each, matrix in zip(products, (gate, up), strict=True)
        )
        if split > 1:
            store_lanes(hidden, 2 * part, members, n, g)
            store_lanes(hidden, 2 * part + 1, members, n, u)
            return
        h = [activate(static, *each) for each in zip(g, u, strict=True)] if isinstance(g, list) else None
        store_lanes(hidden, 0, members, n, activate(static, g, u) if h is None else h)

    each_pass(static, found, work)


def activate(static: Static, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) * up, float32."""
    return static.activation(gate).astype(jnp.float32) * up


def down_kernel(static: Static, hidden: Ref, routes: Ref, router_weights: Ref, down: Matrix, y: Ref) -> None:
    """The lanes' outputs: y[0, lane] = weight * (hidden @ down), float32; 0 where a lane is not valid.

    Args:
      hidden: as `up_kernel` leaves it.
      routes: [lanes] or more.
      router_weights: [lanes].
      down: of [f, d].
      y: [1, lanes, d].
    """
    tile, split = static.tiling.down, static.tiling.split
    piece, lane = pl.program_id(0), pl.program_id(1)
    found = find_lanes(static, routes, lane)
    n = piece * tile.n + lane_ids(tile.n)

    @pl.when(~found.valid)
    def _():
        plgpu.store(y.at[0, lane, n], jnp.zeros(n.shape, jnp.float32), mask=n < y.shape[2])

    def load_hidden(member, k, k_end):
        lane, there = member
        if split == 1:
            return load_values(hidden, (0, lane), there, k, k_end)
        sums = [load_values(hidden, (i, lane), there, k, k_end) for i in range(2 * split)]
        h = activate(static, sum(sums[2::2], sums[0]), sum(sums[3::2], sums[1]))
        # An activation need not be finite at 0, and a weight of 0 would not hide it.
        return h if k_end is None else jnp.where(k < k_end, h, 0)

    def work(members):
        [products] = multiply(static, tile, (down,), found.row, load_hidden, 2, members, piece, 0, down.k)
        products = scaled(products, load_scale(down, found.row, n))
        if isinstance(members, list):
            weights = [router_weights[lane].astype(jnp.float32) for lane, _ in members]
            values = [each * weight for each, weight in zip(products, weights, strict=True)]
        else:
            weight = load(router_weights, members[0], members[1], 0).astype(jnp.float32)
            values = products * weight[:, None]
        store_lanes(y, 0, members, n, values)

    each_pass(static, found, work)
