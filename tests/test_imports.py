"""`import pallas_pool` pulls in JAX and NumPy, with what they need themselves, and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def modules(code):
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_the_library_needs_jax_and_numpy_alone():
    step = (
        "config = {0}.PoolConfig(1, 2, 1, 1, 1)\n"
        "{0}.check_state(config, {0}.step(config, {0}.init_state(config), 0, [1])[1])"
    )
    jax_alone = (
        "import jax, numpy, jax.numpy as jnp\n"
        "from jax.experimental import pallas as pl\n"
        "from jax.experimental.pallas import triton\n"
        "def kernel(x_ref, o_ref): o_ref[...] = x_ref[...]\n"
        "x = jnp.zeros(8, jnp.int32)\n"
        "print(pl.pallas_call(kernel, out_shape=x, interpret=True)(x).sum(), end=' ')"
    )
    mine = modules("import pallas_pool\n" + step.format("pallas_pool"))
    assert "pallas_pool" in mine
    extra = {name for name in mine - modules(jax_alone) if name not in sys.stdlib_module_names}
    assert extra == {"pallas_pool"}


def test_the_reference_needs_the_library_alone():
    assert "bench" not in modules("import reference")
    assert modules("import reference") - modules("import pallas_pool") == {"reference"}
