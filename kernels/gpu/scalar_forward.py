# SPDX-License-Identifier: Apache-2.0
"""Forward pass of the scalar-decay family on Hopper: one sweep over the chunks, nothing stored.

A unit is one output head and 64 columns of its values, done by one warpgroup that keeps its state
S^T [64, K] in float32 registers; a block has one or two units, which read the same q and k where
they share a head, and a warpgroup that feeds them through TMA. Per chunk of C = 64 tokens::

    P  = (Q K^T) * D;   O = s (e^G * (Q S) + P V)
    S^T = e^{G_C} S^T + (e^{G_C - G} * V)^T K

A row whose heads do not fill the chip is cut into pieces, each with its own entering state, which
`states` finds first.

Bytes: q, k, v and out once each from and to device memory (q and k once more for every further pair
of units that shares a head, mostly out of the L2 cache), and gates. FLOPs a unit and chunk:
2 C^2 K + 2 C^2 64 + 4 C K 64, so 7.3 MFLOP for 64 KiB at K = V = 128: bound by memory on an H200.
"""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu._common import (
    CHUNK,
    COLS,
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
    depth,
    ds,
    is_causal,
    join,
    kernel,
    load,
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
from seqmix_kernels.gpu.calls import WIDTH
from seqmix_kernels.gpu.scalar_plan import Plan, place

C = CHUNK


def forward(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: jax.Array,
    strength: jax.Array | None,
    entering: jax.Array | None,
    *,
    scale: float,
    out_dtype,
    keep: bool,
) -> list[jax.Array]:
    """Outputs, end states, and what the backward pass reads.

    Args:
      plan: the cut.
      q: [B, T, Hq, K] bfloat16, T whole chunks; heads times slices, as everywhere with K.
      k: [B, T, Hk, K] bfloat16.
      v: [B, T, Hv, V] bfloat16.
      gates: [B, Hs, chunks, 64] float32; see `gates.chunk_log2`.
      strength: [B, Hs, chunks, 64] float32, factor of what a token writes; None: 1.
      entering: [B * pieces, Hs, V, K] float32, transposed states entering the pieces; None: zeros.
      scale: factor on the output.
      out_dtype: dtype of the output.
      keep: also write the sums of log2-decays within chunks and, if one query head reads each
        state, the states that enter the chunks.

    Returns:
      out [B, T, Ho, V]; states after the pieces [B * pieces, Ho, V, K] float32; with `keep`, sums
      [B, Hs, chunks, 64] float32, and states [B, Hs, chunks, V, K] bfloat16.
    """
    p, dtype = plan, q.dtype
    batch, time = q.shape[:2]
    vectors = 1 if strength is None else 2
    stages = depth(
        2 * C * (2 * p.keysets * p.key + p.units * WIDTH) + 4 * C * vectors * p.units,
        p.units * (WIDTH * p.key * 2 + C * WIDTH * jnp.dtype(out_dtype).itemsize),
    )
    out_type = (
        jax.ShapeDtypeStruct((batch, time, p.parts, p.value), out_dtype),
        jax.ShapeDtypeStruct((batch * p.pieces, p.parts, p.value, p.key), jnp.float32),
    )
    store = keep and p.heads.queries == 1
    if keep:
        out_type = (*out_type, jax.ShapeDtypeStruct(gates.shape, jnp.float32))
    if store:
        shape = (batch, p.kept, p.chunks, p.value, p.key)
        out_type = (*out_type, jax.ShapeDtypeStruct(shape, dtype))
    feeder = p.units
    scratch = {
        "tiles": union(
            [
                tile((stages * p.keysets, C, p.key), dtype),
                tile((stages * p.keysets, C, p.key), dtype),
            ],
            [SMEM((p.units, WIDTH, p.key), jnp.float32)],
        ),
        "v_s": tile((stages * p.units, C, WIDTH), dtype),
        "g_s": SMEM((stages * p.units, vectors, C), jnp.float32),
        "state_s": tile((p.units, WIDTH, p.key), dtype),
        "out_s": tile((p.units, C, WIDTH), out_dtype),
        "sum_s": SMEM((p.units, 2, C), jnp.float32),
        "numbers": SMEM((p.units, 2, C), jnp.float32),
        "full": Barrier(num_arrivals=2 * p.keysets + (1 + vectors) * p.units, num_barriers=stages),
        "free": Barrier(num_arrivals=p.units, num_barriers=stages),
        "begun": Barrier(num_barriers=p.units),
        "ready": Barrier(num_arrivals=p.units + 1, num_barriers=2),
    }
    optional = [x for x in (strength, entering) if x is not None]

    def body(*refs, tiles, v_s, g_s, state_s, out_s, sum_s, numbers, full, free, begun, ready):
        (q_s, k_s), (ends_s,) = tiles
        q_ref, k_ref, v_ref, g_ref, *rest = refs
        states_ref = rest.pop() if store else None
        sums_ref = rest.pop() if keep else None
        *rest, out_ref, last_ref = rest
        strength_ref = None if strength is None else rest[0]
        first_ref = None if entering is None else rest[-1]
        row, index, wg = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("wg")
        b, piece = lax.div(row, p.pieces), lax.rem(row, p.pieces)
        start = piece * p.piece_chunks
        count = jnp.minimum(p.piece_chunks, p.chunks - start)

        @when(wg == feeder)
        def _feed():
            registers(40, "decrease")
            if entering is not None:  # the first state lies where the tiles will
                join(ready.at[0])

            def issue(n, _):
                stage = lax.rem(n, stages)

                @when(n >= stages)
                def _():
                    barrier_wait(free.at[stage])

                tokens = ds((start + n) * C, C)
                for unit in range(p.units):
                    here, bar, c = place(p, index, unit), full.at[stage], start + n
                    if unit < p.keysets:
                        at = stage * p.keysets + unit
                        copy_in(q_ref.at[b, tokens, here.query], q_s.at[at], bar)
                        copy_in(k_ref.at[b, tokens, here.key], k_s.at[at], bar)
                    at, columns = stage * p.units + unit, ds(here.column, WIDTH)
                    copy_in(v_ref.at[b, tokens, here.state, columns], v_s.at[at], bar)
                    copy_in(g_ref.at[b, here.state, c], g_s.at[at, 0], bar)
                    if strength is not None:
                        copy_in(strength_ref.at[b, here.state, c], g_s.at[at, 1], bar)

            lax.fori_loop(0, count, issue, None)

            def drain(n, _):
                barrier_wait(free.at[lax.rem(n, stages)])

            lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)
            join(ready.at[1])

        @when(wg < feeder)
        def _compute():
            registers(232, "increase")
            here = place(p, index, wg)
            square, columns = (C, C), ds(here.column, WIDTH)
            first_of_state = here.column + lax.rem(here.out, p.heads.queries) == 0
            first_of_state &= lax.rem(here.key, p.slices) == 0
            number_tokens(numbers.at[wg])
            commit_smem()
            if entering is not None:
                copy_in(first_ref.at[row, here.kept, columns], ends_s.at[wg], begun.at[wg])
                barrier_wait(begun.at[wg])
                first = load(ends_s.at[wg], layout=WGMMA)
                commit_smem()
                join(ready.at[0])
            else:
                first = zeros((WIDTH, p.key))

            def step(n, s):
                stage = lax.rem(n, stages)
                at = stage * p.units + wg
                qk = stage if p.keysets == 1 else at
                g, sums = g_s.at[at], sum_s.at[wg]
                if keep:
                    wait_copies_out(1, wait_read_only=True)
                state_s.at[wg][...] = s.astype(dtype)
                barrier_wait(full.at[stage])
                total = prefix_sums(g.at[0], sums, numbers.at[wg])
                commit_smem()
                if keep:
                    c = start + n

                    @when(first_of_state)
                    def _():
                        copy_out(sums.at[1], sums_ref.at[b, here.state, c], commit_group=False)

                    if store:
                        kept = states_ref.at[b, here.kept, c, columns]
                        copy_out(state_s.at[wg], kept, commit_group=False)
                    commit_copies_out()
                end = sums[1, C - 1]

                def write():
                    leave = jnp.exp2(end - load(sums.at[1], layout=COLS))
                    factor = None
                    if strength is not None:
                        factor = load(g.at[1], layout=COLS)
                        leave = leave * factor
                    values = load(v_s.at[at].T, layout=WGMMA).astype(jnp.float32)
                    return (values * per_column(leave, (WIDTH, C))).astype(dtype), factor

                (scores, out), (written, factor) = overlapped(
                    [[(q_s.at[qk], k_s.at[qk].T)], [(q_s.at[qk], state_s.at[wg].T)]], write
                )
                decay = per_row(total, square) - per_column(load(sums.at[1], layout=COLS), square)
                weights = scores * jnp.exp2(jnp.where(is_causal(numbers.at[wg]), decay, -jnp.inf))
                if strength is not None:
                    weights = weights * per_column(factor, square)
                out, s = accumulate(
                    (
                        out * per_row(jnp.exp2(total), (C, WIDTH)),
                        weights.astype(dtype),
                        v_s.at[at],
                    ),
                    (s * jnp.exp2(end), written, k_s.at[qk]),
                )
                wait_copies_out(1 if keep else 0, wait_read_only=True)
                out_s.at[wg][...] = (out * scale).astype(out_dtype)
                commit_smem()
                barrier_arrive(free.at[stage])
                tokens = ds((start + n) * C, C)
                copy_out(out_s.at[wg], out_ref.at[b, tokens, here.part, columns])
                return s

            s = lax.fori_loop(0, count, step, first)
            join(ready.at[1])  # the end state goes where the tiles were
            ends_s.at[wg][...] = s
            commit_smem()
            copy_out(ends_s.at[wg], last_ref.at[row, here.part, columns])
            wait_copies_out(0)

    return kernel(
        body,
        name="scalar_decay_forward",
        out_type=out_type,
        scratch=scratch,
        grid=(batch * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=p.units + 1,
    )(q, k, v, gates, *optional)
