"""Settings of the test run: two host devices, Hypothesis profiles, the GPU marker."""

import gc
import os
from pathlib import Path

# Before JAX starts: several processes share a GPU, and the host poses as two devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=2".strip()

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile(
    "long",
    hypothesis.settings.get_profile("default"),
    derandomize=False,
    max_examples=1000,
    print_blob=True,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 40_000


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Lets go of compiled programs before they are too many: each holds memory mappings, of which
    Linux allows a process 65530, and XLA's compiler crashes where it gets no more."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped, with the reason, elsewhere")


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
