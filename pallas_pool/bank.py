"""The two memories of a pool: experts pinned on the host, and the bank of rows on the device."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from pallas_pool.config import PoolConfig
from pallas_pool.copy_rows import (
    TUNING,
    Copies,
    as_words,
    check_host_memory,
    from_words,
    tuned,
)
from pallas_pool.devices import in_host_memory, sharding_platform
from pallas_pool.experts import Shapes, by_layer, check_experts, shapes_of
from pallas_pool.state import PoolState, check_geometry, init_state

# Below this a model is pinned before a progress bar could be read.
LARGE = 2**30
# What XLA lets all pinned arrays of a process take together where the variable is not set.
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_LIMIT = 64


def pin(experts: Any, *, device: Any = None, progress: bool = True) -> Any:
    """Puts experts into pinned host memory, where `copy_rows` reads them from.

    Leaf by leaf; arrays that are there already stay as they are. On a CPU, whose memory is all one, the
    arrays become plain JAX arrays, so that the same program runs there. A jitted function that makes
    large arrays in host memory should return `jax.device_put(x, jax.memory.Space.Host)` besides naming
    pinned memory in `out_shardings`: by the latter alone JAX takes them for arrays in device memory, and
    this function has to copy them.

    Args:
      experts: a pytree of NumPy or JAX arrays [L, E, ...], or a list or tuple of L pytrees of arrays
        [E, ...].
      device: the device whose programs will read the arrays, or a `Sharding` for all leaves. By default
        JAX arrays keep their devices, and others go to JAX's default device.
      progress: whether to show a progress bar (of `tqdm`, else lines on stderr) if it is 1 GiB or more.

    Returns:
      The same pytree of JAX arrays.

    Raises:
      TypeError, ValueError: the arrays do not fit each other, or are no arrays but traced or mere shapes.
      MemoryError: the host has no room, or JAX allows no more pinned memory: the message says how to
        raise the limit.
    """
    shapes = shapes_of(experts)
    total = shapes.row_bytes * shapes.experts * shapes.layers
    _check_pinnable(experts, device)
    leaves, tree = jax.tree.flatten(experts)
    shardings = [_pinned_sharding(leaf, device) for leaf in leaves]
    moving = [
        sharding for leaf, sharding in zip(leaves, shardings, strict=True) if not in_host_memory(leaf)
    ]
    if any(sharding.memory_kind == "pinned_host" for sharding in moving):
        _warn_of_limit(total)
    pinned = []
    done = 0
    with _progress(total if progress else 0) as advance:
        for leaf, sharding in zip(leaves, shardings, strict=True):
            try:
                moved = jax.device_put(leaf, sharding)
                if sharding.memory_kind == "pinned_host" and not in_host_memory(moved):
                    # There already by the out_shardings of a jitted function, but JAX takes its type for
                    # one of device memory, and so would a trace.
                    moved = jax.device_put(moved, jax.memory.Space.Host)
                pinned.append(jax.block_until_ready(moved))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise MemoryError(
                    f"pinned host memory ran out after {_gigabytes(done)} of the experts' "
                    f"{_gigabytes(total)}. {_limit_advice(total)}. If the limit is high enough, the host "
                    "has too little memory"
                ) from error
            done += pinned[-1].nbytes
            advance(pinned[-1].nbytes)
    return jax.tree.unflatten(tree, pinned)


def init_bank(config: PoolConfig, experts: Any, state: PoolState | None = None) -> Any:
    """Makes the bank: the rows on the device, with the residents of a state loaded.

    The residents are read from host memory row by row; no more than the bank itself is allocated on the
    device.

    Args:
      config: the geometry.
      experts: a pytree of arrays [L, E, ...], or a list or tuple of L pytrees of arrays [E, ...], in
        pinned host memory (`pin`).
      state: whose residents are loaded; by default those of `init_state(config)`. Of a state that went
        on since, or came from a checkpoint, it loads the residents of now.

    Returns:
      A pytree with the structure of one layer, of arrays [R+S, ...] on the device. The staging rows are
      zero.

    Raises:
      TypeError, ValueError: experts or state do not fit the config, or the experts are not in host
        memory where the device is a GPU.
    """
    if not isinstance(config, PoolConfig):
        raise TypeError(f"config must be a PoolConfig, got {type(config).__name__}")
    if state is None:
        state = init_state(config)
    check_geometry(config, state)
    shapes = check_experts(config, experts)
    check_host_memory(experts)
    return _load(config, shapes, experts, state.row_key[: config.rows])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _load(config: PoolConfig, shapes: Shapes, experts: Any, keys: jax.Array) -> Any:
    return lax.platform_dependent(
        experts,
        keys,
        cuda=functools.partial(_load_by_kernel, config, shapes),
        default=functools.partial(_load_by_gather, config, shapes),
    )


def _load_by_kernel(config: PoolConfig, shapes: Shapes, experts: Any, keys: jax.Array) -> Any:
    """`copy_rows` with a list of all pool rows. It skips an entry whose source is of another layer."""
    rows = [jnp.zeros((config.bank_rows, *row.shape), row.dtype) for row in shapes.rows]
    bank = jax.tree.unflatten(shapes.tree, rows)
    places = jnp.arange(config.rows, dtype=jnp.int32)

    def load(bank, experts, first_key):
        return tuned(TUNING, bank, experts, 0, Copies(keys - first_key, places, config.rows), False)

    if by_layer(experts):
        for layer, each in enumerate(experts):
            bank = load(bank, [each], layer * config.num_experts)
        return bank
    # As one layer that has all experts, a key is an expert's number.
    return load(bank, jax.tree.map(lambda x: x.reshape(1, config.keys, *x.shape[2:]), experts), 0)


def _load_by_gather(config: PoolConfig, shapes: Shapes, experts: Any, keys: jax.Array) -> Any:
    """The same in XLA, where host and device memory are one. It moves words: of small floats, XLA for a
    CPU may widen and narrow each on the way, and a NaN comes out with other bits. Even of words it makes
    floats too early if one is chosen between two, so that staging rows are some row times 0."""
    if any(map(in_host_memory, jax.tree.leaves(experts))):
        experts = jax.device_put(experts, jax.memory.Space.Device)
    layers = experts if by_layer(experts) else [experts]
    lead = 1 if by_layer(experts) else 2
    every_key = jnp.pad(keys, (0, config.staging_rows))
    is_pool_row = jnp.arange(config.bank_rows) < config.rows

    def rows(row, *leaves):
        words = jnp.concatenate([_flat(as_words(x, lead)) for x in leaves])
        like = jax.ShapeDtypeStruct((config.bank_rows, *row.shape), row.dtype)
        return from_words(words[every_key] * is_pool_row.astype(words.dtype)[:, None], like)

    leaves = map(rows, shapes.rows, *map(jax.tree.leaves, layers))
    return jax.tree.unflatten(shapes.tree, leaves)


def _flat(words: jax.Array) -> jax.Array:
    """[L, E, n] or [E, n] as [keys, n]."""
    return words.reshape(math.prod(words.shape[:-1]), words.shape[-1])


def _check_pinnable(experts: Any, device: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(experts)[0]:
        if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            what = "a traced array" if isinstance(leaf, jax.core.Tracer) else "a mere shape"
            raise TypeError(
                f"experts{jax.tree_util.keystr(path)} must be a NumPy or JAX array to be pinned, got {what}: "
                "pin outside of jitted functions, and pass them what pin returned"
            )
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        raise TypeError(f"device must be a JAX device or a Sharding, got {device!r}")


def _pinned_sharding(leaf: Any, device: Any) -> Any:
    """Where a leaf goes: pinned memory of the host of its devices, except on a CPU."""
    if isinstance(device, jax.sharding.Sharding):
        sharding = device
    elif device is not None:
        sharding = SingleDeviceSharding(device)
    elif isinstance(leaf, jax.Array):
        sharding = leaf.sharding
    else:
        sharding = jnp.zeros(0).sharding  # Of the default device.
    if sharding_platform(sharding) == "cpu":
        return sharding
    return sharding.with_memory_kind("pinned_host")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _limit() -> int | None:
    """GiB of pinned memory that XLA allows this process; None if the variable makes no sense."""
    try:
        return int(os.environ.get(LIMIT) or DEFAULT_LIMIT)
    except ValueError:
        return None


def _limit_advice(total: int) -> str:
    enough = total // 2**30 + 8
    return (
        f"JAX pins at most {LIMIT} GiB, {DEFAULT_LIMIT} where that environment variable is not set, and it "
        f"is {os.environ.get(LIMIT, 'not set')} here: set {LIMIT}={enough} or more before JAX starts"
    )


def _warn_of_limit(total: int) -> None:
    limit = _limit()
    if limit is not None and total > limit * 2**30:
        warnings.warn(
            f"experts of {_gigabytes(total)} will not fit into pinned memory. {_limit_advice(total)}",
            stacklevel=3,
        )


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], Any]]:
    """What to call with the bytes of each leaf."""
    if total < LARGE:
        yield lambda size: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        done = 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            print(f"pin: {_gigabytes(done)} of {_gigabytes(total)} (tqdm has a bar)", file=sys.stderr)

        yield advance
        return
    with tqdm(total=total, desc="pin", unit="B", unit_scale=True) as bar:
        yield bar.update
