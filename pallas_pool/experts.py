"""The two forms in which experts are given, what one row of them is, and the checks of both.

Stacked: a pytree of arrays [L, E, ...]. Layer by layer: a list or a tuple of L pytrees of arrays
[E, ...]. Any other container (a dict, a NamedTuple, a dataclass) is part of the pytree.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_pool.config import PoolConfig


class Row(NamedTuple):
    """One leaf of an expert.

    Attributes:
      name: where it is in the pytree, as Python would write it, such as "['gate']".
      shape: of one expert.
      dtype: of the array, or of what JAX makes of it: float32 of NumPy's float64, unless 64-bit types are on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def bits(self) -> int:
        """Bits of one expert's row of this leaf."""
        return math.prod(self.shape) * bit_width(self.dtype)


class Shapes(NamedTuple):
    """What is known of experts without looking at a weight.

    Attributes:
      layers: L.
      experts: E.
      tree: the structure of one layer, which is that of a bank.
      rows: one `Row` a leaf.
    """

    layers: int
    experts: int
    tree: Any
    rows: tuple[Row, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert, all leaves."""
        return -(-sum(row.bits for row in self.rows) // 8)


def bit_width(dtype: Any) -> int:
    """Bits of one element: 4 of an int4, although NumPy keeps it in a byte."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return dtype.itemsize * 8


def by_layer(experts: Any) -> bool:
    """Whether the experts are a sequence of layers. A NamedTuple is not: it is one pytree."""
    return type(experts) in (list, tuple)


def shapes_of(experts: Any) -> Shapes:
    """The shapes of experts of either form, from anything with a `shape` and a `dtype`.

    Raises:
      TypeError, ValueError: they have none, or do not fit each other.
    """
    if not by_layer(experts):
        leaves, tree = _leaves(experts, "experts")
        rows, sizes = _rows(leaves, "experts", "[L, E, ...]", lead=2)
        return Shapes(sizes[0], sizes[1], tree, rows)
    if not experts:
        raise ValueError("experts is an empty sequence: it must hold one pytree a layer")
    first = None
    for layer, each in enumerate(experts):
        name = f"experts[{layer}]"
        leaves, tree = _leaves(each, name)
        rows, sizes = _rows(leaves, name, "[E, ...]", lead=1)
        shapes = Shapes(len(experts), sizes[0], tree, rows)
        if first is None:
            first = shapes
        elif shapes != first:
            raise ValueError(
                f"{name} differs from experts[0]: it has {_summary(shapes)}, not {_summary(first)}. "
                "All layers that share a bank must have experts of the same shapes and dtypes, and a list or "
                "tuple is taken for one pytree a layer; give the matrices of all layers as a dict"
            )
    assert first is not None
    return first


def check_experts(config: PoolConfig, experts: Any) -> Shapes:
    """The shapes of experts that fit the config.

    Raises:
      TypeError, ValueError: they do not.
    """
    shapes = shapes_of(experts)
    if (shapes.layers, shapes.experts) != (config.num_layers, config.num_experts):
        raise ValueError(
            f"experts has {shapes.layers} layers of {shapes.experts} experts, but the config says "
            f"num_layers={config.num_layers}, num_experts={config.num_experts}"
        )
    return shapes


def expert_bytes(experts: Any) -> int:
    """Bytes of one expert of one layer: a row of each leaf. A bank has R+S times as many.

    Args:
      experts: a pytree of arrays [L, E, ...], or a list or tuple of L pytrees of arrays [E, ...]; mere
        shapes (`jax.ShapeDtypeStruct`) will do.

    Raises:
      TypeError, ValueError: the arrays do not fit each other.

    >>> import jax, jax.numpy as jnp
    >>> expert_bytes({"up": jax.ShapeDtypeStruct((2, 8, 16, 4), jnp.int8),
    ...               "scale": jax.ShapeDtypeStruct((2, 8), jnp.float32)})
    68
    """
    return shapes_of(experts).row_bytes


def _leaves(tree: Any, name: str) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
        raise ValueError(f"{name} holds no array")
    return leaves, structure


def _is_dtype(dtype: Any) -> bool:
    """Whether NumPy knows it: a dtype of PyTorch it does not."""
    try:
        jnp.dtype(dtype)
    except TypeError:
        return False
    return True


def _rows(leaves, name: str, form: str, lead: int) -> tuple[tuple[Row, ...], tuple[int, ...]]:
    """Rows and the leading sizes that all leaves share."""
    rows: list[Row] = []
    sizes: tuple[int, ...] = ()
    for path, leaf in leaves:
        where = jax.tree_util.keystr(path)
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise TypeError(
                f"{name}{where} must be an array {form}, got {leaf!r:.80} ({type(leaf).__name__})"
            )
        if not _is_dtype(dtype):
            kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
            raise TypeError(f"{name}{where} must be a NumPy or JAX array, got a {kind} of {dtype}")
        if len(shape) < lead or not all(shape[:lead]):
            raise ValueError(
                f"{name}{where} must be an array {form}, got {dtype}{list(shape)}"
                + ("; a list or tuple of arrays is taken for one pytree a layer" if lead == 1 else "")
            )
        if sizes and tuple(shape[:lead]) != sizes:
            raise ValueError(
                f"{name}{where} begins with {list(shape[:lead])}, but {name}{rows[0].name} with "
                f"{list(sizes)}: all leaves must be {form}"
            )
        sizes = tuple(shape[:lead])
        if not isinstance(leaf, jax.Array):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        rows.append(Row(where, tuple(shape[lead:]), jnp.dtype(dtype)))
    return tuple(rows), sizes


def _summary(shapes: Shapes) -> str:
    rows = ", ".join(f"{row.name} {row.dtype}{[shapes.experts, *row.shape]}" for row in shapes.rows)
    return f"leaves {rows}"
