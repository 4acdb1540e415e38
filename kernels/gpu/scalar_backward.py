# SPDX-License-Identifier: Apache-2.0
"""Backward pass of the scalar-decay family on Hopper: one sweep over the chunks in reverse.

Units and blocks are those of the forward; a unit carries R^T [64, K], the gradient of its state's
64 columns, in registers, and reads the chunk's entering state S^T. Per chunk, with decays D,
strength w,
e^G at the reads and e^{G_C - G} at the writes::

    P   = s (Q K^T) * D;   dP = s (dO V^T) * D * w
    dQ  = dP K + s e^G * (dO S^T)
    dK  = dP^T Q + e^{G_C - G} w * (V R^T)
    u   = P^T dO + e^{G_C - G} * (K R);   dV = w u;   dw = <u, v>
    R   = e^{G_C} R + (s e^G * Q)^T dO

Units that share q and k add their parts of dQ and dK in shared memory (in bfloat16 parts), what
several blocks have of one head is added by the caller: no atomics, the same bits every time.

The gradient of log-decay t sums the pairs X_ij = dP_ij (Q K^T)_ij with i >= t > j, the reads i >=
t, the writes j < t, and what passes through the chunk. A triangle of ones times X (in bfloat16)
gives the sums over i >= t, a masked sum of rows those over j < t; the other sums are left to the
caller. (Sums of columns would cross warps, for which Mosaic gives all warpgroups of a block one
buffer.)

Bytes: q, k, v, dO read and dQ, dK, dV written once each, and K V 2 bytes of state a chunk. FLOPs a
unit and chunk: 2 C^2 (2 K + 5 64) + 8 C K 64, so 19 MFLOP for 144 KiB at K = V = 128.
"""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu._common import (
    CHUNK,
    COLS,
    ROWS,
    SMEM,
    WGMMA,
    Barrier,
    accumulate,
    barrier_arrive,
    barrier_wait,
    commit_copies_out,
    commit_smem,
    copy_in,
    copy_out,
    ds,
    iota,
    is_causal,
    join,
    kernel,
    load,
    matmul,
    number_tokens,
    overlapped,
    per_column,
    per_row,
    prefix_sums,
    registers,
    tile,
    union,
    wait_copies_out,
    when,
    zeros,
)
from seqmix_kernels.gpu.calls import WIDTH, place
from seqmix_kernels.gpu.scalar_plan import Plan

C = CHUNK
STAGES = 2
ROWS_OF_GATES = 4
"""Rows of the gates' gradients: straddling pairs; reads; writes; what passes; (strengths)."""


def backward(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    gates: jax.Array,
    strength: jax.Array | None,
    states: jax.Array,
    leaving: jax.Array | None,
    *,
    scale: float,
) -> tuple[jax.Array, ...]:
    """Gradients of one sweep.

    Args:
      plan: the cut, of the outputs.
      q: [B, T, Hq, K] bfloat16, T whole chunks.
      k: [B, T, Hk, K] bfloat16.
      v: [B, T, Hv, V] bfloat16.
      d_out: [B, T, Ho, V] bfloat16.
      gates: [B, Hs, chunks, 64] float32; see `gates.chunk_log2`.
      strength: [B, Hs, chunks, 64] float32, or None for 1.
      states: [B, Hs, chunks, V, K] bfloat16, transposed states entering the chunks.
      leaving: [B * pieces, Ho, V, K] float32, gradients of the states that leave the pieces, or
        None for zeros.
      scale: factor on the output.

    Returns:
      dq, dk [B, T, parts, K] bfloat16, parts of one head next to each other; dv [B, T, Ho, V]
      bfloat16; rows of the gates' gradients [B, units, chunks, rows, 64] float32 (see
      `ROWS_OF_GATES`); gradients of the states that enter the pieces [B * pieces, Ho, V, K]
      float32.
    """
    p, dtype = plan, q.dtype
    batch, time = q.shape[:2]
    total = p.blocks * p.units
    pooled = p.units == 2 and p.shared  # the units add their dq and dk
    parts = p.blocks if pooled else total
    vectors = 1 if strength is None else 3
    rows = ROWS_OF_GATES if strength is None else ROWS_OF_GATES + 1
    out_type = (
        jax.ShapeDtypeStruct((batch, time, parts, p.key), dtype),
        jax.ShapeDtypeStruct((batch, time, parts, p.key), dtype),
        jax.ShapeDtypeStruct((batch, time, p.heads.outputs, p.value), dtype),
        jax.ShapeDtypeStruct((batch, total, p.chunks, rows, C), jnp.float32),
        jax.ShapeDtypeStruct((batch * p.pieces, p.heads.outputs, p.value, p.key), jnp.float32),
    )
    feeder, kinds = p.units, STAGES * p.keysets
    scratch = {
        "tiles": union(
            [tile((2 * kinds, C, p.key), dtype)],  # q, then dq; k, then dk
            [SMEM((p.units, WIDTH, p.key), jnp.float32)],
        ),
        "v_s": tile((STAGES * p.units, C, WIDTH), dtype),
        "do_s": tile((STAGES * p.units, C, WIDTH), dtype),
        "g_s": SMEM((STAGES * p.units, vectors, C), jnp.float32),
        # Of each unit the state, then its part of dq; its gradient, then its part of dk.
        "sr_s": tile((2 * p.units, WIDTH, p.key), dtype),
        "pair_s": tile((p.units, C, C), dtype),
        "ones_s": tile((C, C), dtype),
        "sum_s": SMEM((p.units, 2, C), jnp.float32),
        "numbers": SMEM((2, C), jnp.float32),
        "dg_s": SMEM((p.units, rows, C), jnp.float32),
        "full": Barrier(num_arrivals=2 * p.keysets + (2 + vectors) * p.units, num_barriers=STAGES),
        "free": Barrier(num_arrivals=p.units, num_barriers=STAGES),
        "state_full": Barrier(num_arrivals=p.units),
        "state_free": Barrier(num_arrivals=p.units),
        "begun": Barrier(num_barriers=p.units),
        "swap": Barrier(num_arrivals=p.units),
        "ready": Barrier(num_arrivals=p.units + 1, num_barriers=2),
    }
    optional = [a for a in (strength, leaving) if a is not None]

    def body(
        *refs, tiles, v_s, do_s, g_s, sr_s, pair_s, ones_s, sum_s, numbers, dg_s,
        full, free, state_full, state_free, begun, swap, ready,
    ):  # fmt: skip
        (qk_s,), (ends_s,) = tiles
        q_ref, k_ref, v_ref, do_ref, g_ref, s_ref, *refs = refs
        strength_ref = None if strength is None else refs.pop(0)
        leaving_ref = None if leaving is None else refs.pop(0)
        dq_ref, dk_ref, dv_ref, dg_ref, ends_ref = refs
        row, index, wg = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("wg")
        b, piece = lax.div(row, p.pieces), lax.rem(row, p.pieces)
        start = piece * p.piece_chunks
        count = jnp.minimum(p.piece_chunks, p.chunks - start)

        def chunk(n):
            return start + count - 1 - n

        @when(wg == feeder)
        def _feed():
            registers(40, "decrease")
            if leaving is not None:  # the first gradient lies where the tiles will
                join(ready.at[0])

            def issue(n, _):
                stage, c = lax.rem(n, STAGES), chunk(n)
                tokens = ds(c * C, C)

                @when(n >= STAGES)
                def _():
                    barrier_wait(free.at[stage])

                bar = full.at[stage]
                for unit in range(p.units):
                    out, state, key, query, column = place(p, index, unit)
                    if unit < p.keysets:
                        at = stage * p.keysets + unit
                        copy_in(q_ref.at[b, tokens, query], qk_s.at[at], bar)
                        copy_in(k_ref.at[b, tokens, key], qk_s.at[kinds + at], bar)
                    at, columns = stage * p.units + unit, ds(column, WIDTH)
                    copy_in(v_ref.at[b, tokens, state, columns], v_s.at[at], bar)
                    copy_in(do_ref.at[b, tokens, out, columns], do_s.at[at], bar)
                    copy_in(g_ref.at[b, state, c], g_s.at[at, 0], bar)
                    if strength is not None:
                        for i in (1, 2):  # by column and by row, each from a place of its own
                            copy_in(strength_ref.at[b, state, c], g_s.at[at, i], bar)

                @when(n > 0)
                def _():
                    barrier_wait(state_free)

                for unit in range(p.units):
                    _, state, _, _, column = place(p, index, unit)
                    copy_in(s_ref.at[b, state, c, ds(column, WIDTH)], sr_s.at[unit], state_full)

            lax.fori_loop(0, count, issue, None)

            def drain(n, _):
                barrier_wait(free.at[lax.rem(n, STAGES)])

            lax.fori_loop(jnp.maximum(count - STAGES, 0), count, drain, None)
            barrier_wait(state_free)
            join(ready.at[1])

        @when(wg < feeder)
        def _compute():
            registers(232, "increase")
            out, _, _, _, column = place(p, index, wg)
            square, narrow, wide = (C, C), (C, WIDTH), (C, p.key)
            columns, unit = ds(column, WIDTH), index * p.units + wg

            @when(wg == 0)
            def _():  # [t, i] = 1 where i >= t
                later = iota(square, 1) >= iota(square, 0)
                ones_s[...] = jnp.where(later, 1.0, 0.0).astype(dtype)
                number_tokens(numbers)

            if leaving is not None:
                copy_in(leaving_ref.at[row, out, columns], ends_s.at[wg], begun.at[wg])
                barrier_wait(begun.at[wg])
                first = load(ends_s.at[wg], layout=WGMMA)
                commit_smem()
                join(ready.at[0])
            else:
                first = zeros((WIDTH, p.key))
            commit_smem()
            if p.units > 1:
                join(swap)

            def step(n, r):
                stage, c = lax.rem(n, STAGES), chunk(n)
                at, tokens = stage * p.units + wg, ds(c * C, C)
                tiles_at = stage if p.keysets == 1 else at
                q_t, k_t = qk_s.at[tiles_at], qk_s.at[kinds + tiles_at]
                v_t, do_t, pair_t = v_s.at[at], do_s.at[at], pair_s.at[wg]
                g, state_t, grad_t = g_s.at[at], sr_s.at[wg], sr_s.at[p.units + wg]
                sums, dg = sum_s.at[wg], dg_s.at[wg]
                grad_t[...] = r.astype(dtype)
                barrier_wait(full.at[stage])
                total = prefix_sums(g.at[0], sums, numbers)
                commit_smem()
                end = sums[1, C - 1]
                leave, entry = jnp.exp2(end - total), jnp.exp2(total) * scale
                through = jnp.exp2(end)

                def decays():
                    total_c = load(sums.at[1], layout=COLS)
                    decay = per_row(total, square) - per_column(total_c, square)
                    return jnp.exp2(jnp.where(is_causal(numbers), decay, -jnp.inf)) * scale

                (scores, d_pairs), decay = overlapped([(q_t, k_t.T), (do_t, v_t.T)], decays)
                d_pairs = d_pairs * decay
                if strength is not None:
                    d_pairs = d_pairs * per_column(load(g.at[1], layout=COLS), square)
                pair_t[...] = (d_pairs * scores).astype(dtype)
                pairs, d_pairs = (scores * decay).astype(dtype), d_pairs.astype(dtype)
                commit_smem()
                # What the last step sent has left its tiles by now.
                wait_copies_out(0, wait_read_only=True)

                @when(n > 0)
                def _():
                    barrier_arrive(free.at[1 - stage])

                # Straddling pairs; what the leaving state's gradient gives to the values.
                (later, from_state), values = overlapped(
                    [(ones_s, pair_t), (k_t, grad_t.T)],
                    lambda: load(v_t, layout=WGMMA).astype(jnp.float32),
                )
                pair_t[...] = pairs
                commit_smem()
                straddling = jnp.where(is_causal(numbers, strict=True), later, 0.0)
                dg.at[0][...] = straddling.sum(axis=1)
                from_state = from_state * per_row(leave, narrow)
                writes = (from_state * values).sum(axis=1)

                # Values and strengths.
                u = matmul(pair_t.T, do_t) + from_state
                pair_t[...] = d_pairs
                if strength is not None:
                    values = load(v_t, layout=WGMMA).astype(jnp.float32)
                    dg.at[4][...] = (u * values).sum(axis=1)
                    write = load(g.at[2], layout=ROWS)
                    writes, leave = writes * write, leave * write
                    u = u * per_row(write, narrow)
                dg.at[2][...] = writes

                # Keys.
                dk = matmul(v_t, grad_t)
                v_t[...] = u.astype(dtype)  # dv
                commit_smem()
                (dk,) = accumulate((dk * per_row(leave, wide), pair_t.T, q_t))
                dk = dk.astype(dtype)
                if pooled:
                    grad_t[...] = dk

                # Queries and the gradient of the state.
                barrier_wait(state_full)
                passing = (load(state_t, layout=WGMMA).astype(jnp.float32) * r).sum(axis=1)
                dg.at[3][...] = passing * through

                def seen():
                    entry_c = jnp.exp2(load(sums.at[1], layout=COLS)) * scale
                    d_out_t = load(do_t.T, layout=WGMMA).astype(jnp.float32)
                    return (d_out_t * per_column(entry_c, (WIDTH, C))).astype(dtype)

                (read,), reading = overlapped([(q_t, state_t.T)], seen)
                d_read = load(do_t, layout=WGMMA).astype(jnp.float32)
                dg.at[1][...] = (read * d_read).sum(axis=1) * entry
                dq = matmul(do_t, state_t)
                dq, r = accumulate(
                    (dq * per_row(entry, wide), pair_t, k_t), (r * through, reading, q_t)
                )
                dq = dq.astype(dtype)

                if pooled:
                    # The first unit adds dq, the second dk; q and k are no longer read.
                    state_t[...] = dq
                    join(swap)
                    both = load(sr_s.at[2 * wg], layout=WGMMA).astype(jnp.float32)
                    both = both + load(sr_s.at[2 * wg + 1], layout=WGMMA).astype(jnp.float32)
                    mine = qk_s.at[kinds * wg + stage]
                    mine[...] = both.astype(dtype)
                    join(swap)
                else:
                    q_t[...] = dq
                    k_t[...] = dk
                commit_smem()
                barrier_arrive(state_free)
                copy_out(dg, dg_ref.at[b, unit, c], commit_group=False)
                copy_out(v_t, dv_ref.at[b, tokens, out, columns], commit_group=False)
                if pooled:

                    @when(wg == 0)
                    def _():
                        copy_out(mine, dq_ref.at[b, tokens, index], commit_group=False)

                    @when(wg == 1)
                    def _():
                        copy_out(mine, dk_ref.at[b, tokens, index], commit_group=False)
                else:
                    copy_out(q_t, dq_ref.at[b, tokens, unit], commit_group=False)
                    copy_out(k_t, dk_ref.at[b, tokens, unit], commit_group=False)
                commit_copies_out()
                return r

            r = lax.fori_loop(0, count, step, first)
            wait_copies_out(0, wait_read_only=True)
            barrier_arrive(free.at[lax.rem(count - 1, STAGES)])
            join(ready.at[1])  # the end goes where the tiles were
            ends_s.at[wg][...] = r
            commit_smem()
            copy_out(ends_s.at[wg], ends_ref.at[row, out, columns])
            wait_copies_out(0)

    return kernel(
        body,
        name="scalar_decay_backward",
        out_type=out_type,
        scratch=scratch,
        grid=(batch * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=p.units + 1,
    )(q, k, v, d_out, gates, states, *optional)
