# SPDX-License-Identifier: Apache-2.0
"""Backward sweep of the delta rule with scalar decay, on Hopper: all gradients in one pass.

A block works for one output head and 64 or 128 columns of its values, in warpgroups with roles. An
owner carries dS^T [64, K], the gradient of the state that leaves the chunk, in float32 registers.
Per chunk, last to first, with A = s (Q K^T) * D and T~ from `delta_inverse`::

    dV'^T = dO^T A + e^{G_C - G} dS^T K^T;   dV^T = (beta dV'^T) T~
    dS_in^T = e^{G_C} dS^T + (s e^G dO^T) Q - (e^G dV^T) K

It publishes dS and dV in bfloat16, and goes on to the next chunk while the others, with the entering
state S and V~ = V' / beta from the forward sweep, read what it published. One for the queries::

    A;   dA = dO V~^T beta D s;   B = -dV V~^T beta D (strictly lower);   dQ = s e^G * (dO S^T) + dA K

and one for the keys::

    dK = (beta e^{G_C - G} V~) dS^T - (e^G dV) S^T + (B + B^T) K + dA^T Q

Only the first line of dV' and dS waits for the chunk before: all else is off the chain.

The gradient of log-decay t sums the pairs beta X, X = dO V~^T A - dV V~^T (K K^T) D, over i >= t >
j, the reads i >= t, the writes j < t, and what passes through the chunk; beta_j gets the sum of X
over i, and its write. A triangle of ones times X gives the sums over i >= t, a masked sum of rows
those over j < t: exact zeros stay zeros, so that nothing leaks from document to document. (Sums of
columns would cross warps, for which Mosaic gives all warpgroups of a block one buffer.)

Blocks that have parts of one head's dQ and dK write them side by side, and the caller adds them:
no atomics, the same bits every time. Bytes a token and head at K = V = 128: 768 of q, k and dO, 256
of V~, 128 of T~, 512 of S in; 768 of dQ, dK and dV out. FLOPs a chunk and head: 2 64^2 (6 K + 3 V)
+ 14 64 K V and 6 64^3 for V = 128, 25 MFLOP.
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
    VECTORS,
    C,
    Plan,
    accumulated,
    copy_vectors,
    entry,
    leave,
    lower_decay,
    lower_mask,
    matmul,
    strength,
    through,
    unknown_zero,
    upper_mask,
)

UNIT = (WIDTH, C)
ROWS_OF_UNIT = (C, WIDTH)
SUMS = 4
"""What the queries' warpgroup says about gates: straddling pairs, beta, what passes, reads."""
KEY_SUMS = 3
"""What the keys' warpgroup says: reads, writes, beta."""
# Registers a thread of the feeder, the owners, the queries' and the keys' warpgroup, by their
# number: a launch gives all of 640 threads 96, of 512 threads 128.
_REGISTERS = {5: (24, 112, 120, 112), 4: (32, 144, 168, 168)}


def reverse_plan(plan: Plan) -> Plan:
    """The cut of the backward sweep: pairs of units of one head."""
    return plan._replace(units=2 if plan.columns % 2 == 0 else 1)


def piece_gradients(plan, q, k, d_out, gates, beta, inverse, *, scale) -> jax.Array:
    """Gradients of the states that enter the pieces were those that leave them without one.

    Arguments as in `gradients`; [B * pieces, Ho, V, K] float32.
    """
    shape = (q.shape[0] * plan.pieces, plan.heads.outputs, plan.value, plan.key)
    out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _sweep(plan, q, k, d_out, gates, beta, inverse, None, None, None, out_type, scale)


def gradients(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    errors: jax.Array,
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
      errors: [B, T, Hs, V] bfloat16, V~ of the forward sweep.
      d_out: [B, T, Ho, V] bfloat16.
      gates: [2, B, Hs, chunks, 64] float32; see `gates.chunk_sums`.
      beta: [B, Hs, chunks, 64] float32.
      inverse: [B, Hs, chunks, 64, 64] bfloat16, T~^T.
      states: [B, Hs, chunks, V, K] bfloat16, transposed states that enter the chunks.
      leaving: [B * pieces, Ho, V, K] float32, gradients of the states that leave the pieces.
      scale: factor on the output.

    Returns:
      dq, dk [B, T, blocks, K], the parts of one output head side by side; dv [B, T, Ho, V]; sums
      for the gates [B, blocks, chunks, 4 and 3, 64] float32, see `SUMS` and `KEY_SUMS`; gradients
      of the states that enter the pieces [B * pieces, Ho, V, K] float32.
    """
    p = plan
    batch, time = q.shape[:2]
    parts = (batch, time, p.blocks, p.key)
    sums = (batch, p.blocks, p.chunks)
    out_type = (
        jax.ShapeDtypeStruct(parts, q.dtype),
        jax.ShapeDtypeStruct(parts, q.dtype),
        jax.ShapeDtypeStruct((batch, time, p.heads.outputs, p.value), q.dtype),
        jax.ShapeDtypeStruct((*sums, SUMS, C), jnp.float32),
        jax.ShapeDtypeStruct((*sums, KEY_SUMS, C), jnp.float32),
        jax.ShapeDtypeStruct((batch * p.pieces, p.heads.outputs, p.value, p.key), jnp.float32),
    )
    return _sweep(plan, q, k, d_out, gates, beta, inverse, errors, states, leaving, out_type, scale)


def _scratch(p: Plan, dtype, full_pass: bool) -> dict:
    units = p.units
    readers = 2 if full_pass else units + 1
    scratch = {
        "tiles": union(
            [tile((2, C, p.key), dtype), tile((2, C, p.key), dtype)],  # q, then dq; k, then dk
            [SMEM((units, WIDTH, p.key), jnp.float32)],
        ),
        "do_s": tile((2 * units, C, WIDTH), dtype),
        "g_s": SMEM((2, VECTORS, C), jnp.float32),
        "t_s": tile((C, C), dtype),
        "a_s": tile((C, C), dtype),  # A, then dA
        "ds_s": tile((units, WIDTH, p.key), dtype),
        "dv_s": tile((units, C, WIDTH), dtype),  # beta dV', then dV
        "full": Barrier(num_arrivals=2 + VECTORS + units, num_barriers=2),
        "free": Barrier(num_arrivals=readers, num_barriers=2),
        "t_full": Barrier(),
        "t_free": Barrier(num_arrivals=units),
        "a_ready": Barrier(),
        "begun": Barrier(num_barriers=units),
        "joined": Barrier(num_arrivals=units + 1),
        "left": Barrier(num_arrivals=units + (3 if full_pass else 2)),
    }
    if not full_pass:
        return scratch | {"a_free": Barrier(num_arrivals=units)}
    return scratch | {
        "new_s": tile((units, C, WIDTH), dtype),
        "s_s": tile((units, WIDTH, p.key), dtype),
        "pair_s": tile((C, C), dtype),  # X, then B
        "sums_s": SMEM((SUMS, C), jnp.float32),
        "key_sums_s": SMEM((KEY_SUMS, C), jnp.float32),
        "new_full": Barrier(num_arrivals=units),
        "new_free": Barrier(num_arrivals=2),
        "s_full": Barrier(num_arrivals=units),
        "s_free": Barrier(num_arrivals=2),
        "ds_full": Barrier(num_arrivals=units),
        "ds_free": Barrier(num_arrivals=2),
        "dv_full": Barrier(num_arrivals=units),
        "dv_free": Barrier(num_arrivals=2),
        "paired": Barrier(),
        "ended": Barrier(num_arrivals=units + 2),
    }


def _sweep(plan, q, k, d_out, gates, beta, inverse, errors, states, leaving, out_type, scale):
    p, dtype, full_pass = plan, q.dtype, states is not None
    units, wide = p.units, (C, p.key)
    scratch = _scratch(p, dtype, full_pass)
    # Warpgroups: the owners, the queries', the keys' (of a full pass), the feeder.
    for_queries, for_keys = units, units + 1
    feeder = units + (2 if full_pass else 1)
    counts = _REGISTERS.get(feeder + 1) if full_pass else None

    def own_registers(role):
        if counts:
            registers(counts[role], "increase" if role else "decrease")

    def body(*refs, **shared):
        b = _Names(shared)
        (q_s, k_s), (ends_s,) = b.tiles
        refs = list(refs)
        q_ref, k_ref, do_ref, g_ref, beta_ref, t_ref = (refs.pop(0) for _ in range(6))
        if full_pass:
            new_ref, s_ref, leaving_ref = (refs.pop(0) for _ in range(3))
            dq_ref, dk_ref, dv_ref, sums_ref, key_sums_ref = (refs.pop(0) for _ in range(5))
        (ends_ref,) = refs
        row, index, wg = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("wg")
        batch, piece = lax.div(row, p.pieces), lax.rem(row, p.pieces)
        start = piece * p.piece_chunks
        count = jnp.minimum(p.piece_chunks, p.chunks - start)
        here = place(p, index, 0)

        def chunk_of(n):
            return start + (count - 1 - n)

        def tokens_of(n):
            return ds(chunk_of(n) * C, C)

        def columns_of(unit):
            return ds(here.column + unit * WIDTH, WIDTH)

        def free_last(n):
            """The last chunk's gradients have left the tiles of its q or k."""

            @when(n > 0)
            def _():
                wait_copies_out(0, wait_read_only=True)
                barrier_arrive(b.free.at[lax.rem(n + 1, 2)])

        @when(wg == feeder)
        def _feed():
            own_registers(0)

            def issue_tokens(n):
                slot, tokens = lax.rem(n, 2), tokens_of(n)
                bar = b.full.at[slot]
                copy_in(k_ref.at[batch, tokens, here.key], k_s.at[slot], bar)
                copy_in(q_ref.at[batch, tokens, here.query], q_s.at[slot], bar)
                copy_vectors(g_ref, beta_ref, (batch, here.state, chunk_of(n)), b.g_s.at[slot], bar)
                for i in range(units):
                    out = do_ref.at[batch, tokens, here.out, columns_of(i)]
                    copy_in(out, b.do_s.at[slot * units + i], bar)

            def issue_inverse(n):
                copy_in(t_ref.at[batch, here.state, chunk_of(n)], b.t_s, b.t_full)

            def issue_errors(n):
                for i in range(units):
                    errors = new_ref.at[batch, tokens_of(n), here.state, columns_of(i)]
                    copy_in(errors, b.new_s.at[i], b.new_full)

            def issue_states(n):
                for i in range(units):
                    states = s_ref.at[batch, here.state, chunk_of(n), columns_of(i)]
                    copy_in(states, b.s_s.at[i], b.s_full)

            singles = [(issue_inverse, b.t_free)]
            if full_pass:
                singles += [(issue_errors, b.new_free), (issue_states, b.s_free)]
                join(b.joined)  # the gradient to start from lies where the tiles will
            issue_tokens(jnp.int32(0))
            for issue, _ in singles:
                issue(jnp.int32(0))

            @when(count > 1)
            def _():
                issue_tokens(jnp.int32(1))

            def step(n, _):
                for issue, free in singles:
                    barrier_wait(free)

                    @when(n + 1 < count)
                    def _(issue=issue):
                        issue(n + 1)

                barrier_wait(b.free.at[lax.rem(n, 2)])

                @when(n + 2 < count)
                def _():
                    issue_tokens(n + 2)

            lax.fori_loop(0, count, step, None)
            join(b.left)

        @when(wg < units)
        def _own():
            own_registers(1)
            columns = columns_of(wg)
            if full_pass:
                copy_in(leaving_ref.at[row, here.out, columns], ends_s.at[wg], b.begun.at[wg])
                barrier_wait(b.begun.at[wg])
                first = load(ends_s.at[wg], layout=WGMMA)
                commit_smem()  # read before TMA writes there
                join(b.joined)
            else:
                first = zeros((WIDTH, p.key))

            def step(n, d_state):
                slot = lax.rem(n, 2)
                g, q_t, k_t = b.g_s.at[slot], q_s.at[slot], k_s.at[slot]
                barrier_wait(b.full.at[slot])
                unit = wg + unknown_zero(g)
                ds_t, dv_t, do_t = b.ds_s.at[unit], b.dv_s.at[unit], b.do_s.at[slot * units + unit]
                if full_pass:

                    @when(n > 0)
                    def _():
                        barrier_wait(b.ds_free)

                ds_t[...] = d_state.astype(dtype)
                commit_smem()
                if full_pass:
                    barrier_arrive(b.ds_full)
                kept = matmul(ds_t, k_t.T) * per_column(leave(g, COLS), UNIT)
                barrier_wait(b.a_ready)
                (d_new,) = accumulated((kept, [(do_t.T, b.a_s)]))
                d_new = d_new * per_column(strength(g, COLS), UNIT)
                if full_pass:

                    @when(n > 0)
                    def _():
                        barrier_wait(b.dv_free)
                        wait_copies_out(0, wait_read_only=True)

                dv_t.T[...] = d_new.astype(dtype)
                commit_smem()
                barrier_wait(b.t_full)
                d_value = matmul(dv_t.T, b.t_s.T)
                barrier_arrive(b.t_free)
                if full_pass:
                    dv_t.T[...] = d_value.astype(dtype)
                    commit_smem()
                    barrier_arrive(b.dv_full)
                    copy_out(dv_t, dv_ref.at[batch, tokens_of(n), here.out, columns])
                else:
                    barrier_arrive(b.a_free)
                erased = (d_value * per_column(-entry(g, COLS), UNIT)).astype(dtype)
                read = load(do_t.T, layout=WGMMA).astype(jnp.float32)
                read = (read * per_column(entry(g, COLS) * scale, UNIT)).astype(dtype)
                (entering,) = accumulated((d_state * through(g), [(read, q_t), (erased, k_t)]))
                commit_smem()  # what was read, before TMA writes there
                barrier_arrive(b.ended if full_pass else b.free.at[slot])
                return entering

            d_state = lax.fori_loop(0, count, step, first)
            wait_copies_out(0)
            join(b.left)  # the gradient goes where the tiles were
            ends_s.at[wg][...] = d_state
            commit_smem()
            copy_out(ends_s.at[wg], ends_ref.at[row, here.out, columns])
            wait_copies_out(0)

        @when(wg == for_queries)
        def _queries():
            own_registers(2)

            def step(n, _):
                slot = lax.rem(n, 2)
                g, q_t, k_t = b.g_s.at[slot], q_s.at[slot], k_s.at[slot]
                barrier_wait(b.full.at[slot])
                if not full_pass:

                    @when(n > 0)
                    def _():
                        barrier_wait(b.a_free)

                zero = unknown_zero(g)
                decay = lower_decay(g, strict=False) * scale
                scores = matmul(q_t, k_t.T) * decay
                b.a_s[...] = scores.astype(dtype)
                commit_smem()
                barrier_arrive(b.a_ready)
                if not full_pass:
                    barrier_arrive(b.free.at[slot])
                    return
                free_last(n)
                own = [i + zero for i in range(units)]
                out = [b.do_s.at[slot * units + i] for i in own]
                new = [b.new_s.at[i] for i in own]
                states = [b.s_s.at[i] for i in own]
                barrier_wait(b.new_full)
                pairs = _over_values(out, [x.T for x in new])
                x = pairs * scores
                d_scores = (pairs * decay * per_column(strength(g, COLS), SQUARE)).astype(dtype)
                barrier_wait(b.s_full)
                barrier_wait(b.ds_full)
                passing = 0.0
                for i, s_t in zip(own, states, strict=True):
                    d_state = load(b.ds_s.at[i], layout=WGMMA).astype(jnp.float32)
                    passing += (load(s_t, layout=WGMMA).astype(jnp.float32) * d_state).sum(axis=1)
                passing = passing * through(g)
                commit_smem()
                barrier_arrive(b.ds_free)

                barrier_wait(b.dv_full)
                b.a_s[...] = d_scores  # the owners have read A
                d_values = [b.dv_s.at[i] for i in own]
                pairs, scores = accumulated(
                    (SQUARE, [(d, y.T) for d, y in zip(d_values, new, strict=True)]),
                    (SQUARE, [(k_t, k_t.T)]),
                )
                barrier_arrive(b.dv_free)
                barrier_arrive(b.new_free)
                pairs = pairs * lower_decay(g, strict=True)
                b.pair_s[...] = (x - pairs * scores).astype(dtype)
                weights = (pairs * per_column(-strength(g, COLS), SQUARE)).astype(dtype)
                commit_smem()
                ones = jnp.where(upper_mask(strict=False), 1.0, 0.0).astype(dtype)
                later = matmul(ones, b.pair_s) * per_column(strength(g, COLS), SQUARE)
                b.sums_s.at[0][...] = jnp.where(lower_mask(strict=True), later, 0.0).sum(axis=1)
                x_t = load(b.pair_s.T, layout=WGMMA).astype(jnp.float32)
                b.sums_s.at[1][...] = x_t.sum(axis=1)
                b.sums_s.at[2][...] = passing
                b.pair_s[...] = weights
                commit_smem()
                barrier_arrive(b.paired)

                (dq,) = accumulated((wide, list(zip(out, states, strict=True))))
                barrier_arrive(b.s_free)
                dq = dq * per_row(entry(g, ROWS) * scale, wide)
                reads = (dq * load(q_t, layout=WGMMA).astype(jnp.float32)).sum(axis=1)
                b.sums_s.at[3][...] = reads
                (dq,) = accumulated((dq, [(b.a_s, k_t)]))
                commit_smem()
                join(b.ended)
                q_t[...] = dq.astype(dtype)
                commit_smem()
                copy_out(q_t, dq_ref.at[batch, tokens_of(n), index])
                copy_out(b.sums_s, sums_ref.at[batch, index, chunk_of(n)])

            lax.fori_loop(0, count, step, None)
            if full_pass:
                wait_copies_out(0)
                barrier_arrive(b.free.at[lax.rem(count - 1, 2)])
            join(b.left)

        if not full_pass:
            return

        @when(wg == for_keys)
        def _keys():
            own_registers(3)

            def step(n, _):
                slot = lax.rem(n, 2)
                g, q_t, k_t = b.g_s.at[slot], q_s.at[slot], k_s.at[slot]
                barrier_wait(b.full.at[slot])
                zero = unknown_zero(g)
                own = [i + zero for i in range(units)]

                def with_key(x):
                    return (x * load(k_t, layout=WGMMA).astype(jnp.float32)).sum(axis=1)

                def scaled(x, factor):
                    x = load(x, layout=WGMMA).astype(jnp.float32)
                    return (x * per_row(factor, ROWS_OF_UNIT)).astype(dtype)

                barrier_wait(b.new_full)
                barrier_wait(b.ds_full)
                written = [scaled(b.new_s.at[i], leave(g, ROWS)) for i in own]
                (dk,) = accumulated(
                    (wide, [(w, b.ds_s.at[i]) for w, i in zip(written, own, strict=True)])
                )
                commit_smem()
                barrier_arrive(b.ds_free)
                barrier_arrive(b.new_free)
                free_last(n)
                d_beta = with_key(dk)
                writes = d_beta * strength(g, ROWS)
                b.key_sums_s.at[1][...] = writes
                b.key_sums_s.at[2][...] = d_beta
                dk = dk * per_row(strength(g, ROWS), wide)

                barrier_wait(b.s_full)
                barrier_wait(b.dv_full)
                erased = [scaled(b.dv_s.at[i], -entry(g, ROWS)) for i in own]
                (dk,) = accumulated(
                    (dk, [(e, b.s_s.at[i]) for e, i in zip(erased, own, strict=True)])
                )
                commit_smem()
                barrier_arrive(b.dv_free)
                barrier_arrive(b.s_free)
                # Of a difference exact zeros would not survive.
                reads = jnp.where(entry(g, ROWS) > 0.0, with_key(dk) - writes, 0.0)
                b.key_sums_s.at[0][...] = reads

                barrier_wait(b.paired)
                pairs = [(b.pair_s, k_t), (b.pair_s.T, k_t), (b.a_s.T, q_t)]
                (dk,) = accumulated((dk, pairs))
                commit_smem()
                join(b.ended)
                k_t[...] = dk.astype(dtype)
                commit_smem()
                copy_out(k_t, dk_ref.at[batch, tokens_of(n), index])
                copy_out(b.key_sums_s, key_sums_ref.at[batch, index, chunk_of(n)])

            lax.fori_loop(0, count, step, None)
            wait_copies_out(0)
            barrier_arrive(b.free.at[lax.rem(count - 1, 2)])
            join(b.left)

    arrays = [q, k, d_out, gates, beta, inverse]
    arrays += [errors, states, leaving] if full_pass else []
    return kernel(
        body,
        name="delta_gradients" if full_pass else "delta_piece_gradients",
        out_type=out_type,
        scratch=scratch,
        grid=(q.shape[0] * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=feeder + 1,
    )(*arrays)


def _over_values(left, right):
    """Sum of ``a @ b`` over the value columns of a block, [64, 64]."""
    return accumulated((SQUARE, list(zip(left, right, strict=True))))[0]


class _Names:
    """A block's shared memory and barriers, by name."""

    def __init__(self, shared: dict):
        self.__dict__.update(shared)
