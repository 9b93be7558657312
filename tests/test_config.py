"""`PoolConfig`: what it derives, and every message about a geometry that cannot be."""

import jax
import numpy as np
import pytest

import pallas_pool as pp
from tests.support import MOST

GOOD = {
    "num_layers": 3,
    "num_experts": 5,
    "rows_per_layer": 2,
    "staging_rows": 4,
    "width": 8,
}


def config(**changes):
    return pp.PoolConfig(**GOOD | changes)


def test_derived_sizes():
    assert config().layer_rows == (2, 2, 2)
    assert (config().rows, config().bank_rows, config().keys) == (6, 10, 15)
    uneven = config(rows_per_layer=(0, 5, 1))
    assert uneven.layer_rows == (0, 5, 1)
    assert (uneven.rows, uneven.bank_rows) == (6, 10)


def test_static_and_hashable():
    assert config() == config() and hash(config()) == hash(config())
    assert config(rows_per_layer=[0, 5, 1]) == config(rows_per_layer=np.array([0, 5, 1]))
    assert hash(config(rows_per_layer=[0, 5, 1])) == hash(config(rows_per_layer=(0, 5, 1)))
    assert config() != config(width=4) and config() != config(step_map=False)
    with pytest.raises(AttributeError):
        config().width = 4
    rows = jax.jit(lambda c, x: x + c.rows, static_argnums=0)
    assert rows(config(), 1) == 7


def test_numpy_ints_become_ints():
    made = config(num_layers=np.int64(3), rows_per_layer=np.int32(2), width=np.uint8(8))
    assert made == config()
    assert type(made.num_layers) is type(made.rows_per_layer) is type(made.width) is int


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 1},
        {"width": 256},
        {"width": 1024},
        {"num_experts": 2},
        {"num_experts": 1024, "num_layers": 128, "rows_per_layer": 512},
        {"num_layers": 32768},
        {"staging_rows": 1},
        {"rows_per_layer": (0, 0, 1)},
        {"rows_per_layer": 5},
    ],
)
def test_the_whole_range_is_accepted(changes):
    config(**changes)


BAD = [
    ({"num_layers": 0}, ValueError, r"num_layers must be in \[1, 32768\], got 0"),
    ({"num_layers": 32769}, ValueError, r"num_layers must be in \[1, 32768\], got 32769"),
    ({"num_layers": 2.0}, TypeError, r"num_layers must be an int, got 2\.0 \(float\)"),
    ({"num_layers": True}, TypeError, "num_layers must be an int, got the bool True"),
    ({"num_layers": "3"}, TypeError, "num_layers must be an int, got '3'"),
    ({"num_experts": 0}, ValueError, r"num_experts must be in \[\d+, 715827882\], got 0"),
    ({"num_experts": 715827883}, ValueError, r"num_experts must be in \[\d+, 715827882\]"),
    ({"num_experts": None}, TypeError, "num_experts must be an int, got None"),
    ({"rows_per_layer": -1}, ValueError, r"rows_per_layer must be in \[0, 5\], got -1"),
    ({"rows_per_layer": 6}, ValueError, r"rows_per_layer must be in \[0, 5\], got 6"),
    ({"rows_per_layer": 0}, ValueError, "rows_per_layer must sum to at least 1 pool row, got 0"),
    ({"rows_per_layer": (0, 0, 0)}, ValueError, r"at least 1 pool row, got \(0, 0, 0\)"),
    ({"rows_per_layer": (1, 2)}, ValueError, "rows_per_layer must be an int or 3 ints.*got 2"),
    ({"rows_per_layer": (1, 6, 2)}, ValueError, r"rows_per_layer\[1\] must be in \[0, 5\], got 6"),
    ({"rows_per_layer": (1, -1, 2)}, ValueError, r"rows_per_layer\[1\] must be in .*got -1"),
    ({"rows_per_layer": (1, 2, 0.5)}, TypeError, r"rows_per_layer\[2\] must be an int, got 0\.5"),
    ({"rows_per_layer": 1.5}, TypeError, r"rows_per_layer must be an int, got 1\.5"),
    ({"staging_rows": 0}, ValueError, r"staging_rows must be in \[1, 2147483641\], got 0"),
    ({"staging_rows": MOST - 5}, ValueError, "staging_rows must be in .*got 2147483642"),
    ({"staging_rows": 1.0}, TypeError, r"staging_rows must be an int, got 1\.0"),
    ({"width": 0}, ValueError, r"width must be in \[1, 1024\], got 0"),
    ({"width": 2048}, ValueError, r"width must be in \[1, 1024\], got 2048"),
    ({"width": 6}, ValueError, "width must be a power of two, got 6"),
    ({"width": False}, TypeError, "width must be an int, got the bool False"),
    ({"step_map": 1}, TypeError, "step_map must be True or False, got 1"),
]


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_geometry_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        config(**changes)


def test_a_traced_size_is_refused():
    with pytest.raises(TypeError, match="width must be a concrete int, got a traced value"):
        jax.jit(lambda width: config(width=width).rows)(8)
