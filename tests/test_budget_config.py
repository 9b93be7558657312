"""`PoolConfig.from_budget`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp

# 48 layers of 128 experts of 9.4 MB, as mere shapes.
QWEN = {
    name: jax.ShapeDtypeStruct((48, 128, *row), jnp.bfloat16)
    for name, row in {"gate": (2048, 768), "up": (2048, 768), "down": (768, 2048)}.items()
}
ROW = 3 * 2048 * 768 * 2
SMALL = {"a": np.zeros((3, 6, 5), np.float32), "s": np.zeros((3, 6), np.float16)}  # 22 bytes a row


def test_the_whole_budget_is_used_and_no_more():
    config = pp.PoolConfig.from_budget(QWEN, bank_bytes=10e9, top_k=8, max_tokens=4)
    assert (config.num_layers, config.num_experts) == (48, 128)
    assert (config.staging_rows, config.width, config.step_map) == (32, 32, False)
    assert config.bank_rows * ROW <= 10e9 < (config.bank_rows + 1) * ROW
    assert max(config.layer_rows) - min(config.layer_rows) <= 1


@pytest.mark.parametrize(
    "rows, layer_rows", [(9, (2, 2, 1)), (10, 2), (100, 6), (22, 6), (21, (6, 6, 5)), (6, (1, 1, 0))]
)
def test_rows_are_dealt_out_evenly_and_never_exceed_the_experts(rows, layer_rows):
    config = pp.PoolConfig.from_budget(SMALL, bank_bytes=rows * 22, top_k=2, max_tokens=2)
    assert config == pp.PoolConfig(3, 6, layer_rows, 4, 4, step_map=False)


def test_the_bank_of_the_config_has_that_size():
    config = pp.PoolConfig.from_budget(SMALL, bank_bytes=12 * 22 + 21, top_k=2, max_tokens=2, step_map=True)
    bank = pp.init_bank(config, pp.pin(SMALL))
    assert sum(x.nbytes for x in jax.tree.leaves(bank)) == 12 * 22
    assert config.step_map


def test_lanes_are_a_power_of_two_and_staging_rows_are_as_many_as_are_needed():
    config = pp.PoolConfig.from_budget(SMALL, bank_bytes=10**4, top_k=3, max_tokens=3)
    assert (config.width, config.staging_rows) == (16, 9)
    state = pp.init_state(config)
    jax.eval_shape(lambda: pp.step(config, state, 0, np.zeros((3, 3), np.int32)))  # All lanes find room.


@pytest.mark.parametrize("top_k, max_tokens", [(1, 1), (2, 3), (6, 1)])
def test_the_least_budget_that_the_message_names_is_the_least(top_k, max_tokens):
    def make(bank_bytes):
        return pp.PoolConfig.from_budget(SMALL, bank_bytes=bank_bytes, top_k=top_k, max_tokens=max_tokens)

    least = (top_k * max_tokens + top_k) * 22
    for budget in (0, 21, least - 1):
        with pytest.raises(ValueError, match=f"bank_bytes={budget} holds .* Give bank_bytes={least} or more"):
            make(budget)
    assert make(least).rows == top_k


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"top_k": 7}, ValueError, r"top_k must be in \[1, 6\], got 7"),
        ({"top_k": 0}, ValueError, r"top_k must be in \[1, 6\], got 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be in"),
        ({"max_tokens": 513}, ValueError, "1026 lanes.*lower max_tokens to 512 or less"),
        ({"bank_bytes": "8GB"}, TypeError, "bank_bytes must be a number of bytes, got '8GB'"),
        ({"bank_bytes": True}, TypeError, "bank_bytes must be a number of bytes, got True"),
        ({"bank_bytes": float("nan")}, ValueError, "bank_bytes must be finite"),
        ({"bank_bytes": -1}, ValueError, "bank_bytes must be finite and at least 0, got -1"),
        ({"experts": {"a": np.zeros((3, 6, 0))}}, ValueError, "experts has no byte"),
        ({"experts": {"a": np.zeros(3)}}, ValueError, r"experts\['a'\] must be an array \[L, E, ...\]"),
        ({"step_map": 1}, TypeError, "step_map must be True or False"),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    arguments = {"experts": SMALL, "bank_bytes": 1000, "top_k": 2, "max_tokens": 2, **changes}
    experts = arguments.pop("experts")
    with pytest.raises(error, match=message):
        pp.PoolConfig.from_budget(experts, **arguments)
