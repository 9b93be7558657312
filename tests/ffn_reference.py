"""The gated FFN of routed experts in plain NumPy, float64, and cases to try it on."""

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS = {
    "silu": lambda g: g / (1 + np.exp(-g)),
    "gelu": lambda g: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))),
    "relu": lambda g: np.maximum(g, 0),
}


def wide(x):
    return np.asarray(x).astype(np.float64)


def weights_of(bank):
    """gate, up and down in float64, with their scales."""
    found = {}
    for name in bank:
        if not name.endswith("_scale"):
            found[name] = wide(bank[name])
            scale = bank.get(f"{name}_scale")
            if scale is not None:
                found[name] *= wide(scale).reshape(len(scale), 1, -1)
    if "gate_up" in found:
        found["gate"], found["up"] = np.split(found.pop("gate_up"), 2, axis=2)
    return found


def ffn(x, bank, routes, weights, activation="silu"):
    """y [T, d] in float64, one lane after another; lanes without a row are not looked at."""
    act = ACTIVATIONS.get(activation, activation)
    matrices, top_k = weights_of(bank), weights.shape[1]
    y = np.zeros(x.shape)
    for lane, row in enumerate(np.asarray(routes).reshape(-1)[: weights.size].tolist()):
        if 0 <= row < len(matrices["down"]):
            token = lane // top_k
            gate, up = (wide(x[token]) @ matrices[name][row] for name in ("gate", "up"))
            y[token] += wide(weights[token, lane % top_k]) * ((act(gate) * up) @ matrices["down"][row])
    return y


def stored(rng, shape, dtype):
    """Random weights whose products with unit vectors are about 1, if not integers."""
    if dtype == jnp.int8:
        return jnp.asarray(rng.integers(-127, 128, shape), dtype)
    values = rng.standard_normal(shape) / np.sqrt(shape[1])
    # Quantized weights come with a scale that lets them use their range.
    return jnp.asarray(values * (8 if jnp.dtype(dtype).itemsize == 1 else 1), jnp.float32).astype(dtype)


def make_bank(rng, rows, d, f, dtype=jnp.float32, fused=False, scale=None, scale_dtype=jnp.float32):
    """A bank; scale: None, "row", "column of rows" or "channel"."""
    shapes = {"gate_up": (rows, d, 2 * f)} if fused else {"gate": (rows, d, f), "up": (rows, d, f)}
    shapes["down"] = (rows, f, d)
    bank = {name: stored(rng, shape, dtype) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if scale is not None:
            size = {"row": (rows,), "column of rows": (rows, 1), "channel": (rows, shape[2])}[scale]
            unit = 74 * np.sqrt(shape[1]) if dtype == jnp.int8 else 8
            bank[f"{name}_scale"] = jnp.asarray(rng.uniform(0.5, 1.5, size) / unit).astype(scale_dtype)
    return bank


def make_lanes(rng, tokens, top_k, d, rows, dtype=jnp.float32):
    """x, routes with some that are no row, and router weights."""
    x = jnp.asarray(rng.standard_normal((tokens, d)), jnp.float32).astype(dtype)
    routes = jnp.asarray(rng.integers(-1, rows + 1, (tokens, top_k)), jnp.int32)
    return x, routes, jnp.asarray(rng.uniform(0, 1, (tokens, top_k)), jnp.float32)


def assert_close(got, want, dtype, activation_error=0.0):
    """Within what `expert_ffn` may lose: float32 sums of some hundred terms, hidden vectors of at least
    16 bits, and one rounding to x's dtype; against the largest value, as terms cancel."""
    got = wide(jax.device_get(got))
    limit = (float(jnp.finfo(dtype).eps) / 2 + 2e-5 + activation_error) * max(1e-30, np.abs(want).max())
    error = np.abs(got - want).max() if want.size else 0.0
    assert error <= limit, f"off by {error}, allowed {limit}"
