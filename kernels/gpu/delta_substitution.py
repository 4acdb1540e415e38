# SPDX-License-Identifier: Apache-2.0
"""Forward substitution on the CUDA cores: the one step of the delta kernels below Pallas.

Column c of the inverse X of I + L is the solution of (I + L) x = e_c. One thread solves one column:
it keeps what is left of the right side in registers, and for each row j in turn the solution's
entry is final and its multiples leave the rows below. The threads of a warp share a block, so that
they all read the same entries of L.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from seqmix_kernels.gpu._common import CHUNK, WGMMA, plgpu
from seqmix_kernels.target import target

BLOCK = 32
PITCH = CHUNK + 4
"""Floats from row to row: 8 threads that write 16 bytes to a row each hit all banks."""
_VECTOR = 4


def substitute(minus: jax.Array, work) -> jax.Array:
    """Inverses of the two diagonal blocks of I + L, by the whole warpgroup.

    Args:
      minus: [64, 64] float32 in registers: -L^T, strictly upper.
      work: shared memory [64, PITCH] float32, untiled, for this function alone.

    Returns:
      [64, 64] float32: the transposed inverses of the diagonal blocks; elsewhere `minus`.
    """
    if target().interpret:
        return _plain(minus)
    return _on_cuda_cores(minus, work.at[:, :CHUNK])


def _plain(minus):
    rows = jnp.arange(CHUNK)
    same = rows[:, None] // BLOCK == rows // BLOCK
    inverse = jnp.eye(CHUNK, dtype=jnp.float32)
    for i in range(1, CHUNK):
        row = jnp.where(same, minus.T, 0)[i]
        inverse = inverse.at[i].add(jnp.sum(row[:, None] * inverse, axis=0))
    return jnp.where(same, inverse.T, minus)


@plgpu.inline_mgpu(
    arg_types=(WGMMA, plgpu.RefType()),
    return_type=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=WGMMA),
)
def _on_cuda_cores(ctx, minus, work):
    """Row j of `work` is column j of -L, then column j of the inverse; both are one warp's own."""
    del ctx
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    four = ir.VectorType.get([_VECTOR], f32)
    constant = mgpu_utils.c
    minus.store_untiled(work, optimized=False)
    mgpu_utils.warpgroup_barrier()  # L has been written by all threads
    # The first two warps of even warpgroups and the last two of odd ones: one scheduler each.
    thread = arith.remui(mgpu_utils.thread_idx(), constant(256, i32))
    even = arith.cmpi(arith.CmpIPredicate.ult, thread, constant(CHUNK, i32))
    odd = arith.cmpi(arith.CmpIPredicate.uge, thread, constant(3 * CHUNK, i32))
    with mgpu_utils.when(arith.ori(even, odd)):
        thread = arith.remui(thread, constant(CHUNK, i32))
        place = arith.remui(thread, constant(BLOCK, i32))
        first = arith.subi(thread, place)
        base = mgpu_utils.memref_ptr(work)

        def at(row, column):
            """Where four floats lie on a 16-byte boundary, which only a plain pointer tells."""
            offset = arith.addi(arith.muli(row, constant(PITCH, i32)), column)
            return mgpu_utils.getelementptr(base, [offset], f32)

        zero, one = constant(0.0, f32), constant(1.0, f32)
        left = [
            arith.select(arith.cmpi(arith.CmpIPredicate.eq, place, constant(i, i32)), one, zero)
            for i in range(BLOCK)
        ]
        for j in range(BLOCK):
            row = arith.addi(first, constant(j, i32))
            for start in range(j // _VECTOR * _VECTOR, BLOCK, _VECTOR):
                if start + _VECTOR - 1 <= j:
                    continue
                entries = llvm.load(four, at(row, arith.addi(first, constant(start, i32))))
                for i in range(start, start + _VECTOR):
                    if i > j:
                        entry = vector.extract(
                            entries,
                            dynamic_position=[],
                            static_position=ir.DenseI64ArrayAttr.get([i - start]),
                        )
                        left[i] = math.fma(entry, left[j], left[i])
        mgpu_utils.warp_barrier()  # all lanes have read what now is overwritten
        for start in range(0, BLOCK, _VECTOR):
            solved = vector.from_elements(four, left[start : start + _VECTOR])
            llvm.store(solved, at(thread, arith.addi(first, constant(start, i32))))
    mgpu_utils.warpgroup_barrier()  # every column is there before any is read
    return mgpu.FragmentedArray.load_untiled(work, layout=WGMMA.to_mgpu(), optimized=False)
