"""The examples in docstrings, run."""

import doctest
import importlib
import pkgutil

import pytest

import pallas_pool as pp
import reference

PACKAGES = (pp, reference)
MODULES = [package.__name__ for package in PACKAGES] + [
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not failures


@pytest.mark.parametrize("name", pp.__all__)
def test_every_public_name_says_what_it_is(name):
    thing = getattr(pp, name)
    assert not callable(thing) or (thing.__doc__ or "").strip()


def test_the_public_names():
    assert set(pp.__all__) >= {
        "KERNELS",
        "Plan",
        "PoolConfig",
        "PoolError",
        "PoolState",
        "check_state",
        "clear_error",
        "controls",
        "init_state",
        "set_controls",
        "snapshot",
        "step",
    }
