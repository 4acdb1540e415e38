# SPDX-License-Identifier: Apache-2.0
"""States of the scalar-decay family at the edges of chunks and pieces, on Hopper.

One sweep over S^T <- e^{G_C} S^T + (f * X)^T Y, forward with X = V, Y = K and f what a write leaves
at the chunk's end, or in reverse with X = dO, Y = Q and f what a read sees of the chunk's start,
which gives gradients of states. It finds what the other kernels start a piece from, and, stored per
chunk, what the backward reads instead of keeping states from the forward.

Bytes: x and y read once (y again for each further pair of units of a head), and K V 2 bytes written
a chunk and state where states are stored. FLOPs a unit and chunk: 2 C K 64.
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
    commit_smem,
    copy_in,
    copy_out,
    depth,
    ds,
    join,
    kernel,
    load,
    per_column,
    prefix_sums,
    registers,
    tile,
    wait_copies_out,
    when,
    zeros,
)
from seqmix_kernels.gpu.calls import WIDTH
from seqmix_kernels.gpu.scalar_plan import Plan, place

C = CHUNK


def sweep(
    plan: Plan,
    x: jax.Array,
    y: jax.Array,
    gates: jax.Array,
    strength: jax.Array | None,
    first: jax.Array | None,
    *,
    reverse: bool,
    store: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """States at the edges.

    Args:
      plan: the cut, of the states (forward) or the outputs (reverse).
      x: [B, T, H, V] bfloat16, values by state, or output gradients by output head.
      y: [B, T, H, K] bfloat16, keys or queries.
      gates: [B, Hs, chunks, 64] float32; see `gates.chunk_log2`.
      strength: [B, Hs, chunks, 64] float32 factor of what a token writes (forward), or None.
      first: [B * pieces, H, V, K] float32 where pieces begin, or None for zeros.
      reverse: from the last chunk to the first.
      store: also give the state entering each chunk.

    Returns:
      [B * pieces, H, V, K] float32 where pieces end (in the order of the sweep), H = Hs or Ho; and
      [B, Hs, chunks, V, K] bfloat16 or None.
    """
    p, dtype = plan, x.dtype
    batch = x.shape[0]
    heads = p.parts if reverse else p.kept
    vectors = 1 if strength is None else 2
    stages = depth(
        2 * C * (p.keysets * p.key + p.units * WIDTH) + 4 * C * vectors * p.units,
        p.units * WIDTH * p.key * 8,
    )
    out_type = [jax.ShapeDtypeStruct((batch * p.pieces, heads, p.value, p.key), jnp.float32)]
    if store:
        shape = (batch, heads, p.chunks, p.value, p.key)
        out_type.append(jax.ShapeDtypeStruct(shape, dtype))
    feeder = p.units
    scratch = {
        "y_s": tile((stages * p.keysets, C, p.key), dtype),
        "x_s": tile((stages * p.units, C, WIDTH), dtype),
        "g_s": SMEM((stages * p.units, vectors, C), jnp.float32),
        "state_s": tile((2 * p.units, WIDTH, p.key), dtype),
        "ends_s": SMEM((p.units, WIDTH, p.key), jnp.float32),
        "sum_s": SMEM((p.units, 2, C), jnp.float32),
        "full": Barrier(num_arrivals=p.keysets + (1 + vectors) * p.units, num_barriers=stages),
        "free": Barrier(num_arrivals=p.units, num_barriers=stages),
        "begun": Barrier(num_barriers=p.units),
        "done": Barrier(num_arrivals=p.units + 1),
    }
    optional = [a for a in (strength, first) if a is not None]

    def body(*refs, y_s, x_s, g_s, state_s, ends_s, sum_s, full, free, begun, done):
        x_ref, y_ref, g_ref, *refs = refs
        strength_ref = None if strength is None else refs.pop(0)
        first_ref = None if first is None else refs.pop(0)
        ends_ref, *stored_ref = refs
        row, index, wg = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("wg")
        b, piece = lax.div(row, p.pieces), lax.rem(row, p.pieces)
        start = piece * p.piece_chunks
        count = jnp.minimum(p.piece_chunks, p.chunks - start)

        def chunk(n):
            return start + (count - 1 - n if reverse else n)

        @when(wg == feeder)
        def _feed():
            registers(40, "decrease")

            def issue(n, _):
                stage = lax.rem(n, stages)

                @when(n >= stages)
                def _():
                    barrier_wait(free.at[stage])

                c = chunk(n)
                tokens = ds(c * C, C)
                for unit in range(p.units):
                    here, bar = place(p, index, unit), full.at[stage]
                    y_head, x_head = (here.query, here.out) if reverse else (here.key, here.state)
                    if unit < p.keysets:
                        at = stage * p.keysets + unit
                        copy_in(y_ref.at[b, tokens, y_head], y_s.at[at], bar)
                    at, columns = stage * p.units + unit, ds(here.column, WIDTH)
                    copy_in(x_ref.at[b, tokens, x_head, columns], x_s.at[at], bar)
                    copy_in(g_ref.at[b, here.state, c], g_s.at[at, 0], bar)
                    if strength is not None:
                        copy_in(strength_ref.at[b, here.state, c], g_s.at[at, 1], bar)

            lax.fori_loop(0, count, issue, None)

            def drain(n, _):
                barrier_wait(free.at[lax.rem(n, stages)])

            lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)

        @when(wg < feeder)
        def _compute():
            registers(232, "increase")
            here = place(p, index, wg)
            head, columns = here.part if reverse else here.kept, ds(here.column, WIDTH)
            if first is not None:
                copy_in(first_ref.at[row, head, columns], ends_s.at[wg], begun.at[wg])
                barrier_wait(begun.at[wg])
                begin = load(ends_s.at[wg], layout=WGMMA)
            else:
                begin = zeros((WIDTH, p.key))

            def step(n, s):
                stage = lax.rem(n, stages)
                at = stage * p.units + wg
                y_at = stage if p.keysets == 1 else at
                if store:
                    kept = state_s.at[2 * wg + lax.rem(n, 2)]
                    wait_copies_out(1, wait_read_only=True)
                    kept[...] = s.astype(dtype)
                    commit_smem()
                    copy_out(kept, stored_ref[0].at[b, head, chunk(n), columns])
                barrier_wait(full.at[stage])
                g, sums = g_s.at[at], sum_s.at[wg]
                prefix_sums(g.at[0], sums)
                commit_smem()
                total, end = load(sums.at[1], layout=COLS), sums[1, C - 1]
                factor = jnp.exp2(total if reverse else end - total)
                if strength is not None:
                    factor = factor * load(g.at[1], layout=COLS)
                written = load(x_s.at[at].T, layout=WGMMA).astype(jnp.float32)
                written = (written * per_column(factor, (WIDTH, C))).astype(dtype)
                (s,) = accumulate((s * jnp.exp2(end), written, y_s.at[y_at]))
                commit_smem()
                barrier_arrive(free.at[stage])
                return s

            s = lax.fori_loop(0, count, step, begin)
            ends_s.at[wg][...] = s
            commit_smem()
            copy_out(ends_s.at[wg], ends_ref.at[row, head, columns])
            wait_copies_out(0)

        join(done)

    ends, *stored = kernel(
        body,
        name="scalar_decay_" + ("reverse" if reverse else "states"),
        out_type=out_type,
        scratch=scratch,
        grid=(batch * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=p.units + 1,
    )(x, y, gates, *optional)
    return ends, stored[0] if store else None
