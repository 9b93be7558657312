"""The kernel that moves expert rows: host memory in, bank rows out, all leaves in one launch.

The bus is the bottleneck, and all that the kernel has to do is to keep it busy. A *unit* is one tile of
one row: each thread of a program issues all loads of its part, 16 bytes each where the row allows it,
before the first store waits for one. The grid is fixed and small, since a launch that has nothing to
copy costs as much as its programs; each program loops over units, a grid's width apart, so that
neighbouring programs read neighbouring tiles at about the same time.

Every unit is written by one program and no unit is read by another: no barrier is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.kernels.lanes import next_power_of_two

Ref = Any


class Tuning(NamedTuple):
    """How the kernel is launched and what a program does at once.

    Attributes:
      programs: of the grid.
      tile_words: elements of a tile, a power of two; elements are 4 bytes wherever a row allows it.
      num_warps: of a program.
      eviction: L2 policy of the loads, None, "evict_first" or "evict_last".
    """

    programs: int = 132
    tile_words: int = 4096
    num_warps: int = 4
    eviction: str | None = None


class List(NamedTuple):
    """Refs of the copy list: layer [1], source rows [n], bank rows [n], count [1]; int32."""

    layer: Ref
    src: Ref
    dst: Ref
    count: Ref


def copy_rows(
    tuning: Tuning, interpret: bool, copies: List, experts: list[Ref], bank: list[Ref]
) -> None:
    """Copies the listed rows of every leaf.

    Args:
      tuning: static.
      interpret: static, whether the kernel is interpreted.
      copies: the list. An entry whose source or bank row is out of range is skipped, and so is all of
        it where the layer is; a count past the list ends with the list.
      experts: refs [L, E, words], one a leaf.
      bank: refs [R+S, words] of the same dtypes, updated in place.
    """
    layer, n = copies.layer[0], copies.src.shape[0]
    layers = experts[0].shape[0]
    layer_ok = (layer >= 0) & (layer < layers)
    rows = jnp.where(layer_ok, jnp.clip(copies.count[0], 0, n), 0)
    layer = jnp.where(layer_ok, layer, 0)
    programs = jnp.int32(tuning.programs)
    # The program's first unit of the leaf at hand. Leaves follow each other as if their units stood in
    # one line, so that the last round of the grid is short by less than one unit a program in all.
    first = pl.program_id(0)
    for source, target in zip(experts, bank, strict=True):
        words = source.shape[-1]
        tile = min(tuning.tile_words, next_power_of_two(words))
        tiles = jnp.int32(pl.cdiv(words, tile))

        def copy_unit(i, carry, first=first, source=source, target=target, tile=tile, tiles=tiles):
            unit = first + i * programs
            entry, part = lax.div(unit, tiles), lax.rem(unit, tiles)
            src, dst = copies.src[entry], copies.dst[entry]
            ok = (src >= 0) & (src < source.shape[1]) & (dst >= 0) & (dst < target.shape[0])
            at = layer, jnp.where(ok, src, 0)
            _copy_tile(tuning, interpret, source, at, target, jnp.where(ok, dst, 0), ok, part * tile, tile)
            return carry

        units = rows * tiles
        rounds = lax.div(jnp.maximum(units - first, 0) + programs - 1, programs)
        lax.fori_loop(jnp.int32(0), rounds, copy_unit, None)
        first = lax.rem(first + programs - lax.rem(units, programs), programs)


def _copy_tile(tuning, interpret, source, at, target, dst, ok, start, tile) -> None:
    """Copies `tile` words of one row from word `start` on, where `ok`, and none past the row's end."""
    words = target.shape[-1]
    word = start + jnp.arange(tile, dtype=jnp.int32)
    mask = jnp.broadcast_to(ok, (tile,))
    if words % tile:
        mask = mask & (word < words)
    zero = jnp.zeros((), source.dtype)
    value = plgpu.load(source.at[*at, word], mask=mask, other=zero, eviction_policy=tuning.eviction)
    if interpret:
        # Interpreted, a lane that is masked off would write back what it found: send it out of range.
        word = jnp.where(mask, word, words)
    plgpu.store(target.at[dst, word], value, mask=mask)
