"""Greedy decoding with experts in host memory: `python examples/decode.py`, `--help` for its flags.

Prints the tokens, what the pool counted, and how the logits compare with those of the same model with all
experts on the device.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))  # The checkout that this stands in, installed or not.

import pallas_pool as pp
from examples import qwen3_moe

SIZES = {
    "vocabulary": 256,
    "layers": 4,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 16,
    "experts": 16,
    "top_k": 4,
    "expert_width": 32,
}
for name, size in SIZES.items():
    flags.DEFINE_integer(name, size, f"{name.replace('_', ' ')} of the model", lower_bound=1)
BUDGET = flags.DEFINE_float("budget", 0.4, "share of all experts that the pool has rows for", 0, 1)
BATCH = flags.DEFINE_integer("batch", 2, "sequences", lower_bound=1)
PROMPT = flags.DEFINE_integer("prompt", 16, "tokens of each random prompt", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 48, "tokens to decode", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of weights and activations")
WEIGHTS = flags.DEFINE_string(
    "weights",
    None,
    "an .npz file of the weights named as in examples/qwen3_moe.py, experts as gate, up and down; random "
    "ones by default",
)
UPDATES = flags.DEFINE_bool("prefill_updates", False, "whether the prompt may change the placement")
COMPARE = flags.DEFINE_bool("compare", True, "run the model with all experts on the device, too")


def load(model, dtype):
    """(weights, experts), given or random."""
    if WEIGHTS.value is None:
        return qwen3_moe.init_weights(model, dtype=dtype), qwen3_moe.init_experts(model, dtype=dtype)
    with np.load(WEIGHTS.value) as file:
        arrays = {key: np.asarray(file[key]).astype(dtype) for key in file.files}
    experts = {key: arrays.pop(key) for key in ("gate", "up", "down")}
    return jax.tree.map(jnp.asarray, arrays), experts


def decode(model, weights, make_moe, experts, pool, prompts, tokens, dtype):
    """Greedy decoding. `make_moe(experts)` is called while tracing.

    Returns:
      tokens [batch, tokens], logits [tokens, batch, vocabulary], and the pool.
    """
    batch, length = prompts.shape

    # One program a token, all layers in it. Pool and cache are donated: updated in place.
    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def run(weights, experts, pool, cache, tokens, start):
        return qwen3_moe.forward(model, weights, make_moe(experts), pool, cache, tokens, start)

    cache = qwen3_moe.init_cache(model, batch, length + tokens, dtype)
    logits, pool, cache = run(weights, experts, pool, cache, prompts, 0)
    all_tokens, all_logits = [jnp.argmax(logits, axis=-1)], [logits]
    for position in range(length, length + tokens - 1):
        logits, pool, cache = run(weights, experts, pool, cache, all_tokens[-1][:, None], position)
        all_tokens.append(jnp.argmax(logits, axis=-1))
        all_logits.append(logits)
    return np.stack(all_tokens, axis=1), np.stack(all_logits), pool


def main(argv):
    del argv
    model = qwen3_moe.Model(**{name: flags.FLAGS[name].value for name in SIZES})
    dtype = jnp.dtype(DTYPE.value)
    weights, experts = load(model, dtype)
    rng = np.random.default_rng(2)
    prompts = rng.integers(0, model.vocabulary, (BATCH.value, PROMPT.value), np.int32)

    lanes = BATCH.value * model.top_k
    rows = max(round(BUDGET.value * model.layers * model.experts), model.top_k) + lanes
    config = pp.PoolConfig.from_budget(
        experts,
        bank_bytes=rows * pp.expert_bytes(experts),
        top_k=model.top_k,
        max_tokens=BATCH.value,
    )
    host = pp.pin(experts)
    pool = pp.init_pool(config, host, counters=True)

    def from_pool(experts):
        return qwen3_moe.from_pool(config, experts, prefill_updates=UPDATES.value)

    run = functools.partial(decode, model, weights)
    tokens, logits, pool = run(from_pool, host, pool, prompts, TOKENS.value, dtype)
    pp.check_state(config, pool.state)
    for i, row in enumerate(tokens):
        print(f"sequence {i}: {' '.join(map(str, row))}")
    print(f"\n{config.rows} of {config.keys} experts resident, {config.staging_rows} staging rows")
    print(pp.counters_table(pool))

    if COMPARE.value:

        def on_device(experts):
            return qwen3_moe.on_device(experts, lanes)

        all_experts = jax.tree.map(jnp.asarray, experts)
        same_tokens, same, _ = run(on_device, all_experts, None, prompts, TOKENS.value, dtype)
        if np.array_equal(logits, same):
            print(f"\nAll {logits.size} logits equal those of all experts on the device, bit for bit.")
        else:
            difference = np.abs(logits - same).max()
            alike = (tokens == same_tokens).mean()
            print(f"\nLogits differ from those of all experts on the device by {difference:.3g} at most,")
            print(f"of up to {np.abs(same).max():.3g}; {alike:.1%} of the tokens are the same.")


if __name__ == "__main__":
    app.run(main)
