"""Routing that a decode benchmark is forced to follow: a recorded trace, or a generated one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_pool as pp
from bench import synthetic, traces
from bench.manifest import ROOT

TRACES = ROOT.parent / "shared" / "traces"


class Routing(NamedTuple):
    """Which experts every token selects.

    Attributes:
      ids: [tokens, L, k] int32, -1 for none.
      source: where they come from, as a sentence.
    """

    ids: np.ndarray
    source: str


class Counts(NamedTuple):
    """What the planner does at each step, summed over the layers: [steps] int each.

    Attributes:
      selected: distinct experts, a layer at a time.
      promoted: experts copied into a pool row.
      staged: experts copied into a staging row.
    """

    selected: np.ndarray
    promoted: np.ndarray
    staged: np.ndarray

    @property
    def copied(self) -> np.ndarray:
        return self.promoted + self.staged


def recorded(path: Path, layers: int, experts: int, tokens: int) -> Routing:
    """The first tokens and layers of a trace; 0 tokens: all.

    Raises:
      TraceError: the file is no trace, or has fewer layers.
    """
    trace = traces.read(path, experts)
    if trace.ids.shape[1] < layers:
        raise traces.TraceError(f"{path}: {trace.ids.shape[1]} layers, fewer than {layers}")
    ids = trace.ids[: tokens or None, :layers]
    text = f"the first {len(ids)} tokens of {path.name}, recorded with top-{ids.shape[2]}"
    return Routing(ids, text)


def generated(spec: synthetic.Synthetic) -> Routing:
    """A trace with the popularity and the locality that `spec` names."""
    text = ", ".join(f"{name}={value}" for name, value in spec._asdict().items())
    return Routing(synthetic.generate(spec).ids, f"generated: {text}")


def locality(ids: np.ndarray) -> float:
    """The share of a token's selections that the token before made in the same layer."""
    again = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(3) & (ids[1:] >= 0)
    return float(again.sum() / max(1, (ids[1:] >= 0).sum()))


def for_batch(ids: np.ndarray, batch: int) -> np.ndarray:
    """[steps, L, batch, k]: the trace cut into `batch` segments of equal length, decoded side by side,
    so that one pass over all steps plays every token once.

    Raises:
      ValueError: fewer tokens than sequences.
    """
    steps = len(ids) // batch
    if not steps:
        raise ValueError(f"{len(ids)} tokens of routing are too few for batch {batch}")
    segments = ids[: steps * batch].reshape(batch, steps, *ids.shape[1:])
    return np.ascontiguousarray(segments.transpose(1, 2, 0, 3))


@functools.partial(jax.jit, static_argnums=0)
def _play(config: pp.PoolConfig, cut: jax.Array, state: pp.PoolState, ids: jax.Array) -> Any:
    """The steps [steps, L, lanes]: the states before step `cut` and at the end, and promoted and staged
    experts of each step, [steps]."""
    layers = jnp.arange(config.num_layers, dtype=jnp.int32)

    def layer_step(state, x):
        plan, state = pp.step(config, state, *x)
        return state, (plan.promoted_count, plan.staged_count)

    def token(carry, x):
        (state, kept), (step, lanes) = carry, x
        kept = jax.tree.map(lambda new, old: jnp.where(step == cut, new, old), state, kept)
        state, (promoted, staged) = lax.scan(layer_step, state, (layers, lanes))
        return (state, kept), (promoted.sum(), staged.sum())

    steps = jnp.arange(len(ids), dtype=jnp.int32)
    return lax.scan(token, (state, state), (steps, ids))


class Played(NamedTuple):
    """Steps played through the planner alone.

    Attributes:
      counts: of every step.
      before: the state before the step that was asked for.
      end: the state after the last.
    """

    counts: Counts
    before: pp.PoolState
    end: pp.PoolState


def play(config: pp.PoolConfig, state: pp.PoolState, ids: np.ndarray, cut: int = 0) -> Played:
    """Plays steps [steps, L, batch, k] through the planner, without any weights.

    Forced routing makes every plan known beforehand: this gives the rows that each step copies, and
    the state that a decode of the same steps must end with; and the state before step `cut`.
    """
    flat = ids.reshape(*ids.shape[:2], -1)
    (end, before), counts = _play(config, jnp.int32(cut), state, jnp.asarray(flat))
    selected = traces.selected_lanes(flat).sum((1, 2))
    counts = Counts(selected, *(np.asarray(each) for each in counts))
    return Played(counts, end if cut >= len(ids) else before, end)
