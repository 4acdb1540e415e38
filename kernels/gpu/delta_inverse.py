# SPDX-License-Identifier: Apache-2.0
"""Chunk-parallel triangular inverses of the delta rule with scalar decay, on Hopper.

Per chunk of 64 tokens, with D the decays between its tokens,

    T~ = (I + strict((K K^T) * D) beta)^{-1},

which solves for the errors v_t - k_t S~_t of the rule (times beta they are what is written), by
block substitution: the two diagonal blocks of 32 row by row in float32 on the CUDA cores, the
block below them, -T_22 L_21 T_11, on the tensor cores from float16 operands, which are exacter than
the bfloat16 that T~ is stored in (and end at 65504, far above what keys of a stable rule give).
Everything is done on transposes: K K^T is symmetric, and a thread that solves a column then
writes a row.

The work is latency, so each block has four warpgroups that go through chunks of their own, and the
next chunk's keys arrive while the present one is solved. Bytes a chunk: 64 K 2 read and 64^2 2
written, 24 KiB at K = 128. FLOPs: 2 64^2 K + 4 64^3, 2.1 MFLOP at K = 128, and 63 KFLOP on the
CUDA cores.
"""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu._common import (
    MULTIPROCESSORS,
    ROWS,
    SMEM,
    Barrier,
    barrier_wait,
    commit_smem,
    copy_in,
    copy_out,
    ds,
    join,
    kernel,
    per_row,
    tile,
    wait_copies_out,
    when,
)
from seqmix_kernels.gpu.delta_pieces import (
    SQUARE,
    VECTORS,
    C,
    copy_vectors,
    matmul,
    rows_and_columns,
    strength,
    unknown_zero,
    upper_decay,
)
from seqmix_kernels.gpu.delta_substitution import BLOCK, PITCH, substitute
from seqmix_kernels.options import Heads

_WARPGROUPS = 4


def inverse(heads: Heads, k: jax.Array, vectors: jax.Array) -> jax.Array:
    """Transposed inverses of all chunks.

    Args:
      heads: grouping of the heads.
      k: [B, T, Hk, K] bfloat16, T whole chunks.
      vectors: [B, Hs, chunks, 4, 64] float32; see `delta_pieces.chunk_vectors`.

    Returns:
      [B, Hs, chunks, 64, 64] bfloat16: T~^T, upper triangular.
    """
    batch, _, _, width = k.shape
    states, chunks = vectors.shape[1:3]
    dtype = k.dtype
    spans = max(1, min(chunks // _WARPGROUPS, MULTIPROCESSORS // (batch * states)))
    span = -(-chunks // (spans * _WARPGROUPS)) * _WARPGROUPS
    spans = -(-chunks // span)
    each = _WARPGROUPS
    scratch = {
        "k_s": tile((each, C, width), dtype),
        "g_s": SMEM((each * 2, 2, VECTORS, C), jnp.float32),
        "work": SMEM((each, C, PITCH), jnp.float32),
        "operand_s": tile((each, C, C), jnp.float16),
        "out_s": tile((each, C, C), dtype),
        "full": Barrier(num_arrivals=3, num_barriers=each),
        "ended": Barrier(num_arrivals=each),
    }

    def body(k_ref, g_ref, out_ref, *, k_s, g_s, work, operand_s, out_s, full, ended):
        b, s, piece = lax.axis_index("row"), lax.axis_index("state"), lax.axis_index("span")
        wg = lax.axis_index("wg")
        start = piece * span + wg
        end = jnp.minimum(piece * span + span, chunks)
        count = lax.div(jnp.maximum(end - start, 0) + (each - 1), each)
        k_t, bar = k_s.at[wg], full.at[wg]

        def issue(n):
            chunk = start + n * each
            copy_in(k_ref.at[b, ds(chunk * C, C), lax.div(s, heads.values)], k_t, bar)
            copy_vectors(g_ref.at[b, s, chunk], g_s.at[wg * 2 + lax.rem(n, 2)], bar)

        @when(count > 0)
        def _():
            issue(jnp.int32(0))

        def step(n, _):
            barrier_wait(bar)
            scores = matmul(k_t, k_t.T)

            @when(n + 1 < count)
            def _():
                issue(n + 1)

            g = g_s.at[wg * 2 + lax.rem(n, 2)]
            mine = wg + unknown_zero(g)
            operand_t, out_t = operand_s.at[mine], out_s.at[mine]

            def product(left, right):
                operand_t[...] = right.astype(jnp.float16)
                commit_smem()
                return matmul(left.astype(jnp.float16), operand_t)

            minus = scores * upper_decay(g, strict=True)
            minus = minus * per_row(-strength(g, ROWS), SQUARE)
            row, column = rows_and_columns()
            corner = jnp.where((row < BLOCK) == (column < BLOCK), 0.0, minus)
            # The diagonal blocks' inverses, and -L_21^T, which the products below do not see.
            solved = substitute(minus, work.at[wg])
            inverse = solved - corner + product(product(solved, corner), solved)
            wait_copies_out(0, wait_read_only=True)
            out_t[...] = inverse.astype(dtype)
            commit_smem()
            copy_out(out_t, out_ref.at[b, s, start + n * each])

        lax.fori_loop(0, count, step, None)
        wait_copies_out(0)
        join(ended)

    return kernel(
        body,
        name="delta_inverse",
        out_type=jax.ShapeDtypeStruct((batch, states, chunks, C, C), dtype),
        scratch=scratch,
        grid=(batch, states, spans),
        grid_names=("row", "state", "span"),
        warpgroups=each,
    )(k, vectors)
