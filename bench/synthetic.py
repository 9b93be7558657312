"""Synthetic routing traces with a given locality."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench.traces import Trace


class Synthetic(NamedTuple):
    """What a synthetic trace is like.

    Attributes:
      tokens, layers, experts, top_k: its size; every token selects top_k distinct experts a layer.
      zipf: popularity: the n-th most popular expert of a layer is drawn in proportion to n**-zipf;
        0 makes all alike.
      reuse: temporal locality: the probability with which an expert that the token before selected
        in this layer is selected again, before the others are drawn.
      seed: of the random numbers.
    """

    tokens: int = 256
    layers: int = 16
    experts: int = 64
    top_k: int = 4
    zipf: float = 1.0
    reuse: float = 0.5
    seed: int = 0

    @classmethod
    def parse(cls, items: list[str]) -> Synthetic:
        """From texts like `tokens=100`; what is not named keeps its default.

        Raises:
          ValueError: naming the item that is wrong.
        """
        values = {}
        for item in items:
            name, _, text = item.partition("=")
            if name not in cls._fields:
                raise ValueError(f"{item!r} is none of {', '.join(f'{f}=' for f in cls._fields)}")
            kind = type(cls._field_defaults[name])
            try:
                values[name] = kind(text)
            except ValueError:
                raise ValueError(f"{item!r}: {text!r} is no {kind.__name__}") from None
        spec = cls(**values)
        for name in ("tokens", "layers", "top_k"):
            if getattr(spec, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(spec, name)}")
        if spec.experts < spec.top_k:
            raise ValueError(f"experts must be at least top_k, {spec.top_k}, got {spec.experts}")
        if not 0 <= spec.reuse <= 1:
            raise ValueError(f"reuse must be in [0, 1], got {spec.reuse}")
        if not 0 <= spec.zipf < np.inf:
            raise ValueError(f"zipf must be finite and at least 0, got {spec.zipf}")
        if spec.seed < 0:
            raise ValueError(f"seed must be at least 0, got {spec.seed}")
        return spec


def generate(spec: Synthetic) -> Trace:
    """Draws a trace. Which experts are popular differs from layer to layer."""
    rng = np.random.default_rng(spec.seed)
    popularity = -spec.zipf * np.log(np.arange(1, spec.experts + 1))
    popularity = rng.permuted(np.tile(popularity, (spec.layers, 1)), axis=1)
    ids = np.empty((spec.tokens, spec.layers, spec.top_k), np.int32)
    for token in range(spec.tokens):
        # The largest of log-weights with Gumbel noise are a weighted draw without replacement.
        score = popularity + rng.gumbel(size=popularity.shape)
        if token:
            layer, lane = np.nonzero(rng.random(ids.shape[1:]) < spec.reuse)
            score[layer, ids[token - 1, layer, lane]] = np.inf
        ids[token] = np.argsort(-score, axis=1, kind="stable")[:, : spec.top_k]
    return Trace(ids, tuple(range(spec.layers)))
