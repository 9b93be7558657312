"""`copy_rows`: checks its arguments, views the leaves as rows of words, and makes the one pallas_call."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool.config import as_device_integers, check_int, layer_of, saturate_int32
from pallas_pool.devices import in_host_memory, platform_of
from pallas_pool.experts import Shapes, bit_width, by_layer, shapes_of
from pallas_pool.kernels import copy as kernel
from pallas_pool.state import vary_alike

TUNING = kernel.Tuning()
# Interpreted, a program costs a pass over the arrays; two of them still share the units.
INTERPRETED = kernel.Tuning(programs=2)


class Copies(NamedTuple):
    """A list of rows to copy, for `copy_rows`; a `Plan` has the same three fields.

    Attributes:
      copy_src: [n] experts (host rows of the layer), integers.
      copy_dst: [n] the bank row that each is copied into.
      copy_count: [] how many of the n.
    """

    copy_src: jax.Array
    copy_dst: jax.Array
    copy_count: jax.Array


def copy_rows(bank: Any, experts: Any, layer: Any, plan: Any, *, interpret: bool | None = None) -> Any:
    """Copies the experts that a plan lists from pinned host memory into their bank rows.

    One Pallas kernel reads the host rows over the bus, inside the jitted program, and writes them to the
    bank: `plan.copy_count` rows of every leaf, and nothing else. Where the bank is donated to the program
    around, it is updated in place, and no copy of bank or experts is made. Call it under `jit`, and pass
    the experts to the jitted function as an argument: what a function closes over becomes a constant of
    the program.

    Args:
      bank: the bank, a pytree of arrays [R+S, ...] with the structure of one layer's experts.
      experts: a pytree of arrays [L, E, ...], or a list or tuple of L pytrees of arrays [E, ...], in
        pinned host memory (`pin`). Any dtypes but complex ones; rows of any whole number of bytes.
      layer: the layer, an int in [0, L), or an integer scalar on the device; out of range on the device,
        nothing is copied. With a list or tuple of layers it must be an int.
      plan: a `Plan`, or anything else that has `copy_src` [n], `copy_dst` [n] and `copy_count` []
        (`Copies`). Entries out of range are skipped, a count past n ends at n; no bank row may be
        listed twice.
      interpret: None compiles the kernel for a GPU and interprets it on any other device; True always
        interprets, False always compiles.

    Returns:
      The bank after the copies.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, its value and what is allowed; so where
        the program runs on a GPU and the experts are not in host memory.
    """
    return tuned(TUNING, bank, experts, layer, plan, interpret)


def tuned(
    tuning: kernel.Tuning, bank: Any, experts: Any, layer: Any, plan: Any, interpret: bool | None = None
) -> Any:
    """`copy_rows` with another launch than the default, to measure it."""
    if interpret not in (None, True, False):
        raise TypeError(f"interpret must be None, True or False, got {interpret!r}")
    shapes = shapes_of(experts)
    check_bank(bank, shapes)
    source, layer = _choose_layer(experts, layer, shapes)
    src, dst, count = _check_list(plan)
    if interpret is not True:
        check_host_memory(experts)
    leaves, tree = jax.tree.flatten(bank)
    moving = [i for i, row in enumerate(shapes.rows) if row.bits]
    if not src.size or not moving:  # An array without elements is no operand of a kernel.
        return bank
    sources = jax.tree.leaves(source)
    moved = _copy(
        tuning,
        interpret,
        (layer, src, dst, count),
        [sources[i] for i in moving],
        [leaves[i] for i in moving],
    )
    for i, leaf in zip(moving, moved, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


def check_bank(bank: Any, shapes: Shapes) -> None:
    """Raises where a bank does not fit the experts."""
    leaves, tree = jax.tree.flatten(bank)
    if tree != shapes.tree:
        raise ValueError(
            f"bank must have the structure of one layer's experts, {shapes.tree}, got {tree}; "
            "make it with init_bank"
        )
    rows = None
    for leaf, row in zip(leaves, shapes.rows, strict=True):
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if not shape or tuple(shape[1:]) != row.shape or dtype != row.dtype or rows not in (None, shape[0]):
            wanted = ", ".join(["R+S" if rows is None else str(rows), *map(str, row.shape)])
            got = f"{dtype}{list(shape)}" if shape is not None else type(leaf).__name__
            raise ValueError(f"bank{row.name} must be {row.dtype}[{wanted}] to fit the experts, got {got}")
        rows = shape[0]


def check_host_memory(experts: Any) -> None:
    """Raises where a program for a GPU would find the experts in its own memory, or would first have to
    be sent all of them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(experts)[0]:
        if in_host_memory(leaf) or platform_of(leaf) != "gpu":
            continue
        where = "in device memory" if isinstance(leaf, jax.Array) else f"a {type(leaf).__name__}"
        raise ValueError(
            f"experts{jax.tree_util.keystr(path)} must be in pinned host memory, but is {where}: pass "
            "pallas_pool.pin(experts), or what it returned, and pass it to a jitted function as an argument"
        )


def _choose_layer(experts: Any, layer: Any, shapes: Shapes) -> tuple[Any, jax.Array]:
    """The experts to read from, each leaf [L, E, ...] or [E, ...], and the layer within them."""
    if by_layer(experts):
        if isinstance(layer, jax.Array):
            raise TypeError(
                "layer must be an int where experts is a list or tuple of layers, got the array "
                f"{layer}: stack the experts to [L, E, ...], or unroll the loop over layers"
            )
        return experts[check_int("layer", layer, 0, shapes.layers - 1)], jnp.zeros(1, jnp.int32)
    return experts, layer_of(shapes.layers, layer).reshape(1)


def _check_list(plan: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    arrays = []
    for name in Copies._fields:
        if not hasattr(plan, name):
            raise TypeError(f"plan must have {', '.join(Copies._fields)}, got {type(plan).__name__}")
        array = as_device_integers(getattr(plan, name))
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"plan.{name} must have an integer dtype, got {array.dtype}")
        arrays.append(saturate_int32(array))
    src, dst, count = arrays
    if src.ndim != 1 or src.shape != dst.shape:
        raise ValueError(
            "plan.copy_src and plan.copy_dst must be vectors of one length, got "
            f"{list(src.shape)} and {list(dst.shape)}"
        )
    if count.size != 1:
        raise ValueError(f"plan.copy_count must be a scalar, got {list(count.shape)}")
    return src, dst, count.reshape(1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _copy(tuning, interpret, copies, sources, targets):
    call = functools.partial(_call, tuning)
    if interpret is not None:
        return call(interpret, copies, sources, targets)
    return lax.platform_dependent(
        copies,
        sources,
        targets,
        cuda=functools.partial(call, False),
        default=functools.partial(call, True),
    )


def _call(tuning, interpret, copies, sources, targets) -> list[jax.Array]:
    if interpret:
        tuning = INTERPRETED if tuning == TUNING else tuning
        # The interpreter is plain XLA, which takes no operand from another memory.
        sources = [jax.device_put(x, jax.memory.Space.Device) if in_host_memory(x) else x for x in sources]
    old = targets
    copies, sources, targets = vary_alike((copies, sources, targets))
    stacked = [x if x.ndim > y.ndim else x[None] for x, y in zip(sources, targets, strict=True)]
    experts = [as_words(x, 2) for x in stacked]
    bank = [as_words(x, 1) for x in targets]

    def body(copies, experts, bank_in, bank):
        del bank_in  # Aliased to bank, which holds what it held.
        kernel.copy_rows(tuning, interpret, kernel.List(*copies), experts, bank)

    body.__name__ = "pool_copy_rows"
    varying = jax.typeof(bank[0]).manual_axis_type
    first_in = len(copies) + len(experts)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in bank]
    (bank,) = pl.pallas_call(
        body,
        grid=(tuning.programs,),
        out_shape=(shapes,),
        input_output_aliases={first_in + i: i for i in range(len(bank))},
        compiler_params=plgpu.CompilerParams(num_warps=tuning.num_warps, num_stages=1),
        interpret=interpret,
        name=body.__name__,
    )(copies, experts, bank)
    return [from_words(x, y) for x, y in zip(bank, old, strict=True)]


def word_type(row_bits: int, dtype: Any) -> Any:
    """The widest integer type of at most 4 bytes that a row is a whole number of."""
    if dtype == jnp.bool_:  # No other type has the same bits to XLA.
        return jnp.dtype(jnp.bool_)
    if row_bits % 8 or jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"rows of {row_bits} bits of {dtype} can't be copied: any dtype will do but complex ones, and a "
            "row must be a whole number of bytes"
        )
    return next(jnp.dtype(f"int{bits}") for bits in (32, 16, 8) if row_bits % bits == 0)


def as_words(x: jax.Array, lead: int) -> jax.Array:
    """An array of rows [*lead, ...] as rows of integer words [*lead, n]; compiled, the same bytes.

    Words make the kernel one of three types, whatever the leaves are, and long rows few elements: Pallas
    computes 32-bit offsets for an array of up to 4 GiB, signed ones, and so an array of more than 2^31
    elements in it would be beyond them. With words of two bytes or more there is none.
    """
    shape, size = x.shape[:lead], math.prod(x.shape[lead:])
    bits = bit_width(x.dtype)
    word = word_type(size * bits, x.dtype)
    x = x.reshape(*shape, size)
    ratio = bit_width(word) / bits
    if word == jnp.bool_ or x.dtype == word:
        pass
    elif ratio <= 1:
        x = lax.bitcast_convert_type(x, word).reshape(*shape, -1)
    else:
        x = lax.bitcast_convert_type(x.reshape(*shape, -1, int(ratio)), word)
    if word.itemsize == 1 and 2**31 < x.size <= 2**32:
        raise ValueError(
            f"rows of an odd number of bytes ({x.shape[-1]}) or of bool can't be copied within an array of 2 "
            f"to 4 GiB, here {list(x.shape)}: pad them to an even number of bytes, of int8 if they are bool"
        )
    return x


def from_words(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `as_words`."""
    ratio = bit_width(x.dtype) / bit_width(like.dtype)
    if x.dtype != like.dtype:
        if ratio < 1:
            x = x.reshape(x.shape[0], -1, int(1 / ratio))
        x = lax.bitcast_convert_type(x, like.dtype)
    return x.reshape(like.shape)
