"""What is known, while a function is traced, of where its arrays are and of the GPU it will run on."""

from __future__ import annotations

import re
from typing import Any

import jax


def in_host_memory(leaf: Any) -> bool:
    """Whether JAX knows an array, traced or not, to be in host memory. On a CPU, `pin` leaves arrays
    where everything else is, and this is False."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


def platform_of(leaf: Any) -> str:
    """The platform that an array is on, or, as far as one can tell, that a traced one will be on."""
    return _device_of(leaf).platform


def sharding_platform(sharding: jax.sharding.Sharding) -> str:
    device: Any = next(iter(sharding.device_set))
    return device.platform


def compute_capability(leaf: Any) -> tuple[int, int] | None:
    """That of the NVIDIA GPU that an array is on, or, as far as one can tell, that a traced one will be
    on; None where it is not known, as where a program is lowered for a device that is not here."""
    device = _device_of(leaf)
    if isinstance(device, jax.sharding.AbstractDevice):
        here = _default_device()
        # One that bears the name of the device here stands for it.
        device = here if here.device_kind == device.device_kind else None
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else None


def has_large_shared_memory(leaf: Any) -> bool:
    """Whether a block of the GPU can have 160 KB of shared memory and more, as on those for data centers,
    and not but 99, as on the others. False where it is not known. NVIDIA, CUDA C++ Programming Guide,
    Technical Specifications per Compute Capability."""
    capability = compute_capability(leaf)
    return capability is not None and (capability in ((8, 0), (8, 7)) or 9 <= capability[0] < 12)


def _device_of(leaf: Any) -> Any:
    """A device, or an abstract one."""
    if isinstance(leaf, jax.core.Tracer):
        for mesh in (jax.typeof(leaf).sharding.mesh, jax.sharding.get_abstract_mesh()):
            if mesh.abstract_device is not None:
                return mesh.abstract_device
    elif isinstance(leaf, jax.Array):
        return next(iter(leaf.sharding.device_set))
    return _default_device()


def _default_device() -> Any:
    """The device on which what has no other runs."""
    given = getattr(jax.config, "jax_default_device", None)
    # It may be the name of a platform.
    return jax.local_devices(backend=given)[0] if given is None or isinstance(given, str) else given
