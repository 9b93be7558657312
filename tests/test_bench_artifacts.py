"""Kernels are lowered and compiled without a GPU, and what they use is read off the result."""

import importlib.util

import pytest

import pallas_pool as pp
from bench import artifacts

CONFIG = pp.PoolConfig(num_layers=2, num_experts=24, rows_per_layer=14, staging_rows=8, width=8)
PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'planner' for 'sm_90a'
ptxas info    : Function properties for planner
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size
"""
SASS = """\
.text.planner:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/              @!P1 BRA `(.L_x_2) ;
        /*0050*/              @UP0 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   STL [R1], R2 ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
        /*0090*/                   NOP;
"""


@pytest.mark.parametrize("kernel", pp.KERNELS)
def test_lowers_for_a_gpu(kernel):
    (launched,) = artifacts.planner_kernels(CONFIG, kernel)
    assert kernel in launched.name
    assert f"tt.func public @{launched.name}" in launched.ttir
    assert launched.num_warps >= 1


def test_the_suffix_of_masked_has_no_loops():
    loop, masked = (
        artifacts.ttir_loops(artifacts.planner_kernels(CONFIG, kernel)[0].ttir)
        for kernel in ("loop", "masked")
    )
    assert loop == masked + 2


def test_resources_are_parsed():
    assert artifacts.parse_ptxas(PTXAS_LOG) == {
        "registers": 255,
        "stack_bytes": 24,
        "spill_store_bytes": 16,
        "spill_load_bytes": 20,
    }
    assert artifacts.parse_sass(SASS) == {
        "instructions": 9,
        "loops": 2,
        "BAR": 1,
        "LDG": 1,
        "STG": 0,
        "LDL": 0,
        "STL": 1,
    }


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs the package triton")
def test_cross_compiles(tmp_path):
    (kernel,) = artifacts.planner_kernels(CONFIG, "masked")
    resources = artifacts.write(kernel, 90, tmp_path, "masked")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"masked.{suffix}" for suffix in ("ttir", "ptx", "cubin", "sass")
    }
    assert ".target sm_90" in (tmp_path / "masked.ptx").read_text()
    assert str(tmp_path) not in (tmp_path / "masked.ptx").read_text()
    assert 0 < resources["registers"] <= 255
    assert resources["instructions"] > resources["LDG"] > 0
    assert resources["spill_store_bytes"] >= 0


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    (kernel,) = artifacts.planner_kernels(CONFIG, "masked")
    monkeypatch.setattr(artifacts, "triton", None)
    resources = artifacts.write(kernel, 90, tmp_path, "masked")
    assert [path.name for path in tmp_path.iterdir()] == ["masked.ttir"]
    for name in ("triton", "ptx", "cubin", "sass"):
        assert resources[name] == "missing: the package triton is not installed"
