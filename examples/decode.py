"""Greedy decoding with experts in host memory: `python examples/decode.py`, `--help` for its flags.

Prints the tokens, what the pool counted, and how the logits compare with those of the same model with all
experts on the device. Needs absl-py, which the extras `bench`, `compile` and `test` install.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))  # The checkout that this stands in, installed or not.

import pallas_pool as pp
from examples import qwen3_moe

SIZES = [field for field in dataclasses.fields(qwen3_moe.Model) if field.type == "int"]
for size in SIZES:
    flags.DEFINE_integer(size.name, size.default, "of the model", lower_bound=1)
# All kernels decide alike. Interpreted, where there is no GPU, this one compiles faster.
KERNEL = "fused" if jax.default_backend() == "gpu" else "masked"
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


def main(argv):
    del argv
    model = qwen3_moe.Model(**{size.name: flags.FLAGS[size.name].value for size in SIZES})
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
        return qwen3_moe.from_pool(config, experts, kernel=KERNEL, prefill_updates=UPDATES.value)

    length = TOKENS.value
    tokens, logits, pool = qwen3_moe.decode(model, weights, from_pool, host, pool, prompts, length)
    pp.check_state(config, pool.state)
    for i, row in enumerate(tokens):
        print(f"sequence {i}: {' '.join(map(str, row))}")
    print(f"\n{config.rows} of {config.keys} experts resident, {config.staging_rows} staging rows")
    print(pp.counters_table(pool))

    if COMPARE.value:

        def on_device(experts):
            return qwen3_moe.on_device(experts, lanes)

        all_experts = jax.tree.map(jnp.asarray, experts)
        same_tokens, same, _ = qwen3_moe.decode(
            model, weights, on_device, all_experts, None, prompts, length
        )
        if np.array_equal(logits, same):
            print(f"\nAll {logits.size} logits equal those of all experts on the device, bit for bit.")
        else:
            difference = np.abs(logits - same).max()
            alike = (tokens == same_tokens).mean()
            print(f"\nLogits differ from those of all experts on the device by {difference:.3g} at most,")
            print(f"of up to {np.abs(same).max():.3g}; {alike:.1%} of the tokens are the same.")


if __name__ == "__main__":
    app.run(main)
