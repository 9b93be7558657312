"""The decode step that bench/decode.py times: shapes, weights made on the fly, and its variants.

A step of one token a sequence is, in each layer, a dense block of the size of attention's projections
(queries, keys, values, output), the router, and the experts; then the head over the vocabulary. So it
reads the weights that a decode step of such a model reads. It leaves out the KV cache, rotary embedding,
shared experts and sampling. Which experts a layer selects is forced; their weights are the router's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

import pallas_pool as pp
from bench.synthetic import Synthetic

DTYPE = jnp.bfloat16
MEMBERS = 16  # The least rows of a matrix product of the dense blocks.


class Shape(NamedTuple):
    """A model's shape.

    Attributes:
      name: of the shape.
      layers, experts, top_k: MoE layers, experts of each, experts that a token selects.
      d, f: width of the model, and of an expert.
      q, kv: width of all queries, and of all keys.
      vocab: of the head.
      trace: file name of a recorded trace of this model, or None.
      generated: the routing where there is no recorded trace.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    d: int
    f: int
    q: int
    kv: int
    vocab: int
    trace: str | None
    generated: Synthetic

    @property
    def leaves(self) -> dict[str, tuple[int, int]]:
        """Shapes of one expert's weights."""
        return {"gate": (self.d, self.f), "up": (self.d, self.f), "down": (self.f, self.d)}

    @property
    def expert_bytes(self) -> int:
        return 3 * self.d * self.f * DTYPE.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.experts * self.expert_bytes


def _generated(layers: int, experts: int, top_k: int, tokens: int) -> Synthetic:
    # In the recorded trace of Qwen3-30B-A3B a token selects 37% of the experts that the token before
    # selected; popularity by Zipf's law and reuse of a quarter give that share, too.
    return Synthetic(tokens, layers, experts, top_k, zipf=1.0, reuse=0.25)


SHAPES = {
    shape.name: shape
    for shape in (
        # Qwen3-30B-A3B.
        Shape(
            "qwen3-30b-a3b", 48, 128, 8, 2048, 768, 4096, 512, 151936,
            "qwen3-30b-a3b.npy", _generated(48, 128, 8, 156),
        ),
        # Experts of Qwen3-Next-80B-A3B, between dense blocks of the size above.
        Shape(
            "moe-512", 48, 512, 10, 2048, 512, 4096, 512, 151936,
            None, _generated(48, 512, 10, 64),
        ),
        # For a check where there is no GPU.
        Shape("check", 2, 16, 2, 32, 16, 32, 16, 96, None, _generated(2, 16, 2, 12)),
    )
}  # fmt: skip


class Dense(NamedTuple):
    """Weights of a layer that are no expert's: [d, q + 2 kv], [q, d], [d, E]."""

    projections: jax.Array
    out: jax.Array
    router: jax.Array


class Params(NamedTuple):
    """Weights that stay on the device: of each layer, and the head [d, vocab]. Without the dense part
    there are no layers, and the head is None."""

    layers: tuple[Dense, ...]
    head: jax.Array | None


class Forced(NamedTuple):
    """What the steps are made to follow, on the device.

    Attributes:
      ids: [steps, L, batch, k] experts, -1 for none.
      embedding: [steps, batch, d] what each step starts from.
    """

    ids: jax.Array
    embedding: jax.Array


class Carry(NamedTuple):
    """What one step hands to the next; donated.

    Attributes:
      pool: the `Pool`, or () where a variant has none.
      step: [] the next step.
      hidden: [steps, batch, d] float32: what each step ended with, before the head.
      tokens: [steps, batch] what the head chose; 0 without a head.
    """

    pool: Any
    step: jax.Array
    hidden: jax.Array
    tokens: jax.Array


# (pool, layer, x [batch, d], ids, weights) -> (y, pool)
Moe = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def device_sharding() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="device")


def host_sharding() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def _hashed(shape: tuple[int, ...], std: float, seed: jax.Array) -> jax.Array:
    """Numbers of mean 0 that differ from place to place and from seed to seed: cheaper than random bits."""
    index = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    x = index * jnp.uint32(2654435761) + seed * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    uniform = ((x ^ (x >> 16)) >> 8).astype(jnp.float32) * 2.0**-24 - 0.5
    return (uniform * (std * math.sqrt(12))).astype(DTYPE)


@functools.cache
def _maker(host: bool) -> Any:
    """Not made on import, for that would start JAX."""
    if not host:
        return jax.jit(_hashed, static_argnums=(0, 1))

    def hosted(shape: tuple[int, ...], std: float, seed: jax.Array) -> jax.Array:
        # By out_shardings alone JAX would take the result for one in device memory.
        return jax.device_put(_hashed(shape, std, seed), jax.memory.Space.Host)

    return jax.jit(hosted, static_argnums=(0, 1), out_shardings=host_sharding())


def make(shape: tuple[int, ...], seed: int, std: float | None = None, host: bool = False) -> jax.Array:
    """Weights in bfloat16, by default of the size that keeps activations as they are, made on the device;
    with `host` they end in pinned host memory."""
    std = 1 / math.sqrt(shape[-2]) if std is None else std
    return _maker(host)(shape, std, jnp.uint32(seed))


def host_layer(shape: Shape, layer: int) -> dict[str, jax.Array]:
    """The experts of one layer, [E, ...] each leaf, in pinned host memory."""
    return {
        name: make((shape.experts, *size), 3 * layer + i, host=True)
        for i, (name, size) in enumerate(shape.leaves.items())
    }


def make_params(shape: Shape, dense: bool) -> Params:
    """The weights that stay on the device."""
    if not dense:
        return Params((), None)
    layers = []
    for layer in range(shape.layers):
        seed = 10_000 + 3 * layer
        layers.append(
            Dense(
                make((shape.d, shape.q + 2 * shape.kv), seed),
                make((shape.q, shape.d), seed + 1),
                make((shape.d, shape.experts), seed + 2),
            )
        )
    return Params(tuple(layers), make((shape.d, shape.vocab), 9_999))


def make_forced(shape: Shape, ids: Any) -> Forced:
    """Uploads the routing [steps, L, batch, k]."""
    steps, _, batch, _ = ids.shape
    return Forced(jnp.asarray(ids), make((steps, batch, shape.d), 9_998, std=1.0))


def make_carry(forced: Forced, pool: Any, step: int = 0) -> Carry:
    """The carry before a step."""
    return Carry(
        pool,
        jnp.int32(step),
        jnp.zeros(forced.embedding.shape, jnp.float32),
        jnp.zeros(forced.embedding.shape[:2], jnp.int32),
    )


def dense_bytes(params: Params) -> int:
    """Bytes of dense weights that a step reads."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _norm(x: jax.Array) -> jax.Array:
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)).astype(DTYPE)


def _dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    """A product with at least MEMBERS rows: of a single row XLA makes a sum of products in memory."""
    rows = len(x)
    padded = jnp.pad(x, ((0, max(0, MEMBERS - rows)), (0, 0)))
    return (padded @ weights)[:rows]


def _attention_like(shape: Shape, dense: Dense, x: jax.Array) -> jax.Array:
    """The projections of an attention block; between them every query gates the keys and values of its
    group, so that all of the projections is needed."""
    projected = _dot(x, dense.projections)
    q, k, v = jnp.split(projected, (shape.q, shape.q + shape.kv), axis=-1)
    groups = q.reshape(*q.shape[:-1], -1, shape.kv)
    mixed = jax.nn.sigmoid(groups) * (k + v)[..., None, :]
    return _dot(mixed.reshape(q.shape), dense.out)


def _router_weights(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """[batch, k] float32: softmax over the forced experts, 0 where there is none."""
    chosen = jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=-1).astype(jnp.float32)
    share = jax.nn.softmax(jnp.where(ids >= 0, chosen, -jnp.inf), axis=-1)
    return jnp.where(ids >= 0, share, 0.0)


def decode_step(
    shape: Shape, moe: Moe, params: Params, forced: Forced, carry: Carry
) -> tuple[Carry, jax.Array]:
    """One token of every sequence: the next carry, and the tokens chosen, which are not donated and can
    be waited for."""
    ids = lax.dynamic_index_in_dim(forced.ids, carry.step, keepdims=False)
    x = lax.dynamic_index_in_dim(forced.embedding, carry.step, keepdims=False).astype(jnp.float32)
    pool = carry.pool
    for layer in range(shape.layers):
        if params.layers:
            dense = params.layers[layer]
            x += _attention_like(shape, dense, _norm(x)).astype(jnp.float32)
            h = _norm(x)
            weights = _router_weights(_dot(h, dense.router), ids[layer])
        else:
            h = _norm(x)
            weights = _router_weights(jnp.zeros((len(x), shape.experts)), ids[layer])
        y, pool = moe(pool, layer, h, ids[layer], weights)
        x += y.astype(jnp.float32)
    if params.head is None:
        chosen = jnp.zeros(len(x), jnp.int32)
    else:
        chosen = jnp.argmax(_dot(_norm(x), params.head), axis=-1).astype(jnp.int32)
    hidden = lax.dynamic_update_index_in_dim(carry.hidden, x, carry.step, 0)
    tokens = lax.dynamic_update_index_in_dim(carry.tokens, chosen, carry.step, 0)
    return Carry(pool, carry.step + 1, hidden, tokens), chosen


def pool_moe(config: pp.PoolConfig, kernel: str, experts: Sequence[Any]) -> Moe:
    """The library: `pp.moe` on a pool."""

    def moe(pool, layer, x, ids, weights):
        return pp.moe(config, pool, experts, layer, x, ids, weights, kernel=kernel)

    return moe


def resident_moe(shape: Shape, distinct: int, bank: Any) -> Moe:
    """Every expert has a row of the bank, and nothing is planned: the upper bound."""

    def moe(pool, layer, x, ids, weights):
        routes = jnp.where(ids >= 0, ids + (layer % distinct) * shape.experts, -1)
        return pp.expert_ffn(x, bank, routes, weights), pool

    return moe


def offload_moe(experts: Sequence[Any]) -> Moe:
    """What JAX offers without a library: each layer's experts are moved to the device as a whole, and a
    gather picks those that are needed. XLA moves all layers as early as it can, and so holds them all; a
    barrier between them did not keep it from that."""

    def moe(pool, layer, x, ids, weights):
        # Named by its memory space: with a sharding, JAX would leave the move out.
        moved = jax.device_put(experts[layer], jax.memory.Space.Device)
        rows = {name: leaf[jnp.maximum(ids, 0)] for name, leaf in moved.items()}

        def dot(pattern, a, b):
            return jnp.einsum(pattern, a, b, preferred_element_type=jnp.float32)

        gate = jax.nn.silu(dot("bd,bkdf->bkf", x, rows["gate"]))
        hidden = (gate * dot("bd,bkdf->bkf", x, rows["up"])).astype(DTYPE)
        y = dot("bkf,bkfd->bkd", hidden, rows["down"])
        return jnp.einsum("bk,bkd->bd", weights, y).astype(x.dtype), pool

    return moe
