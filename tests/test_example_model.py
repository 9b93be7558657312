"""The example decoder: the same logits, bit for bit, with experts in host memory and on the device."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
from examples import qwen3_moe
from tests.moe_support import KERNEL

MODEL = qwen3_moe.Model(
    vocabulary=32,
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_width=8,
    experts=8,
    top_k=2,
    expert_width=8,
)
BATCH, LENGTH = 2, 220
LANES = BATCH * MODEL.top_k


@pytest.fixture(autouse=True)
def full_precision():
    """A GPU would multiply float32 with fewer bits outside the kernels."""
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def weights():
    return qwen3_moe.init_weights(MODEL)


@functools.cache
def experts():
    return qwen3_moe.init_experts(MODEL)


def config():
    """Rows for 5 of the 16 experts."""
    size = (5 + LANES) * pp.expert_bytes(experts())
    return pp.PoolConfig.from_budget(experts(), bank_bytes=size, top_k=MODEL.top_k, max_tokens=BATCH)


@functools.cache
def from_pool():
    """(tokens, logits, pool) of a long greedy decoding from a pool."""
    make = functools.partial(qwen3_moe.from_pool, config(), kernel=KERNEL)
    host = pp.pin(experts())
    pool = pp.init_pool(config(), host, counters=True)
    prompts = np.array([[3], [17]], np.int32)
    return qwen3_moe.decode(MODEL, weights(), make, host, pool, prompts, LENGTH)


def test_logits_equal_those_of_all_experts_on_the_device():
    tokens, logits, pool = from_pool()
    on_device = functools.partial(qwen3_moe.on_device, decode_lanes=LANES)
    all_experts = jax.tree.map(jnp.asarray, experts())
    prompts = np.array([[3], [17]], np.int32)
    same_tokens, same, _ = qwen3_moe.decode(
        MODEL, weights(), on_device, all_experts, None, prompts, LENGTH
    )
    np.testing.assert_array_equal(logits, same)
    np.testing.assert_array_equal(tokens, same_tokens)
    pp.check_state(config(), pool.state)
    read = pp.read_counters(pool)
    assert (read["calls"] == LENGTH).all()
    assert (read["promotions"] > LENGTH // 4).all()  # Each of them evicted.
    assert len(set(tokens.ravel().tolist())) > 4


def plain_moe(pool, layer, x, expert_ids, shares):
    gate, up, down = (jnp.asarray(experts()[name][layer])[expert_ids] for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("bnd,bnkdf->bnkf", x, gate)) * jnp.einsum("bnd,bnkdf->bnkf", x, up)
    return jnp.einsum("bnkf,bnkfd,bnk->bnd", hidden, down, shares), pool


def test_logits_are_close_to_those_of_plain_einsums():
    """The same tokens, one by one."""
    tokens, logits, _ = from_pool()
    run = jax.jit(functools.partial(qwen3_moe.forward, MODEL, weights(), plain_moe, None))
    cache = qwen3_moe.init_cache(MODEL, BATCH, LENGTH)
    given = np.concatenate([np.array([[3], [17]]), tokens], axis=1)
    for position in range(LENGTH):
        want, _, cache = run(cache, given[:, position : position + 1], position)
        np.testing.assert_allclose(logits[position], want, rtol=1e-3, atol=1e-3)


def test_a_prompt_at_once_is_close_to_its_tokens_one_by_one():
    """Many lanes: the prefill path."""
    tokens, logits, _ = from_pool()
    count = 12
    given = np.concatenate([np.array([[3], [17]]), tokens], axis=1)[:, : count + 1].astype(np.int32)
    make = functools.partial(qwen3_moe.from_pool, config(), kernel=KERNEL)
    host = pp.pin(experts())
    pool = pp.init_pool(config(), host, counters=True)
    got_tokens, got, pool = qwen3_moe.decode(MODEL, weights(), make, host, pool, given, 1)
    np.testing.assert_allclose(got[0], logits[count], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(got_tokens[:, 0], tokens[:, count])
    assert pp.read_counters(pool)["staged"].min() > 0
    pp.check_state(config(), pool.state)


def test_positions_are_rotated_so_that_only_their_distance_counts():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, 1, 1, MODEL.head_width)).astype(np.float32)

    def score(at_query, at_key):
        a = qwen3_moe.rotate(MODEL, query, jnp.array([at_query]))
        return float(jnp.sum(a * qwen3_moe.rotate(MODEL, key, jnp.array([at_key]))))

    assert score(7, 4) == pytest.approx(score(103, 100), rel=1e-3)
    assert score(7, 4) != pytest.approx(score(7, 5), rel=1e-3)


def test_router_weights_sum_to_one():
    x = np.random.default_rng(1).standard_normal((3, 5, MODEL.width)).astype(np.float32)
    ids, shares = qwen3_moe.route(MODEL, weights()["router"][0], x)
    assert ids.shape == shares.shape == (3, 5, MODEL.top_k)
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-6)
    assert (np.diff(np.asarray(shares)) <= 0).all()


def test_the_script_runs_with_given_weights(tmp_path):
    root = Path(__file__).parents[1]
    model = qwen3_moe.Model(vocabulary=16, layers=1, width=16, heads=2, kv_heads=1, head_width=8)
    given = qwen3_moe.init_weights(model) | qwen3_moe.init_experts(model)
    np.savez(tmp_path / "weights.npz", **given)
    sizes = [f"--{name}={getattr(model, name)}" for name in ("vocabulary", "layers", "width", "heads")]
    sizes += ["--kv_heads=1", "--head_width=8", "--batch=1", "--prompt=1", "--tokens=4"]
    command = [sys.executable, "examples/decode.py", f"--weights={tmp_path / 'weights.npz'}", *sizes]
    done = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sequence 0: " in done.stdout and "hit rate" in done.stdout
    if jax.default_backend() == "cpu":
        assert "bit for bit" in done.stdout
