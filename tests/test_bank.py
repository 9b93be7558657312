"""`pin`, `init_bank` and `expert_bytes`."""

import builtins
import importlib
import sys
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
import reference
from tests.support import abstract_gpus, lower_for_cuda
from tests.test_copy_rows import ROWS, E, L, assert_same_bits, host_shapes, make, shapes

bank_module = importlib.import_module("pallas_pool.bank")
CONFIG = pp.PoolConfig(L, E, (2, 0, 3), 4, 4)
RESIDENTS = [[3, 5], [], [1, 0, 2]]


class Weights(NamedTuple):
    up: np.ndarray
    scale: np.ndarray


def layers_of(experts):
    return [jax.tree.map(lambda x, i=i: x[i], experts) for i in range(L)]


def wanted_bank(config, experts, state):
    keys = np.asarray(state.row_key)[: config.rows]
    bank = {}
    for name, x in experts.items():
        bank[name] = np.zeros((config.bank_rows, *x.shape[2:]), x.dtype)
        bank[name][: config.rows] = x.reshape(L * E, *x.shape[2:])[keys]
    return bank


@pytest.mark.parametrize("form", [lambda x: x, layers_of, lambda x: tuple(layers_of(x))])
def test_init_bank_loads_the_residents_of_the_state(form):
    experts, _ = make()
    state = pp.init_state(CONFIG, RESIDENTS)
    bank = pp.init_bank(CONFIG, pp.pin(form(experts)), state)
    assert_same_bits(bank, wanted_bank(CONFIG, experts, state))


def test_init_bank_begins_as_init_state_does():
    experts, _ = make({"a": ("float32", (3,))})
    bank = pp.init_bank(CONFIG, pp.pin(experts))
    assert_same_bits(bank, wanted_bank(CONFIG, experts, pp.init_state(CONFIG)))


def test_the_bank_follows_a_state_that_went_on():
    """Bank and plan agree for many steps; a bank made anew from the last state is the same."""
    experts, _ = make({"a": ("bfloat16", (5,)), "b": ("float32", ())})
    pinned = pp.pin(experts)

    @jax.jit
    def forward(state, bank, layer, ids):
        plan, state = reference.step(CONFIG, state, layer, ids)
        return plan, state, pp.copy_rows(bank, pinned, layer, plan)

    state, rng = pp.init_state(CONFIG), np.random.default_rng(0)
    bank = pp.init_bank(CONFIG, pinned, state)
    for step in range(24):
        ids = rng.integers(0, E, 4)
        plan, state, bank = forward(state, bank, jnp.int32(step % L), ids)
        for name, x in experts.items():
            lanes = np.asarray(bank[name])[np.asarray(plan.routes)]
            assert lanes.tobytes() == x[step % L, ids].tobytes(), (step, name)
    anew = pp.init_bank(CONFIG, pinned, state)
    rows = slice(CONFIG.rows)
    assert_same_bits(*({k: np.asarray(v)[rows] for k, v in each.items()} for each in (bank, anew)))
    start = pp.init_state(CONFIG).row_key
    assert not np.array_equal(np.asarray(state.row_key), np.asarray(start))


@pytest.mark.parametrize("form", [lambda x: x, layers_of])
def test_init_bank_for_a_gpu_is_made_by_the_kernel(form):
    experts, _ = make()
    given = form(experts)
    mesh = abstract_gpus()
    run = lambda experts, state: pp.init_bank(CONFIG, experts, state)  # noqa: E731
    state = shapes(pp.init_state(CONFIG))
    text = lower_for_cuda(run, host_shapes(given, mesh), state, mesh=mesh).as_text()
    assert "@__gpu$xla.gpu.triton" in text
    assert "stablehlo.gather" not in text


def test_the_kernel_makes_the_same_bank(monkeypatch):
    """Interpreted, what a GPU would run."""
    experts, _ = make()
    state = pp.init_state(CONFIG, RESIDENTS)
    tuned = bank_module.tuned
    monkeypatch.setattr(bank_module, "tuned", lambda *args: tuned(*args[:-1], True))
    for given in (experts, layers_of(experts)):
        given = jax.tree.map(jnp.asarray, given)
        keys = state.row_key[: CONFIG.rows]
        bank = bank_module._load_by_kernel(CONFIG, bank_module.shapes_of(given), given, keys)
        assert_same_bits(bank, wanted_bank(CONFIG, experts, state))


def test_init_bank_refuses_what_does_not_fit():
    experts, _ = make({"a": ("float32", (3,))})
    pinned = pp.pin(experts)
    with pytest.raises(TypeError, match="config must be a PoolConfig, got int"):
        pp.init_bank(3, pinned)
    with pytest.raises(TypeError, match="state must be a PoolState, got int"):
        pp.init_bank(CONFIG, pinned, 3)
    with pytest.raises(ValueError, match=r"3 layers of 6 experts, but the config says .*num_experts=5"):
        pp.init_bank(pp.PoolConfig(L, 5, 1, 4, 4), pinned)
    other = pp.PoolConfig(L, E, 1, 4, 4)
    with pytest.raises(ValueError, match=r"state\.row_key must be"):
        pp.init_bank(CONFIG, pinned, pp.init_state(other))


class Tensor:
    """As PyTorch's, with a dtype that NumPy does not know."""

    shape, dtype = (L, E, 2), "torch.float32"


@pytest.mark.parametrize(
    "experts, error, message",
    [
        ({"a": np.zeros((L, E, 2)), "b": np.zeros((L, E + 1))}, ValueError, r"\['b'\] begins with \[3, 7\]"),
        ({"a": np.zeros(L)}, ValueError, r"experts\['a'\] must be an array \[L, E, ...\], got float64\[3\]"),
        ({"a": "weights"}, TypeError, r"\['a'\] must be an array \[L, E, ...\], got 'weights' \(str\)"),
        ([], ValueError, "experts is an empty sequence"),
        ([{"a": np.zeros(E)}, {"a": np.ones((E, 1))}], ValueError, r"experts\[1\] differs from experts\[0\]"),
        ([{"a": np.zeros(E)}, {"b": np.zeros(E)}], ValueError, r"experts\[1\] differs from experts\[0\]"),
        ((np.zeros((L, E)), np.zeros((L, E, 2))), ValueError, "a list or tuple is taken for one pytree"),
        ({"a": Tensor()}, TypeError, r"experts\['a'\] must be a NumPy or JAX array, got a .*Tensor of torch"),
        ([np.zeros(())], ValueError, "a list or tuple of arrays is taken for one pytree a layer"),
        ({}, ValueError, "experts holds no array"),
    ],
)
def test_experts_that_do_not_fit_each_other(experts, error, message):
    for call in (pp.expert_bytes, pp.pin, lambda x: pp.init_bank(CONFIG, x)):
        with pytest.raises(error, match=message):
            call(experts)


def test_expert_bytes_counts_a_row_of_every_leaf():
    experts, _ = make()
    sizes = {
        name: experts[name][0, 0].nbytes if ROWS[name][0] != "int4" else 12  # Two in a byte on the device.
        for name in experts
    }
    assert pp.expert_bytes(experts) == sum(sizes.values())
    assert pp.expert_bytes(layers_of(experts)) == sum(sizes.values())


def test_doubles_count_as_what_jax_makes_of_them():
    """Whether 64-bit types are on or off, and before and after they are pinned."""
    experts = {"a": np.zeros((L, E, 3)), "b": np.zeros((L, E), np.int64)}
    for on in (False, True):
        with jax.enable_x64(on):
            pinned = pp.pin(experts)
            assert pp.expert_bytes(experts) == pp.expert_bytes(pinned) == (32 if on else 16)
            assert pp.init_bank(CONFIG, pinned)["a"].dtype == pinned["a"].dtype


def test_pin_returns_the_same_pytree_of_jax_arrays():
    experts, _ = make()
    for given in (experts, layers_of(experts)):
        pinned = pp.pin(given)
        assert jax.tree.structure(pinned) == jax.tree.structure(given)
        for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(pinned), strict=True):
            assert isinstance(y, jax.Array)
            assert np.asarray(y).tobytes() == x.tobytes()
    weights = Weights(np.ones((L, E, 2), np.float32), np.ones((L, E), np.float32))
    assert isinstance(pp.pin(weights), Weights)  # And no sequence of layers.
    assert pp.expert_bytes(weights) == 12


def test_pin_refuses_what_it_cannot_move():
    experts = {"a": np.zeros((L, E, 3), np.float32)}
    with pytest.raises(TypeError, match=r"experts\['a'\] must be a NumPy or JAX array .* got a traced array"):
        jax.eval_shape(pp.pin, experts)
    with pytest.raises(TypeError, match=r"experts\['a'\] must be a NumPy or JAX array .* got a mere shape"):
        pp.pin({"a": jax.ShapeDtypeStruct((L, E, 3), np.float32)})
    with pytest.raises(TypeError, match="device must be a JAX device or a Sharding, got 'cpu'"):
        pp.pin(experts, device="cpu")


def test_pinned_arrays_stay_where_they_are():
    experts = pp.pin(make({"a": ("float32", (3,))})[0])
    again = pp.pin(experts)
    assert again["a"].unsafe_buffer_pointer() == experts["a"].unsafe_buffer_pointer()


@pytest.mark.gpu
def test_pin_puts_arrays_into_pinned_memory():
    experts, _ = make()
    for given in (experts, jax.device_put(experts)):
        for x in jax.tree.leaves(pp.pin(given)):
            assert x.sharding.memory_kind == "pinned_host"


def full_memory(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating pinned host memory")


def test_where_no_more_may_be_pinned_the_message_says_what_to_set(monkeypatch):
    experts, _ = make({"a": ("float32", (3,))})
    monkeypatch.setattr(jax, "device_put", full_memory)
    monkeypatch.delenv(bank_module.LIMIT, raising=False)
    with pytest.raises(MemoryError, match=r"at most XLA_\w+_LIMIT_GB GiB, 64 where .*=8 or more"):
        pp.pin(experts)
    monkeypatch.setenv(bank_module.LIMIT, "7")
    with pytest.raises(MemoryError, match="it is 7 here"):
        pp.pin(experts)


def test_other_failures_pass_as_they_are(monkeypatch):
    def broken(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(jax, "device_put", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        pp.pin(make({"a": ("float32", (3,))})[0])


@pytest.mark.parametrize(
    "limit, size, warns", [(None, 65, True), (None, 64, False), ("200", 65, False), ("x", 999, False)]
)
def test_a_limit_that_will_be_met_is_told_before(monkeypatch, limit, size, warns):
    if limit is None:
        monkeypatch.delenv(bank_module.LIMIT, raising=False)
    else:
        monkeypatch.setenv(bank_module.LIMIT, limit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bank_module._warn_of_limit(size * 2**30)
    assert bool(caught) == warns
    if warns:
        assert "LIMIT_GB=73 or more before JAX starts" in str(caught[0].message)


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_progress_is_shown_for_a_large_model(monkeypatch, capsys, has_tqdm):
    if not has_tqdm:
        real = builtins.__import__

        def without(name, *args, **kwargs):
            if name == "tqdm":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    else:
        pytest.importorskip("tqdm")
    monkeypatch.setattr(bank_module, "LARGE", 1)
    experts, _ = make({"a": ("float32", (3,)), "b": ("float32", ())})
    pp.pin(experts)
    shown = capsys.readouterr().err
    assert ("100%" in shown) if has_tqdm else (shown.count("pin: ") == 2)
    pp.pin(experts, progress=False)
    assert not capsys.readouterr().err


def test_a_small_model_is_pinned_in_silence(capsys):
    pp.pin(make({"a": ("float32", (3,))})[0])
    assert not capsys.readouterr().err
