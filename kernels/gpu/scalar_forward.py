# SPDX-License-Identifier: Apache-2.0
"""Forward pass of the scalar-decay family on Hopper: one sweep over the chunks.

A unit is one output head and 64 columns of its values; a block has one or two units, which read
the same q and k where they share a head. Each unit has two warpgroups. Its **owner** keeps the
state S^T [64, K] in float32 registers, publishes it in bfloat16 in shared memory before every chunk
and goes on to the next one; its **reader** computes outputs from what is published. Per chunk of
C = 64 tokens::

    owner   S^T = e^{G_C} S^T + (e^{G_C - G} * V)^T K
    reader  P   = (Q K^T) * D;   O = s (e^G * (Q S) + P V)

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
    OWNER,
    READER,
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
    depth,
    ds,
    is_causal,
    join,
    kernel,
    load,
    overlapped,
    per_column,
    per_row,
    prefix_sums,
    registers,
    tile,
    union,
    unknown_zero,
    wait_copies_out,
    when,
    zeros,
)
from seqmix_kernels.gpu.calls import WIDTH
from seqmix_kernels.gpu.scalar_plan import Plan, place

C = CHUNK
SQUARE = (C, C)


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
    units = p.units
    vectors = 1 if strength is None else 2
    stages = depth(
        2 * C * (2 * p.keysets * p.key + units * WIDTH) + 4 * C * vectors * units,
        units * (WIDTH * p.key * 2 + C * WIDTH * jnp.dtype(out_dtype).itemsize),
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
    scratch = {
        "tiles": union(
            [
                tile((stages * p.keysets, C, p.key), dtype),
                tile((stages * p.keysets, C, p.key), dtype),
            ],
            [SMEM((units, WIDTH, p.key), jnp.float32)],
        ),
        "v_s": tile((stages * units, C, WIDTH), dtype),
        "g_s": SMEM((stages * units, vectors, C), jnp.float32),
        "state_s": tile((units, WIDTH, p.key), dtype),
        "out_s": tile((units, C, WIDTH), out_dtype),
        "sum_s": SMEM((2 * units, 2, C), jnp.float32),
        "full": Barrier(num_arrivals=2 * p.keysets + (1 + vectors) * units, num_barriers=stages),
        "free": Barrier(num_arrivals=2 * units, num_barriers=stages),
        "state_full": Barrier(num_barriers=units),
        "state_free": Barrier(num_barriers=units),
        "begun": Barrier(num_barriers=units),
        "ready": Barrier(num_arrivals=units),
        "done": Barrier(num_arrivals=2 * units),
    }
    optional = [x for x in (strength, entering) if x is not None]

    def body(
        *refs, tiles, v_s, g_s, state_s, out_s, sum_s,
        full, free, state_full, state_free, begun, ready, done,
    ):  # fmt: skip
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

        def feed(n):
            """Starts the copies of a chunk's inputs."""
            stage, c = lax.rem(n, stages), start + n
            tokens, bar = ds(c * C, C), full.at[stage]
            for unit in range(units):
                here = place(p, index, unit)
                if unit < p.keysets:
                    at = stage * p.keysets + unit
                    copy_in(q_ref.at[b, tokens, here.query], q_s.at[at], bar)
                    copy_in(k_ref.at[b, tokens, here.key], k_s.at[at], bar)
                at, columns = stage * units + unit, ds(here.column, WIDTH)
                copy_in(v_ref.at[b, tokens, here.state, columns], v_s.at[at], bar)
                copy_in(g_ref.at[b, here.state, c], g_s.at[at, 0], bar)
                if strength is not None:
                    copy_in(strength_ref.at[b, here.state, c], g_s.at[at, 1], bar)

        def of_keys(stage, unit):
            return stage if p.keysets == 1 else stage * units + unit

        @when(wg < units)
        def _own():
            if units == 2:
                registers(OWNER, "decrease")
            here = place(p, index, wg)
            columns = ds(here.column, WIDTH)
            writes_sums = here.column + lax.rem(here.out, p.heads.queries) == 0
            writes_sums &= lax.rem(here.key, p.slices) == 0
            if entering is not None:
                copy_in(first_ref.at[row, here.kept, columns], ends_s.at[wg], begun.at[wg])
                barrier_wait(begun.at[wg])
                first = load(ends_s.at[wg], layout=WGMMA)
                commit_smem()
                join(ready)  # the first states lie where the tiles will
            else:
                first = zeros((WIDTH, p.key))

            @when(wg == 0)
            def _():
                lax.fori_loop(0, jnp.minimum(stages, count), lambda n, _: feed(n), None)

            def step(n, s):
                stage = lax.rem(n, stages)
                at = stage * units + wg
                g, sums = g_s.at[at], sum_s.at[2 * wg + lax.rem(n, 2)]
                barrier_wait(full.at[stage])
                state_t = state_s.at[wg + unknown_zero(g[0, 0])]

                if keep:
                    wait_copies_out(1, wait_read_only=True)
                prefix_sums(g.at[0], sums)  # where those of the last chunk but one were

                @when(n > 0)
                def _():
                    barrier_wait(state_free.at[wg])

                if keep:
                    wait_copies_out(0, wait_read_only=True)
                state_t[...] = s.astype(dtype)
                commit_smem()
                barrier_arrive(state_full.at[wg])
                if keep:
                    c = start + n

                    @when(writes_sums)
                    def _():
                        copy_out(sums.at[1], sums_ref.at[b, here.state, c], commit_group=False)

                    if store:
                        kept = states_ref.at[b, here.kept, c, columns]
                        copy_out(state_t, kept, commit_group=False)
                    commit_copies_out()

                @when((wg == 0) & (n > 0))
                def _():
                    barrier_wait(free.at[lax.rem(n - 1, stages)])

                    @when(n - 1 + stages < count)
                    def _():
                        feed(n - 1 + stages)

                end = sums[1, C - 1]
                leave = jnp.exp2(end - load(sums.at[1], layout=COLS))
                if strength is not None:
                    leave = leave * load(g.at[1], layout=COLS)
                written = load(v_s.at[at].T, layout=WGMMA).astype(jnp.float32)
                written = (written * per_column(leave, (WIDTH, C))).astype(dtype)
                (s,) = accumulate((s * jnp.exp2(end), written, k_s.at[of_keys(stage, wg)]))
                commit_smem()
                barrier_arrive(free.at[stage])
                return s

            s = lax.fori_loop(0, count, step, first)
            barrier_wait(state_free.at[wg])  # phases that nothing waited for yet

            @when(wg == 0)
            def _():
                barrier_wait(free.at[lax.rem(count - 1, stages)])

            join(done)  # the end state goes where the tiles were
            ends_s.at[wg][...] = s
            commit_smem()
            copy_out(ends_s.at[wg], last_ref.at[row, here.part, columns])
            wait_copies_out(0)

        @when(wg >= units)
        def _read():
            if units == 2:
                registers(READER, "increase")
            me = wg - units
            here = place(p, index, me)

            def step(n, _):
                stage = lax.rem(n, stages)
                at, keys = stage * units + me, of_keys(stage, me)
                g, sums = g_s.at[at], sum_s.at[2 * me + lax.rem(n, 2)]
                barrier_wait(full.at[stage])
                zero = unknown_zero(g[0, 0])
                barrier_wait(state_full.at[me])

                def decays():
                    total = load(sums.at[0], layout=ROWS)
                    power = per_row(total, SQUARE) - per_column(
                        load(sums.at[1], layout=COLS), SQUARE
                    )
                    decay = jnp.exp2(jnp.where(is_causal(), power, -jnp.inf))
                    if strength is not None:
                        decay = decay * per_column(load(g.at[1], layout=COLS), SQUARE)
                    return decay, jnp.exp2(total)

                (scores, out), (decay, entry) = overlapped(
                    [
                        [(q_s.at[keys], k_s.at[keys].T)],
                        [(q_s.at[keys], state_s.at[me + zero].T)],
                    ],
                    decays,
                )
                commit_smem()
                barrier_arrive(state_free.at[me])
                out = out * per_row(entry, SQUARE)
                (out,) = accumulate((out, (scores * decay).astype(dtype), v_s.at[at]))
                wait_copies_out(0, wait_read_only=True)
                out_t = out_s.at[me + zero]
                out_t[...] = (out * scale).astype(out_dtype)
                commit_smem()
                barrier_arrive(free.at[stage])
                tokens = ds((start + n) * C, C)
                copy_out(out_t, out_ref.at[b, tokens, here.part, ds(here.column, WIDTH)])

            lax.fori_loop(0, count, step, None)
            wait_copies_out(0)
            join(done)

    return kernel(
        body,
        name="scalar_decay_forward",
        out_type=out_type,
        scratch=scratch,
        grid=(batch * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=2 * units,
    )(q, k, v, gates, *optional)
