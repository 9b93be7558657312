"""Compiler artifacts of a Pallas kernel, made with or without a GPU, and the resources they use.

JAX lowers a function for CUDA; the Triton IR that Pallas made of each kernel is taken out of the
lowered module and cross-compiled with the PyPI package `triton` and the NVIDIA tools in it. On a
GPU, XLA compiles the same IR with a Triton of its own: figures may differ a little from what runs.
What can't be made is recorded as "missing: why": an absent figure is not taken for a zero.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

import pallas_pool as pp

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
except ImportError:
    triton = None

CUSTOM_CALL = "__gpu$xla.gpu.triton"
DEVICE_KIND = "NVIDIA H200"  # What JAX lowers for where it asks for a device and there is none.
LOOP = re.compile(r"\bscf\.(?:for|while)\b")
SASS_COUNTS = ("BAR", "LDG", "STG", "LDL", "STL")
# A line of nvdisasm: address, predicate, opcode up to its first dot, the rest.
SASS_LINE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)(.*)")
SASS_LABEL = re.compile(r"(\.L_\w+):")
SASS_TARGET = re.compile(r"`\((\.L_\w+)\)")


class TritonKernel(NamedTuple):
    """One Triton kernel of a lowered function.

    Attributes:
      name: name of the kernel, as profilers show it.
      ttir: its Triton IR, as text.
      num_warps: warps a program.
      num_stages: software pipelining stages of its loops.
    """

    name: str
    ttir: str
    num_warps: int
    num_stages: int


@contextlib.contextmanager
def _abstract_gpu() -> Iterator[None]:
    """A device to lower for, where JAX wants one named; hides its word on Triton's future."""
    device = jax.sharding.AbstractDevice(DEVICE_KIND, num_cores=None, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device)
    with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        yield


def triton_kernels(function: Callable[..., Any], *args: Any) -> list[TritonKernel]:
    """Lowers `jit(function)` for CUDA and returns its Triton kernels; `args` may be mere shapes."""
    with _abstract_gpu():
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    found: list[TritonKernel] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call":
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            if target == CUSTOM_CALL:
                found.append(_triton_kernel(op))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _triton_kernel(custom_call: ir.Operation) -> TritonKernel:
    config = ir.DictAttr(custom_call.attributes["mhlo.backend_config"])
    bytecode = ir.StringAttr(config["ir"]).value_bytes
    with custom_call.context as context:
        triton_dialect.register_dialect(context)
        ttir = str(ir.Module.parse(bytecode))
    return TritonKernel(
        name=ir.StringAttr(config["name"]).value,
        ttir=ttir,
        num_warps=ir.IntegerAttr(config["num_warps"]).value,
        num_stages=ir.IntegerAttr(config["num_stages"]).value,
    )


def planner_kernels(config: pp.PoolConfig, kernel: str) -> list[TritonKernel]:
    """The Triton kernels that one step of `kernel` launches."""
    step = functools.partial(pp.step, config, kernel=kernel, interpret=False)
    state = jax.eval_shape(lambda: pp.init_state(config))
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    ids = jax.ShapeDtypeStruct((config.width,), jnp.int32)
    return triton_kernels(step, state, layer, ids)


def ttir_loops(ttir: str) -> int:
    """Loops in Triton IR: `scf.for` and `scf.while`."""
    return len(LOOP.findall(ttir))


def write(kernel: TritonKernel, sm: int, folder: Path, stem: str) -> dict[str, Any]:
    """Cross-compiles a kernel; writes `<stem>.ttir`, `.ptx`, `.cubin` and `.sass` to `folder`.

    Args:
      kernel: from `triton_kernels`.
      sm: the architecture, 90 for sm_90.
      folder: an existing folder.
      stem: the files' name without the ending.

    Returns:
      What the kernel uses on that architecture, and which tools said so.
    """
    ttir_path = folder / f"{stem}.ttir"
    ttir_path.write_text(kernel.ttir)
    resources: dict[str, Any] = {
        "kernel": kernel.name,
        "sm": sm,
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "ttir_loops": ttir_loops(kernel.ttir),
    }
    if triton is None:
        why = "missing: the package triton is not installed"
        return resources | dict.fromkeys(("triton", "ptx", "cubin", "sass"), why)
    options = {
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "enable_fp_fusion": True,  # Triton warns if it is left out; planners add no floats.
    }
    with triton.knobs.compilation.scope():
        # Line information would name the file compiled, and with it a folder of this machine.
        triton.knobs.compilation.disable_line_info = True
        compiled = triton.compile(str(ttir_path), target=GPUTarget("cuda", sm, 32), options=options)
    (folder / f"{stem}.ptx").write_text(compiled.asm["ptx"])
    (folder / f"{stem}.cubin").write_bytes(compiled.asm["cubin"])
    resources |= {"triton": triton.__version__, "shared_bytes": compiled.metadata.shared}
    resources |= _assemble(compiled.asm["ptx"], sm)
    sass = _disassemble(folder / f"{stem}.cubin")
    if sass.startswith("missing"):
        return resources | {"sass": sass}
    (folder / f"{stem}.sass").write_text(sass)
    return resources | {"sass": f"{stem}.sass"} | parse_sass(sass)


def _assemble(ptx: str, sm: int) -> dict[str, Any]:
    """Registers, stack and spills, as a verbose ptxas states them."""
    try:
        tool = get_ptxas(sm)
    except RuntimeError as error:
        return {"ptxas": f"missing: {error}"}
    target = _first(r"(?m)^\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name={target}", str(source), "-o", f"{source}.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {"ptxas": tool.version} | parse_ptxas(log)


def _disassemble(cubin: Path) -> str:
    """SASS of a cubin, or why there is none."""
    try:
        tool = triton.knobs.nvidia.nvdisasm.path
    except RuntimeError:
        return "missing: nvdisasm not found"
    run = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=False)
    if run.returncode:
        return f"missing: nvdisasm failed: {run.stderr.strip()}"
    return run.stdout


def parse_ptxas(log: str) -> dict[str, int]:
    """Figures in the output of `ptxas -v` for one kernel."""
    figures = {
        "registers": r"Used (\d+) registers",
        "stack_bytes": r"(\d+) bytes stack frame",
        "spill_store_bytes": r"(\d+) bytes spill stores",
        "spill_load_bytes": r"(\d+) bytes spill loads",
    }
    return {name: int(_first(pattern, log)) for name, pattern in figures.items()}


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"nothing like {pattern!r} in: {text[:500]}")
    return found.group(1)


def parse_sass(sass: str) -> dict[str, int]:
    """Counts in nvdisasm's text: instructions, loops (branches backwards), and some opcodes."""
    labels: set[str] = set()
    pending: set[str] = set()  # Labels of the next instruction.
    opcodes: list[str] = []
    loops = 0
    for line in sass.splitlines():
        if label := SASS_LABEL.match(line):
            pending.add(label.group(1))
        elif instruction := SASS_LINE.match(line):
            opcode, operands = instruction.groups()
            opcodes.append(opcode)
            target = SASS_TARGET.search(operands)
            # A branch to itself is no loop but the trap behind the end of a kernel.
            loops += opcode == "BRA" and target is not None and target.group(1) in labels
            labels |= pending
            pending = set()
    counts = {name: opcodes.count(name) for name in SASS_COUNTS}
    padding = opcodes.count("NOP")
    return {"instructions": len(opcodes) - padding, "loops": loops} | counts
