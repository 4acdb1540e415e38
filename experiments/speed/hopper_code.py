# SPDX-License-Identifier: Apache-2.0
"""Compiles the Hopper kernels to machine code on a machine without a GPU, and says what they take.

    pip install "jax-cuda13-plugin[with-cuda]" nvidia-cuda-nvdisasm  # the plugin of JAX's version
    JAX_PLATFORMS=cpu python experiments/speed/hopper_code.py --rows "simple_gla B8"

Forward and backward of rows of `kernels.py`, lowered for CUDA and compiled by what the plugin
compiles with on a GPU: registers, spills, whether ptxas serialises the products (a kernel that is
several times slower then), and of each loop its instructions. The plugin asks the driver for the
GPU's compute capability; a stand-in for the driver, made with `cc`, answers 9.0.
"""

import argparse
import collections
import ctypes
import importlib
import os
import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple

import jax
from kernel_rows import GROUPS, Row, ours, segments, shapes

import seqmix_kernels

TARGET = "sm_90a"
# Loops shorter than this are waits on barriers.
SHORT = 100
COUNTED = ("HGMMA", "BAR", "SYNCS", "LDL", "STL", "R2UR", "MUFU", "FMUL", "FFMA", "FADD")

_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 232448;  /* major, minor, shared memory */
  return 0;
}
"""


class Loop(NamedTuple):
    """A loop of a kernel: instructions in it, and how many of some kinds."""

    instructions: int
    counts: dict[str, int]


class Code(NamedTuple):
    """What a kernel was compiled to.

    Attributes:
      name: of the kernel.
      registers: most that a thread has at launch.
      spilled: bytes stored to and loaded from local memory.
      serialised: whether ptxas waits after each product.
      loops: innermost loops.
    """

    name: str
    registers: int
    spilled: tuple[int, int]
    serialised: bool
    loops: list[Loop]


def load_compiler(folder: pathlib.Path) -> tuple[ctypes.CDLL, pathlib.Path]:
    """The CUDA plugin over a stand-in for the driver in `folder`; the folder of CUDA's programs."""
    plugin = pathlib.Path(importlib.import_module("jax_plugins.xla_cuda13")._get_library_path())
    site = plugin.parents[2]
    cuda = site / "nvidia" / "cu13"
    runtime = site / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"
    os.environ.setdefault("MOSAIC_GPU_CUDA_ROOT", str(cuda))
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
    os.environ["PATH"] = f"{cuda / 'bin'}{os.pathsep}{os.environ['PATH']}"
    known = set(re.findall(r"int (cu\w+)\(", _DRIVER))
    named = {n.decode() for n in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", plugin.read_bytes())}
    other = "".join(f"int {n}() {{ return 0; }}\n" for n in sorted(named - known))
    source, driver = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(_DRIVER + other)
    options = ["-w", "-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", driver, source], check=True)
    ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(plugin))
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.c_void_p
    return library, cuda


def modules(lowered: jax.stages.Lowered) -> list[bytes]:
    """The Mosaic kernels of a lowered program, each once."""
    found = {}

    def walk(operation):
        for region in operation.regions:
            for block in region:
                for op in block:
                    name = str(op.attributes["call_target_name"]) if _is_call(op) else ""
                    if "mosaic_gpu" in name:
                        config = op.attributes["mhlo.backend_config"]
                        found.setdefault(config["module"].value_bytes, None)
                    walk(op.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return list(found)


def _is_call(op) -> bool:
    return op.operation.name == "stablehlo.custom_call"


def loops(assembly: str) -> list[Loop]:
    """The innermost loops of a kernel's machine code, waits on barriers aside."""
    places, instructions = {}, []
    for line in assembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            places[label[1]] = len(instructions)
        elif text := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(re.sub(r"^@!?U?P\d+\s+", "", text[1].strip()))
    spans = []
    for end, text in enumerate(instructions):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        start = places.get(jump[1], end) if jump else end
        # What lies behind the kernel's end is where threads that must wait longer are sent.
        if end - start >= SHORT and not any("EXIT" in t for t in instructions[start:end]):
            spans.append((start, end))
    found = []
    for start, end in spans:
        if any(start <= a and b <= end and (a, b) != (start, end) for a, b in spans):
            continue
        kinds = collections.Counter(
            t.split()[0].split(".")[0] for t in instructions[start : end + 1]
        )
        found.append(Loop(end - start + 1, {k: kinds[k] for k in COUNTED}))
    return found


def compile_row(row: Row, library: ctypes.CDLL, folder: pathlib.Path) -> list[Code]:
    """Compiles forward and backward of a row."""
    xs, form, ids = shapes(row), ours(row, "pallas"), segments(row)

    def function(xs):
        return form(xs, ids)

    def both(xs, weights):
        results, pull = jax.vjp(function, xs)
        return results, pull(weights)

    with seqmix_kernels.compile_for("gpu"):
        weights = jax.eval_shape(function, xs)
        lowered = jax.jit(both).trace(xs, weights).lower(lowering_platforms=("cuda",))
    found = []
    for number, module in enumerate(modules(lowered)):
        dump = folder / f"{row.name}-{number}".replace(" ", "_").replace("/", "of")
        dump.mkdir()
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
        if not library.MosaicGpuCompile(module, len(module)):
            raise RuntimeError(f"{row.name}: kernel {number} does not compile")
        found.append(_assemble(next(dump.glob("*.ptx"))))
    return found


def _assemble(ptx: pathlib.Path) -> Code:
    binary = ptx.with_suffix(".cubin")
    command = ["ptxas", "-v", "-O3", f"--gpu-name={TARGET}", "-o", binary, ptx]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    code = subprocess.run(["nvdisasm", "-c", binary], check=True, capture_output=True, text=True)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return Code(
        name=re.search(r"entry function '(\w+?)_mosaic_gpu_kernel'", said)[1],
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spilled=(int(spills[1]), int(spills[2])),
        serialised="serialized" in said,
        loops=loops(code.stdout),
    )


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["B8 T4096", "B1 T32768"])
    options = parser.parse_args()
    rows = [r for r in GROUPS["peers"] if any(part in r.name for part in options.rows)]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        library, _ = load_compiler(folder)
        for row in rows:
            print(row.name, flush=True)
            for code in compile_row(row, library, folder):
                note = "; PRODUCTS ARE SERIALISED" if code.serialised else ""
                stored, loaded = code.spilled
                spills = f"{stored} + {loaded} B spills"
                print(f"  {code.name}: {code.registers} registers, {spills}{note}")
                for loop in code.loops:
                    counts = ", ".join(f"{n} {kind}" for kind, n in loop.counts.items() if n)
                    print(f"    loop of {loop.instructions}: {counts}", flush=True)


if __name__ == "__main__":
    main()
