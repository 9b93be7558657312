"""The static geometry of a pool, and the checks that need nothing but shapes and dtypes."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = 2**31 - 1

# The clock's two words are multiplied by the number of layers in 16-bit digits: kernels/clock.py.
MAX_LAYERS = 2**15
MAX_WIDTH = 1024


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an int in [low, high], or raises naming the argument."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a concrete int, got a traced value {value}")
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, got the bool {value}")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})") from None
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
    return value


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """Geometry of a pool. Static and hashable: usable with `static_argnums`.

    Attributes:
      num_layers: MoE layers L that share the bank, 1 to 32768.
      num_experts: experts E of each layer; `num_layers * num_experts` must fit in int32.
      rows_per_layer: bank rows that each layer starts with, 0 to E: an int, or one int a layer. Their
        sum is the number of pool rows R, at least 1.
      staging_rows: rows S, at least 1, that follow the pool in the bank and serve one step only.
      width: lanes W, a power of two from 1 to 1024: the most (token, top-k) pairs of one step.
      step_map: whether a plan holds the step map. A consumer that uses the routes alone saves its
        cost by leaving it out.
    """

    num_layers: int
    num_experts: int
    rows_per_layer: int | tuple[int, ...]
    staging_rows: int
    width: int
    step_map: bool = True

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        put("num_layers", check_int("num_layers", self.num_layers, 1, MAX_LAYERS))
        put(
            "num_experts",
            check_int("num_experts", self.num_experts, 1, INT32_MAX // self.num_layers),
        )
        rows = self.rows_per_layer
        if isinstance(rows, Sequence) or (isinstance(rows, np.ndarray) and rows.ndim):
            if len(rows) != self.num_layers:
                raise ValueError(
                    f"rows_per_layer must be an int or {self.num_layers} ints, one a layer, "
                    f"got {len(rows)}"
                )
            put(
                "rows_per_layer",
                tuple(
                    check_int(f"rows_per_layer[{layer}]", r, 0, self.num_experts)
                    for layer, r in enumerate(rows)
                ),
            )
        else:
            put("rows_per_layer", check_int("rows_per_layer", rows, 0, self.num_experts))
        if self.rows < 1:
            raise ValueError(
                f"rows_per_layer must sum to at least 1 pool row, got {self.rows_per_layer}"
            )
        put(
            "staging_rows",
            check_int("staging_rows", self.staging_rows, 1, INT32_MAX - self.rows),
        )
        put("width", check_int("width", self.width, 1, MAX_WIDTH))
        if self.width & (self.width - 1):
            raise ValueError(f"width must be a power of two, got {self.width}")
        if not isinstance(self.step_map, bool):
            raise TypeError(f"step_map must be True or False, got {self.step_map!r}")

    @classmethod
    def from_budget(
        cls, experts: Any, *, bank_bytes: float, top_k: int, max_tokens: int, step_map: bool = False
    ) -> PoolConfig:
        """The geometry of the largest bank that fits into `bank_bytes`.

        A row holds one expert of one layer, all leaves. Each of the `top_k * max_tokens` lanes of a step
        has its staging row; what is left of the budget are pool rows, as many as there are experts at
        most, dealt out to the layers evenly (the first layers have one more where it does not come out
        even). The width is the next power of two of the lanes.

        Args:
          experts: a pytree of arrays [L, E, ...], or a list or tuple of L pytrees of arrays [E, ...];
            mere shapes (`jax.ShapeDtypeStruct`) will do.
          bank_bytes: bytes of device memory for the bank's arrays.
          top_k: experts that the router picks for a token, 1 to E.
          max_tokens: tokens of a decode step; `top_k * max_tokens` may be 1024 at most.
          step_map: as the attribute.

        Raises:
          TypeError, ValueError: the experts do not fit each other, or the bank would be too small; the
            message has the least budget that is enough.
        """
        from pallas_pool.budget import config_of_budget

        return config_of_budget(
            experts, bank_bytes=bank_bytes, top_k=top_k, max_tokens=max_tokens, step_map=step_map
        )

    @property
    def layer_rows(self) -> tuple[int, ...]:
        """Bank rows that each layer starts with, one int a layer."""
        if isinstance(self.rows_per_layer, tuple):
            return self.rows_per_layer
        return (self.rows_per_layer,) * self.num_layers

    @property
    def rows(self) -> int:
        """Pool rows R."""
        return sum(self.layer_rows)

    @property
    def bank_rows(self) -> int:
        """Pool and staging rows, R + S."""
        return self.rows + self.staging_rows

    @property
    def keys(self) -> int:
        """Keys L * E; the key of an expert is `layer * E + expert`."""
        return self.num_layers * self.num_experts


def check_layer(config: PoolConfig, layer: Any) -> jax.Array:
    """Returns `layer` as an int32 scalar. A Python or NumPy int out of range is refused here; an array
    out of range makes every lane of the step invalid, on the device."""
    return layer_of(config.num_layers, layer)


def layer_of(layers: int, layer: Any) -> jax.Array:
    """`check_layer` by the number of layers."""
    if not isinstance(layer, jax.Array):
        layer = np.int32(check_int("layer", layer, 0, layers - 1))
    layer = jnp.asarray(layer)
    if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise TypeError(f"layer must be an integer scalar, got {layer.dtype}{list(layer.shape)}")
    return saturate_int32(layer)


def check_ids(expert_ids: Any) -> jax.Array:
    """Returns expert ids as an array of their shape, of some integer dtype."""
    if isinstance(expert_ids, (list, tuple)):
        expert_ids = np.asarray(expert_ids)
        if not expert_ids.size:
            expert_ids = expert_ids.astype(np.int32)
    ids = as_device_integers(expert_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"expert_ids must have an integer dtype, got {ids.dtype}")
    return ids


def check_weights(weights: Any) -> jax.Array:
    """Returns router weights as an array of their shape and of a float dtype that can be judged."""
    weights = jnp.asarray(weights)
    if weights.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(f"weights must be float16, bfloat16, float32 or float64, got {weights.dtype}")
    return weights


def check_lanes(
    config: PoolConfig, expert_ids: Any, weights: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Flattens ids and weights lane by lane, after checking dtypes and the number of lanes."""
    ids = check_ids(expert_ids)
    if ids.size > config.width:
        raise ValueError(
            f"expert_ids has {ids.size} lanes, more than the width {config.width} of the config"
        )
    if ids.size > config.staging_rows:
        raise ValueError(
            f"expert_ids has {ids.size} lanes, more than the {config.staging_rows} staging_rows "
            "of the config, and every lane may need one"
        )
    if weights is not None:
        weights = check_weights(weights)
        if weights.size != ids.size:
            raise ValueError(
                f"weights must have as many elements as expert_ids ({ids.size}), got {weights.size}"
            )
        weights = weights.reshape(-1)
    return ids.reshape(-1), weights


def as_device_integers(x: Any) -> jax.Array:
    """`jnp.asarray`, but what 32 bits do not hold becomes a value that is no id, no row, and no layer.

    Without 64-bit types JAX would wrap a large number of NumPy's round to a small, valid one.
    """
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype in (np.int64, np.uint64):
        x = np.clip(x, max(-2, np.iinfo(x.dtype).min), INT32_MAX)
    return jnp.asarray(x)


def saturate_int32(x: jax.Array) -> jax.Array:
    """int32 of integers of any dtype; what does not fit becomes a value that is no id, and no layer."""
    if x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        if jnp.issubdtype(x.dtype, jnp.signedinteger):
            x = jnp.maximum(x, jnp.asarray(-2, x.dtype))
        x = jnp.minimum(x, jnp.asarray(INT32_MAX, x.dtype))
    return x.astype(jnp.int32)


def valid_weight(weights: jax.Array) -> jax.Array:
    """Finite and not negative, judged by the bits: a float comparison may flush subnormals on one
    device and not on another."""
    bits_type = jnp.dtype(f"int{weights.dtype.itemsize * 8}")
    bits = jax.lax.bitcast_convert_type(weights, bits_type)
    infinity = np.array(np.inf, weights.dtype).view(bits_type)
    minus_zero = np.iinfo(bits_type).min
    return ((bits >= 0) & (bits < infinity)) | (bits == minus_zero)
