"""Bodies of the two kernels of `expert_ffn`: gate, up and activation, then down.

Both have a grid of (piece, lane) and the same shape. The first lane of a row works for all lanes of
that row, so that each row is read once; the programs of other lanes leave at once. Nothing passes
between programs of a kernel, and each sum has its fixed order: the same call gives the same bits.

A program multiplies the tokens of up to `Static.members` lanes by a piece of the row in one pass, and
makes more passes where more lanes have the row. One to eight members are multiplied elementwise in
float32. Sixteen or more go through matrix multiplication, where each factor is a sum of bfloat16
parts that holds all its bits (a weight and a bfloat16 x are one part, the hidden vector two), or
float32 throughout where the weights do not fit in bfloat16.
"""

from __future__ import annotations

import functools
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
      unroll: loads of each matrix in one turn of the loop.
      warps: warps a program.
      stages: software pipelining. Elementwise, with 2 the loads of a turn are made ahead, before the
        products of the turn before; for matrix multiplication it is the compiler's number of stages.
      fence: whether a barrier keeps the compiler from putting off a turn's loads, as it does to need
        fewer registers.
    """

    k: int
    n: int
    unroll: int
    warps: int
    stages: int = 1
    fence: bool = False


class Tiling(NamedTuple):
    """Tuning of both kernels.

    Attributes:
      up, down: the tiles of the first and of the second kernel.
      up_members, down_members: lanes of one row that a pass serves: 1, 2, 4, 8, or from 16 on.
    """

    up: Tile
    down: Tile
    up_members: int
    down_members: int


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
    members: int  # of a pass
    activation: Callable[[jax.Array], jax.Array]
    interpret: bool

    @property
    def lanes(self) -> int:
        return self.tokens * self.top_k

    @property
    def dot(self) -> bool:
        return self.members >= DOT_MEMBERS


def find_lanes(static: Static, routes: Ref, lane: jax.Array) -> Lanes:
    """Loads the routes and finds the lanes with the row of `lane`."""
    row = routes[lane]
    valid = (row >= 0) & (row < static.bank_rows)
    ids = lane_ids(next_power_of_two(static.lanes))
    if static.tokens == 1:
        # A token chooses a row once. If it does not, each of its lanes works for itself.
        return Lanes(lane, row, valid, ids, jnp.where(ids == lane, 0, -1), valid.astype(jnp.int32))
    every = load(routes, ids, ids < static.lanes, -1)
    same = (every == row) & (ids < static.lanes)
    first = jnp.min(jnp.where(same, ids, static.lanes))
    same_1 = same.astype(jnp.int32)
    rank = jnp.where(same, lax.cumsum(same_1) - 1, -1)
    count = jnp.sum(same_1, dtype=jnp.int32)
    members = static.members
    passes = jnp.where(valid & (first == lane), lax.div(count + (members - 1), jnp.int32(members)), 0)
    return Lanes(lane, row, valid, ids, rank, passes)


def pick(found: Lanes, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lanes of some ranks (a scalar or [m]): 0 where there is none, and whether there is one."""
    ids, ranks = found.ids, found.rank
    if rank.ndim:
        rank, ids, ranks = rank[:, None], ids[None, :], ranks[None, :]
    lane = jnp.max(jnp.where(ranks == rank, ids, -1), axis=-1)
    return jnp.maximum(lane, 0), lane >= 0


def load_weights(
    matrix: Matrix,
    row: jax.Array,
    k: jax.Array,
    piece: jax.Array,
    columns: int,
    k_end: int | None,
) -> jax.Array:
    """Rows `k` [K] of the given piece of columns, of bank row `row`; 0 from k_end on and past the columns."""
    per = 2 if matrix.paired else 1  # weights an element
    columns //= per
    n = (piece * columns + lane_ids(columns))[None, :]
    at = k[:, None] * (matrix.stride // per) + n
    if matrix.first:
        at += matrix.first // per
    masks = []
    if k_end is not None:
        masks.append((k < k_end)[:, None])
    if matrix.n // per % columns:
        masks.append(n < matrix.n // per)
    loaded = _load(matrix.ref, row, at, masks)
    if not matrix.paired:
        return loaded
    both = [((loaded << 8) >> 8).astype(jnp.int8), (loaded >> 8).astype(jnp.int8)]
    weights = jnp.stack(both, axis=-1).reshape(k.shape[0], per * columns)
    return lax.bitcast_convert_type(weights, matrix.dtype)


def _load(ref: Ref, row: jax.Array, at: jax.Array, masks: list[jax.Array]) -> jax.Array:
    if not masks:
        return plgpu.load(ref.at[row, at])
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), at.shape)
    return plgpu.load(ref.at[row, at], mask=mask, other=jnp.zeros((), ref.dtype))


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


class Turns(NamedTuple):
    """Some turns of a loop over the rows of a matrix: `load(i)` -> what turn i needs, `use(loaded, sums)`
    -> the sums with its products added."""

    number: int
    load: Callable[[Any], Any]
    use: Callable[[Any, Any], Any]


def take_turns(static: Static, tile: Tile, turns: list[Turns], sums: Any, stages: int) -> Any:
    """The sums after all turns. The turns of a list differ in kind; those of an item are a loop."""

    def fence():
        if tile.fence and not static.interpret:
            plgpu.debug_barrier()

    def loop(begin, end, body, carry):
        if end - begin == 1:
            return body(begin, carry)
        return lax.fori_loop(np.int32(begin), np.int32(end), body, carry) if end > begin else carry

    if stages == 1:
        for some in turns:

            def alone(i, sums, some=some):
                loaded = some.load(i)
                fence()
                return some.use(loaded, sums)

            sums = loop(0, some.number, alone, sums)
        return sums

    loaded = use = None
    for some in turns:
        following = some.load(0)
        fence()
        if use is not None:
            sums = use(loaded, sums)
        use = some.use

        def ahead(i, carry, some=some):
            following = some.load(i)
            fence()
            return following, some.use(carry[0], carry[1])

        loaded, sums = loop(1, some.number, ahead, (following, sums))
    return use(loaded, sums) if use is not None else sums


def plan_turns(
    tile: Tile,
    matrices: tuple[Matrix, ...],
    row: jax.Array,
    piece: jax.Array,
    load_values: Callable[[jax.Array, int | None], Any],
    use: Callable[[Any, Any], Any],
) -> list[Turns]:
    """Turns over all rows of a piece of columns of each matrix.

    Args:
      load_values: (k, k_end) -> what the rows `k` [K] are multiplied by, 0 from k_end on.
      use: ([(weights of each matrix, values), ...], sums) -> sums.
    """
    span, length = tile.k * tile.unroll, matrices[0].k
    full, rest = divmod(length, span)

    def load(i, loads=tile.unroll, k_end=None):
        ks = [i * span + j * tile.k + lane_ids(tile.k) for j in range(loads)]
        # All loads of weights come first, to be in flight together.
        weights = [[load_weights(m, row, k, piece, tile.n, k_end) for m in matrices] for k in ks]
        return [(each, load_values(k, k_end)) for each, k in zip(weights, ks, strict=True)]

    turns = [Turns(full, load, use)] if full else []
    if rest:
        loads, cut = -(-rest // tile.k), rest % tile.k != 0
        turns.append(Turns(1, lambda _: load(full, loads, length if cut else None), use))
    return turns


def multiply(
    static: Static,
    tile: Tile,
    matrices: tuple[Matrix, ...],
    row: jax.Array,
    load_member: Callable[[Any, jax.Array, int | None], jax.Array],
    value_parts: int,
    members: Any,
    piece: jax.Array,
) -> list[Any]:
    """The products of the members' values with a piece of columns of each matrix.

    Args:
      row: bank row.
      load_member: (member, k, k_end) -> the values at `k`, 0 from k_end on; [K], or [M, K] of all.
      value_parts: bfloat16 parts of a value.
      members: a list of members, each for elementwise multiplication, or all of them as one.
      piece: which piece of `tile.n` columns.

    Returns:
      For each matrix a list of [N], one a member, or [M, N].
    """

    def load_values(k, k_end):
        return [load_member(member, k, k_end) for member in ([members] if static.dot else members)]

    def use_dot(loaded, sums):
        for weights, [values] in loaded:
            products = [dot(static, values, each, value_parts) for each in weights]
            sums = [total + product for total, product in zip(sums, products, strict=True)]
        return sums

    def use(loaded, sums):
        for weights, values in loaded:
            sums = [
                [add_product(total, value, each) for total, value in zip(totals, values, strict=True)]
                for totals, each in zip(sums, weights, strict=True)
            ]
        return sums

    turns = plan_turns(tile, matrices, row, piece, load_values, use_dot if static.dot else use)
    if static.dot:
        zeros = [jnp.zeros((static.members, tile.n), jnp.float32) for _ in matrices]
        return take_turns(static, tile, turns, zeros, 1)  # The compiler makes the stages.
    # Summed over the rows of a tile only at the end: what is within a thread stays there.
    nothing = [[jnp.zeros((tile.k, tile.n), jnp.float32) for _ in members] for _ in matrices]
    sums = take_turns(static, tile, turns, nothing, tile.stages)
    return [[jnp.sum(each, axis=0) for each in totals] for totals in sums]


def add_product(total: jax.Array, values: jax.Array, weights: jax.Array) -> jax.Array:
    """total [K, N] + values [K] * weights [K, N], float32."""
    return total + values.astype(jnp.float32)[:, None] * weights.astype(jnp.float32)


def each_pass(static: Static, found: Lanes, work: Callable[[Any], None]) -> None:
    """Calls `work` with the members of each pass, (lane, there): a list of scalars, or one of [M]."""
    members = static.members

    def body(i, carry):
        first = i * members
        if static.dot:
            work(pick(found, first + lane_ids(members)))
        else:
            work([pick(found, first + j) for j in range(members)])
        return carry

    lax.fori_loop(jnp.int32(0), found.passes, body, None)


def load_values(ref: Ref, at: jax.Array, there: jax.Array, k: jax.Array, k_end: int | None):
    """ref[at, k] of a member, or of [M] members with 0 for those not there; 0 from k_end on."""
    inside = None if k_end is None else k < k_end
    if there.ndim:
        at, k = at[:, None], k[None, :]
        inside = there[:, None] if inside is None else there[:, None] & inside[None, :]
        inside = jnp.broadcast_to(inside, (there.shape[0], k.shape[1]))
    if inside is None:
        return plgpu.load(ref.at[at, k])
    return plgpu.load(ref.at[at, k], mask=inside, other=jnp.zeros((), ref.dtype))


def store_lanes(ref: Ref, members: Any, n: jax.Array, values: Any) -> None:
    """ref[lane, n] = values of each member that is there, where n is in range."""
    if isinstance(members, list):
        for (lane, there), value in zip(members, values, strict=True):
            plgpu.store(ref.at[lane, n], value, mask=there & (n < ref.shape[1]))
        return
    lane, there = members
    # Interpreted, a member that is not there would write back what it found and undo the store of
    # the lane whose number it bears: out of range it is dropped.
    lane = jnp.where(there, lane, ref.shape[0])[:, None]
    mask = jnp.broadcast_to(there[:, None] & (n < ref.shape[1])[None, :], values.shape)
    plgpu.store(ref.at[lane, n[None, :]], values, mask=mask)


def scaled(values: Any, scale: jax.Array | None) -> Any:
    """A list of [N], or [M, N], times the scale of the columns."""
    if scale is None:
        return values
    if isinstance(values, list):
        return [each * scale for each in values]
    return values * (scale[None, :] if scale.ndim else scale)


def up_kernel(static: Static, tile: Tile, x: Ref, routes: Ref, gate: Matrix, up: Matrix, hidden: Ref) -> None:
    """The hidden vectors of all valid lanes: act(x @ gate) * (x @ up), float32.

    Args:
      x: [tokens, d].
      routes: [lanes] or more.
      gate, up: of [d, f].
      hidden: [lanes, f]. Left as it is where a lane is not valid.
    """
    piece = pl.program_id(0)
    found = find_lanes(static, routes, pl.program_id(1))
    n = piece * tile.n + lane_ids(tile.n)

    def load_x(member, k, k_end):
        lane, there = member
        return load_values(x, lax.div(lane, jnp.full_like(lane, static.top_k)), there, k, k_end)

    def work(members):
        matrices, most = (gate, up), part_count(x.dtype)
        products = multiply(static, tile, matrices, found.row, load_x, most, members, piece)
        g, u = (
            scaled(each, load_scale(matrix, found.row, n))
            for each, matrix in zip(products, matrices, strict=True)
        )
        if isinstance(g, list):
            h = [activate(static, *each) for each in zip(g, u, strict=True)]
        else:
            h = activate(static, g, u)
        store_lanes(hidden, members, n, h)

    each_pass(static, found, work)


def activate(static: Static, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) * up, float32."""
    made = static.activation(gate)
    if jnp.shape(made) != gate.shape:
        raise ValueError(
            f"activation must be an elementwise function, but of float32{list(gate.shape)} it made "
            f"{list(jnp.shape(made))}"
        )
    return made.astype(jnp.float32) * up


def down_kernel(
    static: Static, tile: Tile, hidden: Ref, routes: Ref, router_weights: Ref, down: Matrix, y: Ref
) -> None:
    """The lanes' outputs: y[lane] = weight * (hidden @ down), float32; 0 where a lane is not valid.

    Args:
      hidden: as `up_kernel` leaves it.
      routes: [lanes] or more.
      router_weights: [lanes].
      down: of [f, d].
      y: [lanes, d].
    """
    piece, lane = pl.program_id(0), pl.program_id(1)
    found = find_lanes(static, routes, lane)
    n = piece * tile.n + lane_ids(tile.n)

    @pl.when(~found.valid)
    def _():
        plgpu.store(y.at[lane, n], jnp.zeros(n.shape, jnp.float32), mask=n < y.shape[1])

    def load_hidden(member, k, k_end):
        return load_values(hidden, *member, k, k_end)

    def work(members):
        # Loaded first, so that no latency is left at the end.
        scale = load_scale(down, found.row, n)
        if isinstance(members, list):
            weights = [router_weights[lane].astype(jnp.float32) for lane, _ in members]
        else:
            weights = load(router_weights, members[0], members[1], 0).astype(jnp.float32)
        [products] = multiply(static, tile, (down,), found.row, load_hidden, 2, members, piece)
        products = scaled(products, scale)
        if isinstance(members, list):
            values = [each * weight for each, weight in zip(products, weights, strict=True)]
        else:
            values = products * weights[:, None]
        store_lanes(y, members, n, values)

    each_pass(static, found, work)
