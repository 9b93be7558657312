"""Bodies of the two kernels of `grouped_ffn`: as those of `ffn.py`, for many lanes sorted by row.

Both have a grid of (tile, piece). A tile is a run of lanes that share a row: their values make a matrix,
so that a row is read once a tile rather than once a lane. Each program makes one piece of columns of one
tile. What it makes of a lane does not depend on the row's number, nor on the other lanes of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.kernels import ffn
from pallas_pool.kernels.lanes import Ref, lane_ids


class Tiles(NamedTuple):
    """Runs of sorted lanes that share a row. int32 [tiles].

    Attributes:
      start: the place of the first lane among the sorted ones.
      end: one past the place of the last.
      row: the bank row; -1: nothing is to be done.
    """

    start: jax.Array
    end: jax.Array
    row: jax.Array


def hidden_kernel(
    static: ffn.Static,
    walk: ffn.Tile,
    tiles: Tiles,
    order: Ref,
    x: Ref,
    gate: ffn.Matrix,
    up: ffn.Matrix,
    hidden: Ref,
) -> None:
    """Hidden vectors of the lanes of each tile, float32; those of other lanes are left as they are.

    Args:
      walk: how the programs walk the weights.
      tiles: of refs.
      order: [n] the lanes, sorted.
      x: [tokens, d].
      gate, up: of [d, f].
      hidden: [n, f], sorted as `order`.
    """
    tile, piece, row = _program(tiles)

    @pl.when(row >= 0)
    def _():
        place, there = _members(static, tiles, tile)
        lane = plgpu.load(order.at[place], mask=there, other=0)

        def load_x(members, k, k_end):
            return ffn.load_values(x, members[0] // static.top_k, there, k, k_end)

        parts = ffn.part_count(x.dtype)
        made = _multiply(static, walk, (gate, up), row, load_x, parts, (lane, there), piece)
        n = piece * walk.n + lane_ids(walk.n)
        ffn.store_lanes(hidden, (place, there), n, ffn.activate(static, *made))


def output_kernel(
    static: ffn.Static,
    walk: ffn.Tile,
    tiles: Tiles,
    order: Ref,
    hidden: Ref,
    down: ffn.Matrix,
    out: Ref,
) -> None:
    """Outputs of the lanes of each tile, float32, without their weights; other lanes are left as they are.

    Args:
      hidden: [n, f], as `hidden_kernel` leaves it.
      down: of [f, d].
      out: [n, d], lane by lane.
    """
    tile, piece, row = _program(tiles)

    @pl.when(row >= 0)
    def _():
        place, there = _members(static, tiles, tile)
        lane = plgpu.load(order.at[place], mask=there, other=0)

        def load_hidden(members, k, k_end):
            return ffn.load_values(hidden, members[0], there, k, k_end)

        # Two bfloat16 parts of a hidden value, as in `ffn.down_kernel`.
        made = _multiply(static, walk, (down,), row, load_hidden, 2, (place, there), piece)
        ffn.store_lanes(out, (lane, there), piece * walk.n + lane_ids(walk.n), made[0])


def _program(tiles):
    """The program's tile, its piece of columns, and the tile's row."""
    tile = pl.program_id(0)
    return tile, pl.program_id(1), tiles.row[tile]


def _members(static, tiles, tile):
    """Places of a tile's lanes, and which there are: the last tile of a run is not full."""
    place = tiles.start[tile] + lane_ids(static.members)
    return place, place < tiles.end[tile]


def _multiply(static, tile, matrices, row, load, value_parts, members, piece):
    made = ffn.multiply(static, tile, matrices, row, load, value_parts, members, piece)
    n = piece * tile.n + lane_ids(tile.n)
    scales = [ffn.load_scale(matrix, row, n) for matrix in matrices]
    return [ffn.scaled(each, scale) for each, scale in zip(made, scales, strict=True)]
