# SPDX-License-Identifier: Apache-2.0
"""Backward pass of the scalar-decay family on Hopper: one sweep over the chunks in reverse.

Units and blocks are those of the forward. Each unit has two warpgroups. Its **owner** carries R^T
[64, K], the gradient of its state's 64 columns, in registers, publishes it in shared memory before
every chunk and goes on to the next one. Its **reader** computes gradients from what is published,
the inputs and the chunk's entering state S, while the owner is at the next chunk. Per chunk, with
decays D, strengths w, e^G at the reads and e^{G_C - G} at the writes::

    owner    R  <- e^{G_C} R + (s e^G * Q)^T dO
    readers  P  = s (Q K^T) * D;   dP = s (dO V^T) * D * w
             dV = w (e^{G_C - G} * (K R) + P^T dO);   dw = <that, v> / w
             dK = e^{G_C - G} w * (V R^T) + dP^T Q
             dQ = s e^G * (dO S^T) + dP K

Readers of units that share q and k take half of the columns of dQ and of dK each, for both units;
what several blocks have of one head is added by the caller: no atomics, the same bits every time.

The gradient of log-decay t sums the pairs X_ij = dP_ij (Q K^T)_ij with i >= t > j, the reads
i >= t, the writes j < t, and what passes through the chunk. As <q_i, dq_i> is the sum of X_ij over
j and of what i reads, and <k_j, dk_j> that of X_ij over i and of what j writes, it is::

    sum_{i >= t} (<q_i, dq_i> - <k_i, dk_i>) + all writes + what passes

where pairs that do not straddle t cancel: both sides come from the same rounded dP, in float32, and
only within a chunk and a document, so that nothing is lost where little passes.

Bytes: q, k, v, dO read and dQ, dK, dV written once each, and K V 2 bytes of state a chunk: 1.1 GiB
for 32k tokens, 16 heads, K = V = 128. FLOPs a chunk and head: 64^2 (4 K + 6 V) + 14 64 K V, more
where units of two heads share q and k.
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
    commit_smem,
    copy_in,
    copy_out,
    ds,
    is_later,
    join,
    kernel,
    load,
    overlapped,
    per_column,
    per_row,
    products,
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
STAGES = 2
SQUARE = (C, C)


def backward(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    sums: jax.Array,
    strength: jax.Array | None,
    states: jax.Array,
    leaving: jax.Array | None,
    *,
    scale: float,
) -> tuple[jax.Array, ...]:
    """Gradients of one sweep.

    Args:
      plan: the cut, of the outputs.
      q: [B, T, Hq, K] bfloat16, T whole chunks; heads times slices, as everywhere with K.
      k: [B, T, Hk, K] bfloat16.
      v: [B, T, Hv, V] bfloat16.
      d_out: [B, T, Ho, V] bfloat16.
      sums: [B, Hs, chunks, 64] float32, inclusive sums of log2-decays within chunks.
      strength: [B, Hs, chunks, 64] float32, or None for 1.
      states: [B, Hs, chunks, V, K] bfloat16, transposed states entering the chunks.
      leaving: [B * pieces, Ho, V, K] float32, gradients of the states that leave the pieces, or
        None for zeros.
      scale: factor on the output.

    Returns:
      dq, dk [B, T, parts, K] bfloat16, parts of one head next to each other; dv [B, T, Ho, V]
      bfloat16; of the gradient of log-decays, in parts too, what tokens give that are at or after a
      token [B, sets, chunks, 64], and the chunk's ends [B, sets, chunks], float32; gradients of
      strengths [B, units, chunks, 64] (None without); gradients of the states that enter the pieces
      [B * pieces, Ho, V, K] float32.
    """
    p, dtype = plan, q.dtype
    batch, time = q.shape[:2]
    units, tiles_of_keys = p.units, p.key // WIDTH
    pooled = units == 2 and p.shared  # the readers divide the columns of dq and dk
    parts = p.blocks if pooled else p.blocks * units
    sets = p.sets if p.shared else 1  # sets of decays that one reader meets
    rows = 2 * sets + (strength is not None)
    out_type = (
        jax.ShapeDtypeStruct((batch, time, parts, p.key), dtype),
        jax.ShapeDtypeStruct((batch, time, parts, p.key), dtype),
        jax.ShapeDtypeStruct((batch, time, p.parts, p.value), dtype),
        jax.ShapeDtypeStruct((batch, p.blocks, p.chunks, units, rows, C), jnp.float32),
        jax.ShapeDtypeStruct((batch, p.blocks, p.chunks, units, C), jnp.float32),
        jax.ShapeDtypeStruct((batch * p.pieces, p.parts, p.value, p.key), jnp.float32),
    )
    kinds = STAGES * p.keysets
    scratch = {
        "tiles": union(
            [tile((2 * kinds, C, p.key), dtype)],  # q, then k
            [SMEM((units, WIDTH, p.key), jnp.float32)],
        ),
        "v_s": tile((STAGES * units, C, WIDTH), dtype),
        "do_s": tile((STAGES * units, C, WIDTH), dtype),
        "g_s": SMEM((STAGES * p.sets, 2, C), jnp.float32),
        "s_s": tile((units, WIDTH, p.key), dtype),
        "r_s": tile((units, WIDTH, p.key), dtype),
        "pair_s": tile((units, C, C), dtype),
        "out_s": tile((units, C, WIDTH), dtype),
        "full": Barrier(num_arrivals=2 * (p.keysets + units + p.sets), num_barriers=STAGES),
        "free": Barrier(num_arrivals=2 * units, num_barriers=STAGES),
        "state_full": Barrier(num_arrivals=units),
        "state_free": Barrier(num_arrivals=2 * units),
        "grad_full": Barrier(num_arrivals=units),
        "grad_free": Barrier(num_arrivals=units),
        "begun": Barrier(num_barriers=units),
        "swap": Barrier(num_arrivals=units),
        "ready": Barrier(num_arrivals=units),
        "done": Barrier(num_arrivals=2 * units),
    }
    optional = [a for a in (strength, leaving) if a is not None]

    def body(
        *refs, tiles, v_s, do_s, g_s, s_s, r_s, pair_s, out_s,
        full, free, state_full, state_free, grad_full, grad_free, begun, swap, ready, done,
    ):  # fmt: skip
        (qk_s,), (ends_s,) = tiles
        q_ref, k_ref, v_ref, do_ref, g_ref, s_ref, *refs = refs
        strength_ref = None if strength is None else refs.pop(0)
        leaving_ref = None if leaving is None else refs.pop(0)
        dq_ref, dk_ref, dv_ref, dg_ref, pass_ref, ends_ref = refs
        row, index, wg = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("wg")
        b, piece = lax.div(row, p.pieces), lax.rem(row, p.pieces)
        start = piece * p.piece_chunks
        count = jnp.minimum(p.piece_chunks, p.chunks - start)

        def chunk(n):
            return start + count - 1 - n

        def of_keys(stage, unit):
            return stage if p.keysets == 1 else stage * p.keysets + unit

        def of_gates(stage, unit):
            return stage if p.sets == 1 else stage * p.sets + unit

        def feed(n):
            """Starts the copies of a chunk's inputs."""
            stage, c = lax.rem(n, STAGES), chunk(n)
            tokens, bar = ds(c * C, C), full.at[stage]
            for unit in range(units):
                here = place(p, index, unit)
                if unit < p.keysets:
                    at = stage * p.keysets + unit
                    copy_in(q_ref.at[b, tokens, here.query], qk_s.at[at], bar)
                    copy_in(k_ref.at[b, tokens, here.key], qk_s.at[kinds + at], bar)
                at, columns = stage * units + unit, ds(here.column, WIDTH)
                copy_in(v_ref.at[b, tokens, here.state, columns], v_s.at[at], bar)
                copy_in(do_ref.at[b, tokens, here.out, columns], do_s.at[at], bar)
                if unit < p.sets:
                    at = stage * p.sets + unit
                    for i in range(2):  # to be read by row and by column
                        copy_in(g_ref.at[b, here.state, c], g_s.at[at, i], bar)

        def feed_states(n):
            for unit in range(units):
                here = place(p, index, unit)
                ref = s_ref.at[b, here.kept, chunk(n), ds(here.column, WIDTH)]
                copy_in(ref, s_s.at[unit], state_full)

        @when(wg < units)
        def _own():
            if units == 2:
                registers(OWNER, "decrease")
            here = place(p, index, wg)
            part, columns = here.part, ds(here.column, WIDTH)
            spans = [ds(i * WIDTH, WIDTH) for i in range(tiles_of_keys)]
            if leaving is not None:
                copy_in(leaving_ref.at[row, part, columns], ends_s.at[wg], begun.at[wg])
                barrier_wait(begun.at[wg])
                first = tuple(load(ends_s.at[wg, :, at], layout=WGMMA) for at in spans)
                commit_smem()
                join(ready)  # the first gradients lie where the tiles will
            else:
                first = tuple(zeros(SQUARE) for _ in spans)

            @when(wg == 0)
            def _():
                feed(0)
                feed_states(0)

                @when(count > 1)
                def _():
                    feed(1)

            def step(n, grad):
                stage = lax.rem(n, STAGES)
                at = stage * units + wg
                q_t, do_t, g = qk_s.at[of_keys(stage, wg)], do_s.at[at], g_s.at[of_gates(stage, wg)]
                barrier_wait(full.at[stage])
                same = wg + unknown_zero(g[0, 0])
                state_t, grad_t = s_s.at[same], r_s.at[same]

                @when(n > 0)
                def _():
                    barrier_wait(grad_free)

                for x, at in zip(grad, spans, strict=True):
                    grad_t.at[:, at][...] = x.astype(dtype)
                commit_smem()
                barrier_arrive(grad_full)

                @when((wg == 0) & (n > 0))
                def _():
                    barrier_wait(state_free)
                    feed_states(n)
                    barrier_wait(free.at[1 - stage])

                    @when(n + 1 < count)
                    def _():
                        feed(n + 1)

                entry = jnp.exp2(load(g.at[1], layout=COLS)) * scale
                through = jnp.exp2(g[0, C - 1])
                d_read = load(do_t.T, layout=WGMMA).astype(jnp.float32)
                d_read = (d_read * per_column(entry, SQUARE)).astype(dtype)
                grad = accumulate(
                    *(
                        (x * through, d_read, q_t.at[:, at])
                        for x, at in zip(grad, spans, strict=True)
                    )
                )
                commit_smem()
                barrier_arrive(free.at[stage])

                # What passes through the chunk, by columns of the state.
                barrier_wait(state_full)
                passing = sum(
                    (
                        load(state_t.at[:, at], layout=WGMMA).astype(jnp.float32)
                        * load(grad_t.at[:, at], layout=WGMMA).astype(jnp.float32)
                    ).sum(axis=1)
                    for at in spans
                )
                commit_smem()
                barrier_arrive(state_free)
                pass_ref.at[b, index, chunk(n), wg][...] = passing * through
                return tuple(grad)

            grad = lax.fori_loop(0, count, step, first)
            barrier_wait(grad_free)  # phases that nothing waited for yet

            @when(wg == 0)
            def _():
                barrier_wait(state_free)
                barrier_wait(free.at[lax.rem(count - 1, STAGES)])

            join(done)  # the end goes where the tiles were
            for x, at in zip(grad, spans, strict=True):
                ends_s.at[wg, :, at][...] = x
            commit_smem()
            copy_out(ends_s.at[wg], ends_ref.at[row, part, columns])
            wait_copies_out(0)

        @when(wg >= units)
        def _read():
            if units == 2:
                registers(READER, "increase")
            me = wg - units
            here = place(p, index, me)
            part = index if pooled else index * units + me
            everyone = range(units) if pooled else [me]
            members = [everyone] if p.whole else [[u] for u in everyone]  # units of each set

            def send(x, ref):
                wait_copies_out(0, wait_read_only=True)
                out_s.at[me][...] = x.astype(dtype)
                commit_smem()
                copy_out(out_s.at[me], ref)

            def step(n, _):
                stage, c = lax.rem(n, STAGES), chunk(n)
                tokens = ds(c * C, C)
                key_at = of_keys(stage, me)
                q_t, k_t = qk_s.at[key_at], qk_s.at[kinds + key_at]
                g = g_s.at[of_gates(stage, me)]
                dg = dg_ref.at[b, index, c, me]

                def of_unit(ref, u):
                    return ref.at[stage * units + u]

                def gates_of(i):
                    return g_s.at[of_gates(stage, members[i][0])]

                def pairs_of(i):
                    return pair_s.at[(me if len(members) == 1 else i) + zero]

                if strength is not None:  # for which there is no room in shared memory

                    def strength_of(u):
                        ref = strength_ref.at[b, place(p, index, u).state, c]
                        return load(ref, layout=ROWS, optimized=False)

                    strength_t = strength_of(me)
                    strengths = [strength_of(units_of_set[0]) for units_of_set in members]
                barrier_wait(full.at[stage])
                zero = unknown_zero(g[0, 0])
                grad_t = r_s.at[me + zero]

                def decays():  # from token (row) to token (column)
                    by_column = per_column(load(g.at[1], layout=COLS), SQUARE)
                    decay = by_column - per_row(load(g.at[0], layout=ROWS), SQUARE)
                    return jnp.exp2(jnp.where(is_later(), decay, -jnp.inf)) * scale

                (scores, d_pairs), decay = overlapped(
                    [
                        [(k_t, q_t.T)],
                        [
                            (of_unit(v_s, u), of_unit(do_s, u).T)
                            for u in (members[0] if p.whole else [me])
                        ],
                    ],
                    decays,
                )
                scores, d_pairs = (scores * decay).astype(dtype), d_pairs * decay
                if strength is not None:
                    d_pairs = d_pairs * per_row(strength_t, SQUARE)
                pair_s.at[me + zero][...] = d_pairs.astype(dtype)
                commit_smem()
                if len(members) > 1:
                    join(swap)

                def writing(g):
                    return jnp.exp2(g[0, C - 1] - load(g.at[0], layout=ROWS))

                # Values.
                barrier_wait(grad_full)
                inter, intra = products([(k_t, grad_t.T)], [(scores, of_unit(do_s, me))])
                dv = inter * per_row(writing(g), SQUARE) + intra
                if strength is not None:
                    values = load(of_unit(v_s, me), layout=WGMMA).astype(jnp.float32)
                    dg.at[2 * sets][...] = (dv * values).sum(axis=1)
                    dv = dv * per_row(strength_t, SQUARE)
                send(dv, dv_ref.at[b, tokens, here.part, ds(here.column, WIDTH)])

                def keys(i, at):
                    """A set's part of dk, what its tokens write and <k, dk>, by token."""
                    inter, intra = products(
                        [(of_unit(v_s, u), r_s.at[u + zero, :, at]) for u in members[i]],
                        [(pairs_of(i), q_t.at[:, at])],
                    )
                    g = gates_of(i)
                    write = writing(g)
                    if strength is not None:
                        write = write * strengths[i]
                    inter = inter * per_row(write, SQUARE)
                    total = inter + intra
                    k = load(k_t.at[:, at], layout=WGMMA).astype(jnp.float32)
                    return total, (inter * k).sum(axis=1), (total * k).sum(axis=1)

                def queries(i, at):
                    """A set's part of dq, and <q, dq> by token."""
                    inter, intra = products(
                        [(of_unit(do_s, u), s_s.at[u + zero, :, at]) for u in members[i]],
                        [(pairs_of(i).T, k_t.at[:, at])],
                    )
                    entry = jnp.exp2(load(gates_of(i).at[0], layout=ROWS)) * scale
                    total = inter * per_row(entry, SQUARE) + intra
                    q = load(q_t.at[:, at], layout=WGMMA).astype(jnp.float32)
                    return total, (total * q).sum(axis=1)

                def all_keys(blocks):
                    """Sends dk; what the tokens write and -<k, dk>, by set."""
                    found = [[0.0, 0.0] for _ in members]
                    for block in blocks:
                        at, dk = ds(block * WIDTH, WIDTH), 0.0
                        for i, sums in enumerate(found):
                            total, write, both = keys(i, at)
                            dk, sums[0], sums[1] = dk + total, sums[0] + write, sums[1] - both
                        send(dk, dk_ref.at[b, tokens, part, at])
                    return found

                def all_queries(blocks):
                    """Sends dq; <q, dq> by set."""
                    found = [0.0 for _ in members]
                    for block in blocks:
                        at, dq = ds(block * WIDTH, WIDTH), 0.0
                        for i in range(len(members)):
                            total, both = queries(i, at)
                            dq, found[i] = dq + total, found[i] + both
                        send(dq, dq_ref.at[b, tokens, part, at])
                    return found

                if pooled and tiles_of_keys == 1:  # one reader has dk, the other dq

                    @when(me == 0)
                    def _():
                        for i, (write, both) in enumerate(all_keys([0])):
                            dg.at[2 * i][...], dg.at[2 * i + 1][...] = both, write
                        barrier_arrive(grad_free)
                        barrier_wait(state_full)

                    @when(me == 1)
                    def _():
                        barrier_arrive(grad_free)
                        barrier_wait(state_full)
                        for i, both in enumerate(all_queries([0])):
                            dg.at[2 * i][...], dg.at[2 * i + 1][...] = both, both * 0.0

                else:
                    blocks = [me] if pooled else range(tiles_of_keys)
                    by_keys = all_keys(blocks)
                    barrier_arrive(grad_free)
                    barrier_wait(state_full)
                    by_queries = all_queries(blocks)
                    for i, ((write, both), read) in enumerate(
                        zip(by_keys, by_queries, strict=True)
                    ):
                        dg.at[2 * i][...], dg.at[2 * i + 1][...] = both + read, write
                commit_smem()
                barrier_arrive(state_free)
                barrier_arrive(free.at[stage])
                if len(members) > 1:
                    join(swap)

            lax.fori_loop(0, count, step, None)
            wait_copies_out(0)
            join(done)

    dq, dk, dv, dg, passing, ends = kernel(
        body,
        name="scalar_decay_backward",
        out_type=out_type,
        scratch=scratch,
        grid=(batch * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=2 * units,
    )(q, k, v, d_out, sums, states, *optional)
    return dq, dk, dv, *_gates(p, dg, passing, sets), ends


def _gates(plan, dg, passing, sets):
    """The parts of the gates' gradients that `backward` returns, from what the warpgroups found."""
    p, batch = plan, dg.shape[0]
    dg = jnp.moveaxis(dg, 3, 2)  # [B, blocks, units, chunks, rows, 64]
    found = dg[..., : 2 * sets, :].reshape(*dg.shape[:4], sets, 2, C)
    if p.shared:  # each reader has a part of every set
        found = jnp.moveaxis(jnp.sum(found, axis=2), 3, 2)
    else:
        found = found[..., 0, :, :]
    both, writes = found[..., 0, :], found[..., 1, :]
    passing = jnp.sum(passing.reshape(batch, p.blocks, p.chunks, p.sets, -1), axis=-1)
    ends = jnp.sum(writes, axis=-1) + jnp.moveaxis(passing, 2, 3)
    both, ends = both.reshape(batch, -1, p.chunks, C), ends.reshape(batch, -1, p.chunks)
    if dg.shape[-2] == 2 * sets:
        return both, ends, None
    return both, ends, dg[..., -1, :].reshape(batch, -1, p.chunks, C)
