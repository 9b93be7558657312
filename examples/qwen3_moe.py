"""A small decoder in the style of Qwen3-MoE: grouped-query attention with rotary positions and normalised
queries and keys, a KV cache, and a router in front of gated experts.

`forward` does not know where the experts are: it calls `moe(pool, layer, x, expert_ids, weights)`, and
hands on what that returns. `from_pool` makes such a function of experts in host memory, `on_device` of the
same experts on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_pool as pp

SHARED = ("embedding", "head", "final_norm")  # The other weights are stacked, [layers, ...].

Weights = dict[str, jax.Array]
Moe = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes. Qwen3-30B-A3B has 151936, 48, 2048, 32, 4, 128, 128, 8, 768."""

    vocabulary: int = 256
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 16
    experts: int = 16
    top_k: int = 4
    expert_width: int = 32
    rope_theta: float = 1e6
    epsilon: float = 1e-6


class Cache(NamedTuple):
    """Keys and values of all positions so far, [layers, batch, positions, kv_heads, head_width]."""

    keys: jax.Array
    values: jax.Array


def init_weights(model: Model, seed: int = 0, dtype: Any = jnp.float32) -> Weights:
    """Random weights of everything but the experts; those of the layers are stacked."""
    d, q, kv = model.width, model.heads * model.head_width, model.kv_heads * model.head_width
    shapes = {
        "embedding": (model.vocabulary, d),
        "query": (model.layers, d, q),
        "key": (model.layers, d, kv),
        "value": (model.layers, d, kv),
        "attention_out": (model.layers, q, d),
        "router": (model.layers, d, model.experts),
        "head": (d, model.vocabulary),
    }
    norms = {
        "attention_norm": (model.layers, d),
        "query_norm": (model.layers, model.head_width),
        "key_norm": (model.layers, model.head_width),
        "moe_norm": (model.layers, d),
        "final_norm": (d,),
    }
    rng = np.random.default_rng(seed)
    weights = {name: _random(rng, shape, dtype) for name, shape in shapes.items()}
    return weights | {name: jnp.ones(shape, dtype) for name, shape in norms.items()}


def init_experts(model: Model, seed: int = 1, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    """Random experts [layers, experts, ...], as NumPy arrays."""
    inward = (model.layers, model.experts, model.width, model.expert_width)
    outward = (model.layers, model.experts, model.expert_width, model.width)
    rng = np.random.default_rng(seed)
    shapes = {"gate": inward, "up": inward, "down": outward}
    return {name: np.asarray(_random(rng, shape, dtype)) for name, shape in shapes.items()}


def _random(rng, shape, dtype):
    """Normal, so that a product with a vector keeps its scale."""
    return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-2] ** -0.5, dtype)


def init_cache(model: Model, batch: int, positions: int, dtype: Any = jnp.float32) -> Cache:
    shape = (model.layers, batch, positions, model.kv_heads, model.head_width)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def from_pool(config: pp.PoolConfig, experts: Any, **options: Any) -> Moe:
    """Experts in host memory, a pool of them on the device: the one line that differs."""

    def moe(pool, layer, x, expert_ids, weights):
        return pp.moe(config, pool, experts, layer, x, expert_ids, weights, **options)

    return moe


def on_device(experts: Any, decode_lanes: int) -> Moe:
    """All experts on the device, as one bank [layers * experts, ...]; the pool is passed on.

    Up to `decode_lanes` lanes by the same kernel as `pp.moe` uses for as many, more by its other one.
    """
    layers, per_layer = experts["gate"].shape[:2]
    bank = jax.tree.map(lambda leaf: leaf.reshape(layers * per_layer, *leaf.shape[2:]), experts)

    def moe(pool, layer, x, expert_ids, weights):
        ffn = pp.expert_ffn if expert_ids.size <= decode_lanes else pp.grouped_ffn
        top_k = expert_ids.shape[-1]
        rows = (layer * per_layer + expert_ids).reshape(-1, top_k)
        y = ffn(x.reshape(-1, x.shape[-1]), bank, rows, weights.reshape(-1, top_k))
        return y.reshape(x.shape), pool

    return moe


def forward(
    model: Model, weights: Weights, moe: Moe, pool: Any, cache: Cache, tokens: jax.Array, start: Any
) -> tuple[jax.Array, Any, Cache]:
    """Runs tokens [batch, n] at the positions from `start` on: a prompt, or one token each.

    Returns:
      float32 logits [batch, vocabulary] of what follows the last token, the pool, and the cache.
    """
    x = weights["embedding"][tokens]
    for layer in range(model.layers):
        own = {name: weights[name][layer] for name in weights if name not in SHARED}
        y, cache = attention(model, own, layer, cache, norm(model, x, own["attention_norm"]), start)
        x = x + y
        hidden = norm(model, x, own["moe_norm"])
        expert_ids, shares = route(model, own["router"], hidden)
        y, pool = moe(pool, layer, hidden, expert_ids, shares)
        x = x + y
    x = norm(model, x[:, -1], weights["final_norm"])
    return (x @ weights["head"]).astype(jnp.float32), pool, cache


def decode(
    model: Model,
    weights: Weights,
    make_moe: Callable[[Any], Moe],
    experts: Any,
    pool: Any,
    prompts: Any,
    length: int,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Greedy decoding of `length` tokens behind prompts [batch, n].

    The experts are an argument of the jitted program, not a constant of it: `make_moe(experts)` is called
    while it is traced.

    Returns:
      tokens [batch, length], logits [length, batch, vocabulary], and the pool.
    """

    # One program a token, all layers in it. Pool and cache are donated: updated in place.
    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def run(weights, experts, pool, cache, tokens, start):
        return forward(model, weights, make_moe(experts), pool, cache, tokens, start)

    batch, start = prompts.shape
    cache = init_cache(model, batch, start + length, weights["embedding"].dtype)
    logits, pool, cache = run(weights, experts, pool, cache, prompts, 0)
    all_tokens, all_logits = [jnp.argmax(logits, axis=-1)], [logits]
    for position in range(start, start + length - 1):
        logits, pool, cache = run(weights, experts, pool, cache, all_tokens[-1][:, None], position)
        all_tokens.append(jnp.argmax(logits, axis=-1))
        all_logits.append(logits)
    return np.stack(all_tokens, axis=1), np.stack(all_logits), pool


def route(model: Model, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Expert ids and weights [..., top_k]; the weights of a token sum to 1."""
    logits = jnp.einsum("...d,de->...e", x, router, preferred_element_type=jnp.float32)
    shares, expert_ids = lax.top_k(jax.nn.softmax(logits), model.top_k)
    return expert_ids, shares / shares.sum(-1, keepdims=True)


def attention(
    model: Model, w: Weights, layer: int, cache: Cache, x: jax.Array, start: Any
) -> tuple[jax.Array, Cache]:
    batch, n, _ = x.shape
    position = start + jnp.arange(n)

    def heads(name, count):
        return (x @ w[name]).reshape(batch, n, count, model.head_width)

    query = rotate(model, norm(model, heads("query", model.heads), w["query_norm"]), position)
    key = rotate(model, norm(model, heads("key", model.kv_heads), w["key_norm"]), position)
    value = heads("value", model.kv_heads)
    at = (layer, 0, start, 0, 0)
    cache = Cache(
        lax.dynamic_update_slice(cache.keys, key[None], at),
        lax.dynamic_update_slice(cache.values, value[None], at),
    )
    # Each key head serves a group of query heads.
    query = query.reshape(batch, n, model.kv_heads, -1, model.head_width)
    scores = jnp.einsum(
        "bnkgh,bpkh->bkgnp", query, cache.keys[layer], preferred_element_type=jnp.float32
    )
    seen = jnp.arange(cache.keys.shape[2]) <= position[:, None]
    scores = jnp.where(seen, scores * model.head_width**-0.5, -jnp.inf)
    shares = jax.nn.softmax(scores).astype(x.dtype)
    y = jnp.einsum("bkgnp,bpkh->bnkgh", shares, cache.values[layer])
    return y.reshape(batch, n, -1) @ w["attention_out"], cache


def norm(model: Model, x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm over the last axis."""
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + model.epsilon)
    return wide.astype(x.dtype) * scale


def rotate(model: Model, x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary positions of [batch, n, heads, head_width]: pairs are the halves of a head."""
    half = model.head_width // 2
    angle = position[:, None, None] * model.rope_theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
