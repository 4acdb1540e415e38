# SPDX-License-Identifier: Apache-2.0
"""Backward sweep of the delta rule with scalar decay, on Hopper: all gradients in one pass.

A unit is one output head and 64 columns of its values; its warpgroup carries dS^T [64, K], the
gradient of the state that leaves the chunk, in float32 registers. Per chunk, last to first, with S
the entering state, T from `delta_inverse`, N = strict(K K^T * D) and A = s (Q K^T) * D, first on
transposes as in the forward pass::

    W^T   = V^T - e^G S^T K^T;            V'^T = (beta W^T) T^T
    dV'^T = dO^T A + e^{G_C - G} dS^T K^T;  dR^T = dV'^T T;   dV = beta dR
    dS_in^T = e^{G_C} dS^T + (s e^G dO^T) Q - (beta e^G dR^T) K

then what the units of a head owe dQ and dK, which one warpgroup each sums over all value columns::

    dA = dO V'^T;   dQ = s e^G * (dO S^T) + (s dA * D) K
    dL = dR V'^T;   B = -beta dL * D;
    dK = (-beta e^G dR) S^T + (e^{G_C - G} V') dS^T + (B + B^T) K + (s dA * D)^T Q

V' solves (I + beta N) V' = beta W, hence dbeta = <dR, W> - rowsum(dL * N): nothing is divided by
beta. The gradient of log-decay t sums the pairs X_ij (what a product through D_ij gives) over
i >= t > j, the reads i >= t, the writes j < t, and what passes through the chunk. X times a
triangle of ones, X in two bfloat16 parts, gives the sums over j < t, a masked sum of columns those
over i >= t.

Blocks that have parts of one head's dQ and dK write them side by side, and the caller adds them:
no atomics, the same bits every time. Bytes a token and head at K = V = 128: 1 KiB of q, k, v and
dO, 128 of T, 512 of S in; 768 of dQ, dK and dV out. FLOPs a chunk: 64^2 (10 K + 4 V) + 14 64 K V
for the head and 10 64^3 more a unit, 27 MFLOP.
"""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu._common import (
    COLS,
    ROWS,
    SMEM,
    WGMMA,
    Barrier,
    barrier_arrive,
    barrier_wait,
    commit_smem,
    copy_in,
    copy_out,
    ds,
    join,
    kernel,
    load,
    per_column,
    per_row,
    registers,
    tile,
    union,
    wait_copies_out,
    when,
    zeros,
)
from seqmix_kernels.gpu.calls import WIDTH, place
from seqmix_kernels.gpu.delta_pieces import (
    SQUARE,
    C,
    Plan,
    accumulated,
    lower_decay,
    lower_mask,
    matmul,
    products,
    split,
    unknown_zero,
    upper_mask,
    zero_rows,
)

_VECTORS = 6
"""Of a chunk: high and low sums, by row and by column, and beta likewise."""
UNIT = (WIDTH, C)
ROWS_OF_UNIT = (C, WIDTH)
SUMS = 5
"""What a unit says about gates: straddling pairs, reads, writes, beta, what passes through."""


def reverse_plan(plan: Plan) -> Plan:
    """The cut of the backward sweep: pairs of units of one head, or of two small heads."""
    if plan.columns % 2 == 0:
        return plan._replace(units=2, sets=1)
    if plan.columns == 1 and plan.key == WIDTH and plan.heads.outputs % 2 == 0:
        return plan._replace(units=2, sets=2)
    return plan._replace(units=1, sets=1)


def piece_gradients(plan, q, k, d_out, gates, beta, inverse, *, scale) -> jax.Array:
    """Gradients of the states that enter the pieces were those that leave them without one.

    Arguments as in `gradients`; [B * pieces, Ho, V, K] float32.
    """
    shape = (q.shape[0] * plan.pieces, plan.heads.outputs, plan.value, plan.key)
    out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _sweep(plan, q, k, None, d_out, gates, beta, inverse, None, None, out_type, scale)


def gradients(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    gates: jax.Array,
    beta: jax.Array,
    inverse: jax.Array,
    states: jax.Array,
    leaving: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, ...]:
    """Gradients of all inputs.

    Args:
      plan: the cut, from `reverse_plan`.
      q: [B, T, Hq, K] bfloat16, T whole chunks.
      k: [B, T, Hk, K] bfloat16.
      v: [B, T, Hv, V] bfloat16.
      d_out: [B, T, Ho, V] bfloat16.
      gates: [2, B, Hs, chunks, 64] float32; see `gates.chunk_sums`.
      beta: [B, Hs, chunks, 64] float32.
      inverse: [B, Hs, chunks, 64, 64] bfloat16, T^T.
      states: [B, Hs, chunks, V, K] bfloat16, transposed states that enter the chunks.
      leaving: [B * pieces, Ho, V, K] float32, gradients of the states that leave the pieces.
      scale: factor on the output.

    Returns:
      dq, dk [B, T, parts, K], the parts of one output head side by side; dv [B, T, Ho, V]; sums for
      the gates [B, units, chunks, 5, 64] float32; gradients of the states that enter the pieces
      [B * pieces, Ho, V, K] float32.
    """
    p = plan
    batch, time = q.shape[:2]
    parts = (batch, time, p.blocks * p.sets, p.key)
    out_type = (
        jax.ShapeDtypeStruct(parts, q.dtype),
        jax.ShapeDtypeStruct(parts, q.dtype),
        jax.ShapeDtypeStruct((batch, time, p.heads.outputs, p.value), q.dtype),
        jax.ShapeDtypeStruct((batch, p.blocks * p.units, p.chunks, SUMS, C), jnp.float32),
        jax.ShapeDtypeStruct((batch * p.pieces, p.heads.outputs, p.value, p.key), jnp.float32),
    )
    return _sweep(plan, q, k, v, d_out, gates, beta, inverse, states, leaving, out_type, scale)


def _straddling(x, ones_s):
    """For each t, the sum of x[i, j] over i >= t > j."""
    high, low = split(x)
    (before,) = accumulated((SQUARE, [(low, ones_s), (high, ones_s)]))
    return jnp.where(lower_mask(strict=False), before, 0.0).sum(axis=0)


def _sweep(plan, q, k, v, d_out, gates, beta, inverse, states, leaving, out_type, scale):
    p, dtype, full_pass = plan, q.dtype, states is not None
    shared = p.units == 2 and p.sets == 1  # two warpgroups work for one head
    per_set = p.units // p.sets
    feeder = p.units
    scratch = {
        "tiles": union(
            [tile((2 * p.sets, C, p.key), dtype), tile((2 * p.sets, C, p.key), dtype)],
            [SMEM((p.units, WIDTH, p.key), jnp.float32)],
        ),
        "g_s": SMEM((2 * p.sets, _VECTORS, C), jnp.float32),
        "do_s": tile((p.units, C, WIDTH), dtype),
        "t_s": tile((p.sets, C, C), dtype),  # T^T, then B
        "a_s": tile((p.sets, C, C), dtype),  # A, then s dA * D
        "kq_full": Barrier(num_arrivals=p.sets * (2 + _VECTORS), num_barriers=2),
        "kq_free": Barrier(num_arrivals=p.units, num_barriers=2),
        "s_full": Barrier(num_arrivals=(2 if full_pass else 1) * p.units),
        "s_free": Barrier(num_arrivals=p.units),
        "t_full": Barrier(num_arrivals=p.sets),
        "t_free": Barrier(num_arrivals=p.units),
        "a_ready": Barrier(num_arrivals=per_set, num_barriers=p.sets),
        "begun": Barrier(num_barriers=p.units),
        "joined": Barrier(num_arrivals=p.units + 1, num_barriers=2),
    }
    if full_pass:
        scratch |= {
            "v_s": tile((p.units, C, WIDTH), dtype),  # V, then W, then dV
            "s_s": tile((p.units, WIDTH, p.key), dtype),
            "ds_s": tile((p.units, WIDTH, p.key), dtype),
            "new_s": tile((p.units, C, WIDTH), dtype),
            "dr_s": tile((p.units, C, WIDTH), dtype),
            "ones_s": tile((C, C), dtype),
            "sums_s": SMEM((p.units, SUMS, C), jnp.float32),
            "v_full": Barrier(num_arrivals=p.units),
            "v_free": Barrier(num_arrivals=p.units),
            "swapped": Barrier(num_arrivals=per_set, num_barriers=p.sets),
            "paired": Barrier(),
        }
    scratch["ended"] = Barrier(num_arrivals=p.units)

    def body(
        *refs, tiles, g_s, do_s, t_s, a_s, kq_full, kq_free, s_full, s_free, t_full, t_free,
        a_ready, begun, joined, ended, v_s=None, s_s=None, ds_s=None, new_s=None, dr_s=None,
        ones_s=None, sums_s=None, v_full=None, v_free=None, swapped=None, paired=None,
    ):  # fmt: skip
        (q_s, k_s), (ends_s,) = tiles
        refs = list(refs)
        q_ref, k_ref, do_ref, g_ref, beta_ref, t_ref = (refs.pop(0) for _ in range(6))
        if full_pass:
            v_ref, s_ref, leaving_ref = (refs.pop(0) for _ in range(3))
            dq_ref, dk_ref, dv_ref, sums_ref = (refs.pop(0) for _ in range(4))
        (ends_ref,) = refs
        row, index, wg = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("wg")
        b, piece = lax.div(row, p.pieces), lax.rem(row, p.pieces)
        start = piece * p.piece_chunks
        count = jnp.minimum(p.piece_chunks, p.chunks - start)

        def chunk_of(n):
            return start + (count - 1 - n)

        def issue_kq(n):
            slot, chunk = lax.rem(n, 2), chunk_of(n)
            bar, tokens = kq_full.at[slot], ds(chunk * C, C)
            for i in range(p.sets):
                at, here = slot * p.sets + i, place(p, index, i)
                copy_in(k_ref.at[b, tokens, here.key], k_s.at[at], bar)
                copy_in(q_ref.at[b, tokens, here.query], q_s.at[at], bar)
                for j in range(4):  # by row and by column, each from a place of its own
                    copy_in(g_ref.at[j % 2, b, here.state, chunk], g_s.at[at, j], bar)
                for j in (4, 5):
                    copy_in(beta_ref.at[b, here.state, chunk], g_s.at[at, j], bar)

        def issue_s(n):
            chunk = chunk_of(n)
            for i in range(p.units):
                here = place(p, index, i)
                columns = ds(here.column, WIDTH)
                if full_pass:
                    copy_in(s_ref.at[b, here.state, chunk, columns], s_s.at[i], s_full)
                copy_in(do_ref.at[b, ds(chunk * C, C), here.out, columns], do_s.at[i], s_full)

        def issue_t(n):
            for i in range(p.sets):
                copy_in(t_ref.at[b, place(p, index, i).state, chunk_of(n)], t_s.at[i], t_full)

        def issue_v(n):
            for i in range(p.units):
                here = place(p, index, i)
                columns = ds(here.column, WIDTH)
                tokens = ds(chunk_of(n) * C, C)
                copy_in(v_ref.at[b, tokens, here.state, columns], v_s.at[i], v_full)

        singles = [(issue_s, s_free), (issue_t, t_free)] + ([(issue_v, v_free)] * full_pass)

        @when(wg == feeder)
        def _feed():
            if p.units == 2:
                registers(40, "decrease")
            if full_pass:  # the gradient to start from lies where the tiles will
                join(joined.at[0])
            issue_kq(jnp.int32(0))
            for issue, _ in singles:
                issue(jnp.int32(0))

            @when(count > 1)
            def _():
                issue_kq(jnp.int32(1))

            def step(n, _):
                @when(n > 0)
                def _():
                    barrier_wait(kq_free.at[lax.rem(n - 1, 2)])

                    @when(n + 1 < count)
                    def _():
                        issue_kq(n + 1)

                for issue, free in singles:
                    barrier_wait(free)

                    @when(n + 1 < count)
                    def _(issue=issue):
                        issue(n + 1)

            lax.fori_loop(0, count, step, None)
            barrier_wait(kq_free.at[lax.rem(count - 1, 2)])
            join(joined.at[1])

        @when(wg < feeder)
        def _compute():
            if p.units == 2:
                registers(232, "increase")
            here = place(p, index, wg)
            columns = ds(here.column, WIDTH)
            if full_pass:
                copy_in(leaving_ref.at[row, here.out, columns], ends_s.at[wg], begun.at[wg])

                @when(wg == 0)
                def _():
                    ones_s[...] = jnp.where(upper_mask(strict=True), 1.0, 0.0).astype(dtype)
                    commit_smem()

                barrier_wait(begun.at[wg])
                first = load(ends_s.at[wg], layout=WGMMA)
                commit_smem()  # read before TMA writes there
                join(joined.at[0])
            else:
                first = zeros((WIDTH, p.key))

            def in_role(role, work):
                """`work` in the warpgroup with the role: 0 for the queries', 1 for the keys'."""
                if shared:
                    when(wg == role)(work)
                else:
                    work()

            def step(n, d_state):
                slot = lax.rem(n, 2)
                own = lax.div(wg, per_set)
                at = slot * p.sets + own
                g, q_t, k_t = g_s.at[at], q_s.at[at], k_s.at[at]
                tokens = ds(chunk_of(n) * C, C)
                barrier_wait(kq_full.at[slot])
                zero = unknown_zero(g)
                unit, mine = wg + zero, own + zero
                partners = [unit, 1 - wg + zero] if shared else [unit]
                a_t, t_t = a_s.at[mine], t_s.at[mine]

                def attend():
                    weights = matmul(q_t, k_t.T) * lower_decay(g, strict=False) * scale
                    a_t[...] = weights.astype(dtype)
                    commit_smem()

                in_role(0, attend)
                if shared:
                    barrier_arrive(a_ready.at[own])
                low = d_state.astype(dtype)
                if full_pass:
                    ds_s.at[unit][...] = low
                barrier_wait(s_full)
                known = [(s_s.at[unit], k_t.T)] if full_pass else []
                kept, *known = products((low, k_t.T), *known)
                end_high, end_low = g[2, C - 1], g[3, C - 1]
                through = jnp.exp2(end_high + end_low)

                # Vectors by column take 16 registers each: they are read where they are used.
                def entry_c():
                    return jnp.exp2(load(g.at[2], layout=COLS) + load(g.at[3], layout=COLS))

                def leave_c():
                    high, low = load(g.at[2], layout=COLS), load(g.at[3], layout=COLS)
                    return jnp.exp2((end_high - high) + (end_low - low))

                d_out_t = load(do_s.at[unit].T, layout=WGMMA)
                if full_pass:
                    states_t = load(s_s.at[unit], layout=WGMMA).astype(jnp.float32)
                    passing = (states_t * d_state).sum(axis=1) * through
                    barrier_wait(v_full)
                    values_t = load(v_s.at[unit].T, layout=WGMMA).astype(jnp.float32)
                    error = values_t - known[0] * per_column(entry_c(), UNIT)
                    v_s.at[unit].T[...] = error.astype(dtype)
                    written = error * per_column(load(g.at[5], layout=COLS), UNIT)
                    solve = [(written.astype(dtype), t_t)]
                barrier_wait(t_full)
                if shared:
                    barrier_wait(a_ready.at[own])
                d_new, *new = products((d_out_t, a_t), *(solve if full_pass else []))
                d_new = d_new + kept * per_column(leave_c(), UNIT)
                if full_pass:
                    new_s.at[unit].T[...] = new[0].astype(dtype)
                d_right = matmul(d_new.astype(dtype), t_t.T)
                if full_pass:
                    dr_s.at[unit].T[...] = d_right.astype(dtype)
                    commit_smem()
                    if shared:
                        barrier_arrive(swapped.at[own])
                read = d_out_t.astype(jnp.float32) * per_column(entry_c() * scale, UNIT)
                erased = d_right * per_column(-(load(g.at[5], layout=COLS) * entry_c()), UNIT)
                both = [(read.astype(dtype), q_t), (erased.astype(dtype), k_t)]
                (entering,) = accumulated((d_state * through, both))
                if not full_pass:
                    commit_smem()  # what was read, before TMA writes there
                    barrier_arrive(s_free)
                    barrier_arrive(t_free)
                    barrier_arrive(kq_free.at[slot])
                    if shared:
                        join(ended)
                    return entering

                @when(n > 0)
                def _():  # the last chunk's gradients have left the tiles of its q and k
                    wait_copies_out(0, wait_read_only=True)
                    barrier_arrive(kq_free.at[1 - slot])

                def beta_r():
                    return load(g.at[4], layout=ROWS)

                def entry_r():
                    return jnp.exp2(load(g.at[0], layout=ROWS) + load(g.at[1], layout=ROWS))

                right = load(dr_s.at[unit], layout=WGMMA).astype(jnp.float32)
                error = load(v_s.at[unit], layout=WGMMA).astype(jnp.float32)
                d_beta = (right * error).sum(axis=1)
                v_s.at[unit][...] = (right * per_row(beta_r(), ROWS_OF_UNIT)).astype(dtype)
                commit_smem()
                copy_out(v_s.at[unit], dv_ref.at[b, tokens, here.out, columns])
                if shared:
                    barrier_wait(swapped.at[own])
                sums = sums_s.at[unit]
                sums.at[3][...] = d_beta
                sums.at[4][...] = passing
                wide = (C, p.key)

                def for_queries():
                    (pairs,) = accumulated(
                        (SQUARE, [(do_s.at[u], new_s.at[u].T) for u in partners])
                    )
                    x = pairs * load(a_t, layout=WGMMA).astype(jnp.float32)
                    weights = (pairs * lower_decay(g, strict=False) * scale).astype(dtype)
                    a_t[...] = weights
                    commit_smem()
                    if shared:
                        pairs_sum = _straddling(x, ones_s)
                        barrier_arrive(paired)
                    (dq,) = accumulated((wide, [(do_s.at[u], s_s.at[u]) for u in partners]))
                    if shared:
                        barrier_arrive(s_free)
                    dq = dq * per_row(entry_r() * scale, wide)
                    reads = (dq * load(q_t, layout=WGMMA).astype(jnp.float32)).sum(axis=1)
                    (dq,) = accumulated((dq, [(weights, k_t)]))
                    if shared:
                        sums.at[0][...] = pairs_sum
                        sums.at[1][...] = reads
                        sums.at[2][...] = zero_rows()
                        barrier_arrive(t_free)
                        finish((dq, q_t, dq_ref))
                    else:
                        # Into the tile of q it can go only after the last product with q.
                        for_keys(x, reads, dq.astype(dtype))

                def for_keys(x=0.0, query_reads=0.0, dq=None):
                    pairs, scores = accumulated(
                        (SQUARE, [(dr_s.at[u], new_s.at[u].T) for u in partners]),
                        (SQUARE, [(k_t, k_t.T)]),
                    )
                    pairs = pairs * lower_decay(g, strict=True)
                    minus = per_row(-beta_r(), SQUARE)
                    weights = (pairs * minus).astype(dtype)
                    t_t[...] = weights
                    commit_smem()
                    pairs = pairs * scores
                    sums.at[3][...] = d_beta - pairs.sum(axis=1)
                    x = x + pairs * minus
                    if p.units == 2:

                        @when(wg == 1)
                        def _():
                            barrier_wait(paired)

                    pairs_sum = _straddling(x, ones_s)
                    if p.units == 2 and not shared:

                        @when(wg == 0)
                        def _():
                            barrier_arrive(paired)

                    erased = [
                        (
                            load(dr_s.at[u], layout=WGMMA).astype(jnp.float32)
                            * per_row(-(beta_r() * entry_r()), ROWS_OF_UNIT)
                        ).astype(dtype)
                        for u in partners
                    ]
                    (dk,) = accumulated(
                        (wide, [(e, s_s.at[u]) for e, u in zip(erased, partners, strict=True)])
                    )
                    barrier_arrive(s_free)
                    reads = (dk * load(k_t, layout=WGMMA).astype(jnp.float32)).sum(axis=1)
                    high_r, low_r = load(g.at[0], layout=ROWS), load(g.at[1], layout=ROWS)
                    leave_r = jnp.exp2((end_high - high_r) + (end_low - low_r))
                    written = [
                        (
                            load(new_s.at[u], layout=WGMMA).astype(jnp.float32)
                            * per_row(leave_r, ROWS_OF_UNIT)
                        ).astype(dtype)
                        for u in partners
                    ]
                    (dk,) = accumulated(
                        (dk, [(w, ds_s.at[u]) for w, u in zip(written, partners, strict=True)])
                    )
                    writes = (dk * load(k_t, layout=WGMMA).astype(jnp.float32)).sum(axis=1) - reads
                    sums.at[0][...] = pairs_sum
                    sums.at[1][...] = reads + query_reads
                    sums.at[2][...] = writes
                    (dk,) = accumulated((dk, [(weights, k_t), (t_t.T, k_t), (a_t.T, q_t)]))
                    barrier_arrive(t_free)
                    finish((dk, k_t, dk_ref), *([] if shared else [(dq, q_t, dq_ref)]))

                def finish(*results):
                    if p.units == 2:  # the other one reads these tiles too, or has its turn first
                        join(ended)
                    wait_copies_out(0, wait_read_only=True)
                    barrier_arrive(v_free)
                    part = index * p.sets + own
                    for d, into, _ in results:
                        into[...] = d.astype(dtype)
                    commit_smem()
                    for _, into, ref in results:
                        copy_out(into, ref.at[b, tokens, part])
                    copy_out(sums, sums_ref.at[b, index * p.units + wg, chunk_of(n)])

                if shared:
                    in_role(0, for_queries)
                    in_role(1, for_keys)
                else:
                    for_queries()
                return entering

            d_state = lax.fori_loop(0, count, step, first)
            if full_pass:
                wait_copies_out(0)
                barrier_arrive(kq_free.at[lax.rem(count - 1, 2)])
            join(joined.at[1])  # the gradient goes where the tiles were
            ends_s.at[wg][...] = d_state
            commit_smem()
            copy_out(ends_s.at[wg], ends_ref.at[row, here.out, columns])
            wait_copies_out(0)

    arrays = [q, k, d_out, gates, beta, inverse] + ([v, states, leaving] if full_pass else [])
    return kernel(
        body,
        name="delta_gradients" if full_pass else "delta_piece_gradients",
        out_type=out_type,
        scratch=scratch,
        grid=(q.shape[0] * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=p.units + 1,
    )(*arrays)
