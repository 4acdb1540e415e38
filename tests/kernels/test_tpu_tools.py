# SPDX-License-Identifier: Apache-2.0
"""What the pages about TPU kernels are written from: counts of programs, and copies in them."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

SPEED = Path(__file__).resolve().parents[2] / "experiments" / "speed"

# q passes a copy and a computing fusion, k a fusion that only moves, v nothing; a result is copied.
PROGRAM = """HloModule step

%moving (p.1: bf16[64,128]) -> bf16[64,128] {
  %p.1 = bf16[64,128]{1,0} parameter(0)
  ROOT %copy.1 = bf16[64,128]{0,1} copy(%p.1), metadata={op_name="reshape"}
}

%computing (p.2: bf16[64,128]) -> bf16[64,128] {
  %p.2 = bf16[64,128]{1,0} parameter(0)
  %copy.2 = bf16[64,128]{0,1} copy(%p.2)
  ROOT %exp.1 = bf16[64,128]{0,1} exponential(%copy.2)
}

ENTRY %main (q: bf16[64,128], k: bf16[64,128], v: bf16[64,128]) -> bf16[64,128] {
  %q = bf16[64,128]{1,0} parameter(0)
  %k = bf16[64,128]{1,0} parameter(1)
  %v = bf16[64,128]{1,0} parameter(2)
  %gate = f32[8]{0} parameter(3)
  %copy.3 = bf16[64,128]{0,1} copy(%q)
  %fusion.1 = bf16[64,128]{0,1} fusion(%copy.3), kind=kLoop, calls=%computing
  %copy.4 = bf16[64,128]{1,0} copy(%fusion.1)
  %bitcast.1 = bf16[1,64,128]{2,1,0} bitcast(%copy.4)
  %fusion.2 = bf16[64,128]{0,1} fusion(%k), kind=kLoop, calls=%moving
  %copy.5 = f32[8]{0} copy(%gate)
  %k.1 = bf16[64,128] custom-call(%bitcast.1, %fusion.2, %v, %copy.5), target="tpu_custom_call"
  %bitcast.2 = bf16[64,128]{1,0} bitcast(%k.1)
  %copy.6 = bf16[64,128]{0,1} copy(%bitcast.2)
  ROOT %add.1 = bf16[64,128]{0,1} add(%copy.6, %copy.6)
}
"""


@pytest.fixture
def load(monkeypatch):
    """Imports a script of experiments/speed."""
    monkeypatch.syspath_prepend(str(SPEED))
    return importlib.import_module


def test_only_what_moves_values_between_a_kernel_and_its_neighbours_is_a_copy(load):
    found = load("tpu_hlo").relayouts(PROGRAM)
    assert found.kernels == 1
    assert {move.name for move in found.large} == {"copy.4", "fusion.2", "copy.6"}
    assert {move.name for move in found.small} == {"copy.5"}
    assert {move.size for move in found.large} == {64 * 128 * 2}


def test_bytes_of_hbm_are_those_of_instructions_outside_vmem(load):
    moved = load("tpu_hlo").hbm_bytes
    array = 64 * 128 * 2
    # Two fusions, three copies of large arrays, one sum: each reads and writes; the kernel reads
    # three large arrays and writes one, and has a gate, which is copied first.
    assert moved(PROGRAM) == (2 * 2 + 3 * 2 + 3 + 4) * array + 3 * 8 * 4
    # A copy that goes to VMEM, and what reads it there.
    there = PROGRAM.replace("copy.3 = bf16[64,128]{0,1}", "copy.3 = bf16[64,128]{0,1:S(1)}")
    assert moved(PROGRAM) - moved(there) == 2 * array


def test_a_kernels_traffic_is_that_of_blocks_that_change(load):
    def body(x, w, out):
        out[...] = jnp.exp(jnp.dot(x[...], w[...], precision="highest"))

    def function(x, w):
        return pl.pallas_call(
            body,
            grid=(4, 2),
            in_specs=[
                pl.BlockSpec((16, 128), lambda i, j: (i, 0)),
                pl.BlockSpec((128, 64), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((16, 64), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((64, 128), jnp.float32),
            name="product",
        )(x, w)

    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 128), (128, 128)))
    (kernel,) = load("tpu_count").kernels(function, x, w)
    assert kernel.name == "product"
    # x once, w for each of its four blocks of rows anew, the output once.
    assert kernel.traffic == 4 * (64 * 128 + 4 * 128 * 128 + 64 * 128)
    assert kernel.least == 4 * (64 * 128 + 128 * 128 + 64 * 128)
    assert kernel.work.flops == 2 * 64 * 128 * 128
    assert kernel.work.passes == 6 * kernel.work.flops
    assert kernel.work.transcendental == 64 * 128
