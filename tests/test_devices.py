"""What is known of the device that a traced function will run on."""

import types

import jax
import jax.numpy as jnp
import pytest

from pallas_pool import devices
from tests.support import abstract_gpus


def gpu(capability, kind="NVIDIA H200"):
    return types.SimpleNamespace(compute_capability=capability, device_kind=kind, platform="gpu")


def seen(mesh=None):
    """What a function finds of its argument while it is traced, under a mesh or none."""
    found = []

    def look(x):
        found.append((devices.platform_of(x), devices.compute_capability(x)))
        found.append(devices.has_large_shared_memory(x))
        return x

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    if mesh is None:
        jax.eval_shape(look, shape)
    else:
        with jax.sharding.use_abstract_mesh(mesh):
            jax.jit(look).trace(shape)
    return *found[0], found[1]


@pytest.mark.parametrize(
    "text, capability, large",
    [
        ("7.5", (7, 5), False),
        ("8.0", (8, 0), True),
        ("8.6", (8, 6), False),
        ("8.7", (8, 7), True),
        ("8.9", (8, 9), False),
        ("9.0", (9, 0), True),
        ("10.3", (10, 3), True),
        ("12.0", (12, 0), False),
        ("gfx942", None, False),
        (None, None, False),
    ],
)
def test_the_default_device_is_asked(text, capability, large, monkeypatch):
    monkeypatch.setattr(devices, "_default_device", lambda: gpu(text))
    assert seen() == ("gpu", capability, large)


def test_a_device_that_is_named(monkeypatch):
    """It is known if it is here, too."""
    monkeypatch.setattr(devices, "_default_device", lambda: gpu("9.0"))
    assert seen(abstract_gpus()) == ("gpu", (9, 0), True)
    monkeypatch.setattr(devices, "_default_device", lambda: gpu("9.0", "another"))
    assert seen(abstract_gpus()) == ("gpu", None, False)


def test_arrays_and_cpus():
    with jax.default_device("cpu"):
        assert seen() == ("cpu", None, False)
    array = jax.device_put(jnp.zeros(2), jax.devices("cpu")[0])
    assert devices.platform_of(array) == "cpu" and devices.compute_capability(array) is None
    assert not devices.in_host_memory(array)


@pytest.mark.gpu
def test_a_gpu_says_what_it_is():
    platform, capability, _ = seen()
    assert platform == "gpu" and capability >= (8, 0)
    assert devices.compute_capability(jnp.zeros(2)) == capability
