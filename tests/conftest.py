"""Settings of the test run: two host devices, how programs for a CPU compile, Hypothesis profiles, the
GPU marker."""

import atexit
import gc
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

# Before JAX starts: several processes share a GPU, and the host poses as two devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
FLAGS = {"xla_force_host_platform_device_count": 2}
# On a CPU nearly all of the time is XLA's, compiling interpreted kernels. It optimizes less, and no
# program twice in one run: the processes, and the scripts that tests start, share what they compiled.
if os.environ.get("JAX_PLATFORMS") == "cpu" or not importlib.util.find_spec("jax_plugins"):
    FLAGS["xla_backend_optimization_level"] = 0
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # Unset where the first process begins.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="pallas_pool_tests_")
        atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
given = os.environ.get("XLA_FLAGS", "")
added = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()

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
