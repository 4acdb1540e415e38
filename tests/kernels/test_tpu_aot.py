# SPDX-License-Identifier: Apache-2.0
"""Every TPU kernel goes through the compiler of every TPU, at the shapes of published models."""

import importlib

import pytest

from seqmix_kernels.tpu import _common, chips, shapes
from tests.kernels import aot

# What may stand beside the chunk states for a moment, as a share of inputs and outputs: gates, and
# other arrays as small, in the order of the kernels' blocks.
_GATES = 0.02


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_no_kernel_refuses_a_named_shape(name):
    shape = shapes.SHAPES[name]
    call, module = shape.call(), importlib.import_module(f"seqmix_kernels.tpu.{shape.family}")
    assert module.refusal(call.options, call.arrays) is None
    assert module.vmem_bytes(call.options, call.arrays) <= _common.VMEM_LIMIT


def test_the_named_shapes_are_wide_narrow_long_and_grouped():
    for family in {shape.family for shape in shapes.SHAPES.values()}:
        of_family = [shape for shape in shapes.SHAPES.values() if shape.family == family]
        assert {4096} < {shape.time for shape in of_family}
        if of_family[0].heads is not None:
            assert {64, 128, 256} <= {shape.key for shape in of_family}
            assert any(max(shape.heads[1:]) > 1 for shape in of_family)


@aot.needs_libtpu
@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize(
    "name",
    [
        name if name in shapes.FIRST else pytest.param(name, marks=pytest.mark.slow)
        for name in shapes.SHAPES
    ],
)
def test_forward_and_backward_compile_in_the_memory_they_are_said_to_need(chip, name):
    shape = shapes.SHAPES[name]
    function, arguments, kept = aot.passes(shape)
    compiled = aot.compile_on(chip, function, *arguments)

    call, module = shape.call(), importlib.import_module(f"seqmix_kernels.tpu.{shape.family}")
    used = aot.vmem_used(compiled)
    assert len(used) >= 2 and min(used.values()) > 0, "a forward and a backward kernel"
    assert max(used.values()) <= module.vmem_bytes(call.options, call.arrays)
    assert chips.CHIPS[chip].vmem >= _common.VMEM_LIMIT

    # No more HBM than inputs, outputs, gradients and the states kept for the backward pass.
    memory = compiled.memory_analysis()
    ends = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert memory.temp_size_in_bytes <= aot.tiled_size_of(kept) + _GATES * ends
