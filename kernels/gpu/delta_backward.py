# SPDX-License-Identifier: Apache-2.0
"""Backward sweep of the delta rule with scalar decay, on Hopper: all gradients in one pass.

A block works for one output head and 64 or 128 columns of its values, in four warpgroups with
roles. The owner carries dS^T [V, K], the gradient of the state that leaves the chunk, in float32
registers. Per chunk, last to first, with A = s (Q K^T) * D and T~ from `delta_inverse`::

    dV'^T = dO^T A + e^{G_C - G} dS^T K^T;   dV^T = (beta dV'^T) T~
    dS_in^T = e^{G_C} dS^T + (s e^G dO^T) Q - (e^G dV^T) K

It publishes dS and dV in bfloat16 and goes on to the next chunk, while two warpgroups read them,
the entering state S and V~ = V' / beta of the forward sweep. The first makes A for the owner and
the pairs of the reads by queries, the second those of the rule's own reads, each one tile in shared
memory; then each sums up the gradients of half the keys (at K = 64 one those of q, one those of
k)::

    dA = s (dO V~^T) * D beta;   B = -(dV V~^T) * D beta, strictly lower
    dQ = s e^G (dO S^T) + dA K
    dK = beta e^{G_C - G} (V~ dS^T) - e^G (dV S^T) + (B + B^T) K + dA^T Q

So only the owner's four waits for products are one after the other from chunk to chunk. The fourth
warpgroup feeds. Registers are what is scarce: tiles are 64 by 64, whatever waits for another role
waits in bfloat16 or in shared memory, and addresses are made again from an unknown zero.

The gradient of log-decay t sums the pairs beta X, X = dO V~^T A - dV V~^T (K K^T) D, over i >= t >
j, the reads i >= t, the writes j < t, and what passes through the chunk; beta_j gets the sum of X
over i, and its write. A triangle of ones times X gives the sums over i >= t, a masked sum of rows
those over j < t: exact zeros stay zeros, so that nothing leaks from document to document. (Sums of
columns would cross warps, for which Mosaic gives all warpgroups of a block one buffer.)

Blocks that have parts of one head's dQ and dK write them side by side, and the caller adds them:
no atomics, the same bits every time. Bytes a token and head at K = V = 128: 768 of q, k and dO, 256
of V~, 128 of T~, 512 of S in; 768 of dQ, dK and dV out. FLOPs of a chunk of one head: 14 64 K V +
2 64^2 (6 K + 6 V) + 64^3 (2 V / 64 + 4), and 2 64 K V for what passes, 29 MFLOP.
"""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu._common import (
    COLS,
    ROWS,
    WGMMA,
    accumulated,
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
    wait_copies_out,
    when,
    zeros,
)
from seqmix_kernels.gpu.calls import WIDTH, place
from seqmix_kernels.gpu.delta_pieces import (
    SQUARE,
    C,
    Plan,
    copy_vectors,
    entry,
    leave,
    lower_decay,
    lower_mask,
    matmul,
    number_tokens,
    products,
    rows_and_columns,
    strength,
    through,
    unknown_zero,
    upper_mask,
    zero_rows,
)
from seqmix_kernels.gpu.delta_roles import (
    SUMS,
    Names,
    each,
    held,
    role_registers,
    row_sums,
    scratch,
    sum_of_products,
    tiles_of,
)


def reverse_plan(plan: Plan) -> Plan:
    """The cut of the backward sweep: pairs of units of one head."""
    return plan._replace(units=2 if plan.columns % 2 == 0 else 1)


def piece_gradients(plan, q, k, d_out, vectors, inverse, *, scale) -> jax.Array:
    """Gradients of the states that enter the pieces were those that leave them without one.

    Arguments as in `gradients`; [B * pieces, Ho, V, K] float32.
    """
    shape = (q.shape[0] * plan.pieces, plan.heads.outputs, plan.value, plan.key)
    out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _sweep(plan, q, k, d_out, vectors, inverse, None, None, None, out_type, scale)


def gradients(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    errors: jax.Array,
    d_out: jax.Array,
    vectors: jax.Array,
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
      vectors: [B, Hs, chunks, 4, 64] float32; see `delta_pieces.chunk_vectors`.
      inverse: [B, Hs, chunks, 64, 64] bfloat16, T~^T.
      states: [B, Hs, chunks, V, K] bfloat16, transposed states that enter the chunks.
      leaving: [B * pieces, Ho, V, K] float32, gradients of the states that leave the pieces.
      scale: factor on the output.

    Returns:
      dq, dk [B, T, blocks, K], the parts of one output head side by side; dv [B, T, Ho, V]; sums
      for the gates [B, blocks, chunks, 2, 6, 64] float32, in two parts, see `SUMS`; gradients of
      the states that enter the pieces [B * pieces, Ho, V, K] float32.
    """
    p = plan
    batch, time = q.shape[:2]
    parts = (batch, time, p.blocks, p.key)
    sums = (batch, p.blocks, p.chunks)
    out_type = (
        jax.ShapeDtypeStruct(parts, q.dtype),
        jax.ShapeDtypeStruct(parts, q.dtype),
        jax.ShapeDtypeStruct((batch, time, p.heads.outputs, p.value), q.dtype),
        jax.ShapeDtypeStruct((*sums, 2, SUMS, C), jnp.float32),
        jax.ShapeDtypeStruct((batch * p.pieces, p.heads.outputs, p.value, p.key), jnp.float32),
    )
    return _sweep(plan, q, k, d_out, vectors, inverse, errors, states, leaving, out_type, scale)


def _sweep(plan, q, k, d_out, vectors, inverse, errors, states, leaving, out_type, scale):
    p, dtype, full_pass = plan, q.dtype, states is not None
    units, halves = p.units, p.key // WIDTH
    owner, outputs_first, feeder = 0, 1, 3 if full_pass else 2

    def body(*refs, **shared):
        b = Names(shared)
        (q_s, k_s), (ends_s,) = b.tiles
        refs = list(refs)
        q_ref, k_ref, do_ref, g_ref, t_ref = (refs.pop(0) for _ in range(5))
        if full_pass:
            new_ref, s_ref, leaving_ref = (refs.pop(0) for _ in range(3))
            dq_ref, dk_ref, dv_ref, sums_ref = (refs.pop(0) for _ in range(4))
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

        def keys_of(half):
            return ds(half * WIDTH, WIDTH)

        def tiles_at(slot):
            """The tiles, at addresses that no earlier work knows, or would keep in registers."""
            zero = unknown_zero(b.g_s.at[slot])
            own = [i + zero for i in range(units)]
            tiles = {
                "q": tiles_of(q_s, slot + zero, halves),
                "k": tiles_of(k_s, slot + zero, halves),
                "out": [b.do_s.at[slot * units + i] for i in own],
                "d_values": [b.dv_s.at[i] for i in own],
                "d_states": [tiles_of(b.ds_s, i, halves) for i in own],
                "by_reads": b.pairs_s.at[zero],
                "inverse": b.t_s.at[zero],
            }
            if full_pass:
                tiles["new"] = [b.new_s.at[i] for i in own]
                tiles["states"] = [tiles_of(b.s_s, i, halves) for i in own]
                tiles["by_rule"] = b.pairs_s.at[1 + zero]
                tiles["sums"] = [b.sums_s.at[i + zero] for i in range(2)]
            return Names(tiles)

        @when(wg == feeder)
        def _feed():
            role_registers("feeder", units, full_pass)

            def issue_tokens(n):
                slot, tokens = lax.rem(n, 2), tokens_of(n)
                bar = b.full.at[slot]
                for h in range(halves):
                    copy_in(
                        k_ref.at[batch, tokens, here.key, keys_of(h)],
                        tiles_of(k_s, slot, halves)[h],
                        bar,
                    )
                    copy_in(
                        q_ref.at[batch, tokens, here.query, keys_of(h)],
                        tiles_of(q_s, slot, halves)[h],
                        bar,
                    )
                copy_vectors(g_ref.at[batch, here.state, chunk_of(n)], b.g_s.at[slot], bar)
                for i in range(units):
                    out = do_ref.at[batch, tokens, here.out, columns_of(i)]
                    copy_in(out, b.do_s.at[slot * units + i], bar)

            def issue_inverse(n):
                copy_in(t_ref.at[batch, here.state, chunk_of(n)], b.t_s.at[0], b.t_full)

            def issue_errors(n):
                for i in range(units):
                    errors = new_ref.at[batch, tokens_of(n), here.state, columns_of(i)]
                    copy_in(errors, b.new_s.at[i], b.new_full)

            def issue_states(n):
                states = s_ref.at[batch, here.state, chunk_of(n)]
                for i in range(units):
                    for h, into in enumerate(tiles_of(b.s_s, i, halves)):
                        copy_in(states.at[columns_of(i), keys_of(h)], into, b.s_full)

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

        @when(wg == owner)
        def _own():
            role_registers("owner", units, full_pass)
            ends_t = [tiles_of(ends_s, i, halves) for i in range(units)]
            if full_pass:
                for (i, h), into in each(ends_t):
                    source = leaving_ref.at[row, here.out, columns_of(i), keys_of(h)]
                    copy_in(source, into, b.begun)
                barrier_wait(b.begun)
                first = [load(x, layout=WGMMA) for _, x in each(ends_t)]
                commit_smem()  # read before TMA writes there
                join(b.joined)
            else:
                first = [zeros(SQUARE)] * (units * halves)

            def step(n, d_state):
                slot = lax.rem(n, 2)
                g = b.g_s.at[slot]
                barrier_wait(b.full.at[slot])

                def publish(x, into):
                    for x_i, into_i in zip(x, into, strict=True):
                        into_i[...] = x_i.astype(dtype)
                    commit_smem()

                if full_pass:

                    @when(n > 0)
                    def _():
                        barrier_wait(b.ds_free)

                t = tiles_at(slot)
                publish(d_state, [x for _, x in each(t.d_states)])
                if full_pass:
                    barrier_arrive(b.ds_full)
                kept = accumulated(
                    *(
                        (SQUARE, [(x, k.T) for x, k in zip(xs, t.k, strict=True)])
                        for xs in t.d_states
                    )
                )
                kept = [x * per_column(leave(g, COLS), SQUARE) for x in kept]
                barrier_wait(b.a_ready)
                t = tiles_at(slot)
                d_new = accumulated(
                    *((x, [(y.T, t.by_reads)]) for x, y in zip(kept, t.out, strict=True))
                )
                barrier_arrive(b.a_free)
                if full_pass:

                    @when(n > 0)
                    def _():
                        barrier_wait(b.dv_free)
                        wait_copies_out(0, wait_read_only=True)

                d_new = [x * per_column(strength(g, COLS), SQUARE) for x in d_new]
                t = tiles_at(slot)
                publish(d_new, [x.T for x in t.d_values])
                barrier_wait(b.t_full)
                d_value = products(*((x.T, t.inverse.T) for x in t.d_values))
                barrier_arrive(b.t_free)
                publish(d_value, [x.T for x in t.d_values])
                if full_pass:
                    barrier_arrive(b.dv_full)
                    for i, x in enumerate(t.d_values):
                        copy_out(x, dv_ref.at[batch, tokens_of(n), here.out, columns_of(i)])
                entering = []
                for i in range(units):  # one after the other, as registers allow
                    t = tiles_at(slot)
                    erased = load(t.d_values[i].T, layout=WGMMA).astype(jnp.float32)
                    erased = erased * per_column(-entry(g, COLS), SQUARE)
                    read = load(t.out[i].T, layout=WGMMA).astype(jnp.float32)
                    read = read * per_column(entry(g, COLS) * scale, SQUARE)
                    both = read.astype(dtype), erased.astype(dtype)
                    entering += accumulated(
                        *(
                            (x * through(g), list(zip(both, (t.q[h], t.k[h]), strict=True)))
                            for h, x in enumerate(d_state[i * halves : (i + 1) * halves])
                        )
                    )
                commit_smem()  # what was read, before TMA writes there
                barrier_arrive(b.ended if full_pass else b.free.at[slot])
                return entering

            d_state = lax.fori_loop(0, count, step, first)
            if full_pass:  # phases that nothing has waited for
                barrier_wait(b.ds_free)
                barrier_wait(b.dv_free)
            wait_copies_out(0)
            join(b.left)  # the gradient goes where the tiles were
            for x, (_, into) in zip(d_state, each(ends_t), strict=True):
                into[...] = x
            commit_smem()
            for (i, h), x in each(ends_t):
                copy_out(x, ends_ref.at[row, here.out, columns_of(i), keys_of(h)])
            wait_copies_out(0)

        def attend(n, numbers):
            """A of chunk n, for the owners too, and the decays, in bfloat16."""
            slot = lax.rem(n, 2)
            g = b.g_s.at[slot]
            t = tiles_at(slot)
            scores = sum_of_products(t.q, [k.T for k in t.k])
            decay = lower_decay(g, numbers, strict=False)
            scores = scores * (decay * scale)
            t.by_reads[...] = scores.astype(dtype)
            commit_smem()
            barrier_arrive(b.a_ready)
            return held(decay.astype(jnp.float16))  # as exact as what it will be rounded with

        if not full_pass:

            @when(wg == outputs_first)
            def _attend():
                role_registers("queries", units, full_pass)
                numbers = b.numbers_s.at[0]
                number_tokens(numbers)
                commit_smem()

                def step(n, _):
                    barrier_wait(b.full.at[lax.rem(n, 2)])

                    attend(n, numbers)
                    barrier_wait(b.a_free)
                    barrier_arrive(b.free.at[lax.rem(n, 2)])

                lax.fori_loop(0, count, step, None)
                join(b.left)

            return

        def outputs(role):
            """dQ and dK of half the keys, or one of both, and the pairs of one kind.

            Pairs of reads by the queries for role 0, of the rule's own reads for role 1.
            """
            role_registers("keys" if role else "queries", units, full_pass)
            numbers = b.numbers_s.at[role]
            number_tokens(numbers)
            commit_smem()
            for_dq = [role] if halves == 2 else [0] * (role == 0)
            for_dk = [role] if halves == 2 else [0] * (role == 1)

            def step(n, _):
                slot = lax.rem(n, 2)
                g = b.g_s.at[slot]

                def tiles():
                    t = tiles_at(slot)
                    t.pairs, t.sums = (t.by_reads, t.by_rule)[role], t.sums[role]
                    return t

                def straddle(x, weights):
                    """Sums of X; then weights() take its place for the other warpgroup."""
                    t = tiles()
                    high = x.astype(dtype)
                    t.pairs[...] = high
                    low = held((x - high.astype(jnp.float32)).astype(dtype))
                    weights = held(weights().astype(dtype))
                    commit_smem()
                    ones = jnp.where(upper_mask(numbers, strict=False), 1.0, 0.0).astype(dtype)
                    later = matmul(ones, t.pairs)
                    over_later = load(t.pairs.T, layout=WGMMA).astype(jnp.float32).sum(axis=1)
                    if role == 0:  # one part in bfloat16 would be seen in the gradient of decays
                        t.pairs[...] = low
                        commit_smem()
                        (later,) = accumulated((later, [(ones, t.pairs)]))
                    t.sums.at[3][...] = over_later
                    later = later * per_column(strength(g, COLS), SQUARE)
                    later = jnp.where(lower_mask(numbers, strict=True), later, 0.0)
                    t.sums.at[0][...] = later.sum(axis=1)
                    t.pairs[...] = weights
                    commit_smem()
                    barrier_arrive(b.paired)

                def products_of(left, right, of_halves):
                    """Sums over the value columns of ``left @ right``, of some key halves."""
                    return [
                        (SQUARE, [(x, y[h]) for x, y in zip(left, right, strict=True)])
                        for h in of_halves
                    ]

                def writes(written):
                    """What is written gives dK, and beta's gradient."""
                    t, dk, d_beta = tiles(), [], zero_rows()
                    for h, x_h in zip(for_dk, written, strict=True):
                        x_h = x_h * per_row(leave(g, ROWS), SQUARE)
                        d_beta += row_sums(x_h, t.k[h])
                        dk.append(x_h * per_row(strength(g, ROWS), SQUARE))
                    t.sums.at[5][...] = d_beta
                    t.sums.at[2][...] = d_beta * strength(g, ROWS)
                    return dk

                barrier_wait(b.full.at[slot])
                if role == 0:
                    decay = attend(n, numbers)
                else:  # registers are scarce: the decays wait where X and B will lie
                    decay = lower_decay(g, numbers, strict=True).astype(jnp.float16)
                    tiles().pairs[...] = lax.bitcast_convert_type(decay, dtype)

                @when(n > 0)
                def _():  # the last chunk's gradients have left the tiles of its q and k
                    wait_copies_out(0, wait_read_only=True)
                    barrier_arrive(b.free.at[lax.rem(n + 1, 2)])

                barrier_wait(b.new_full)
                t = tiles()
                if role == 0:
                    pairs = sum_of_products(t.out, [y.T for y in t.new])
                    factor = per_column(strength(g, COLS) * scale, SQUARE)
                    weights = held((pairs * decay.astype(jnp.float32) * factor).astype(dtype))
                    x = pairs * load(t.pairs, layout=WGMMA).astype(jnp.float32)
                    barrier_wait(b.a_free)
                    straddle(x, lambda: weights)
                    barrier_wait(b.ds_full)
                    barrier_wait(b.s_full)
                    t = tiles()
                    both = zip(each(t.states), each(t.d_states), strict=True)
                    of_state = [(x, y.T) for (_, x), (_, y) in both]
                    passing, *written = accumulated(
                        (SQUARE, of_state), *products_of(t.new, t.d_states, for_dk)
                    )
                    barrier_arrive(b.ds_free)
                    row, column = rows_and_columns(numbers)
                    passing = jnp.where(row == column, passing, 0.0).sum(axis=1)
                    t.sums.at[4][...] = passing * through(g)
                    dk = writes(written)
                    barrier_wait(b.dv_full)
                    t = tiles()
                    erased = []
                    if for_dk:
                        erased = accumulated(*products_of(t.d_values, t.states, for_dk))
                else:
                    scores = sum_of_products(t.k, [k.T for k in t.k])
                    decay = lax.bitcast_convert_type(load(t.pairs, layout=WGMMA), jnp.float16)
                    scores = held(scores * decay.astype(jnp.float32))
                    barrier_wait(b.dv_full)
                    t = tiles()
                    pairs = sum_of_products(t.d_values, [y.T for y in t.new])
                    decay = lax.bitcast_convert_type(load(t.pairs, layout=WGMMA), jnp.float16)
                    pairs, x = held((pairs, pairs * -scores))
                    straddle(
                        x,
                        lambda: (
                            pairs
                            * decay.astype(jnp.float32)
                            * per_column(-strength(g, COLS), SQUARE)
                        ),
                    )
                    t = tiles()
                    t.sums.at[4][...] = zero_rows()
                    barrier_wait(b.ds_full)
                    barrier_wait(b.s_full)
                    written = accumulated(
                        *products_of(t.new, t.d_states, for_dk),
                        *products_of(t.d_values, t.states, for_dk),
                    )
                    barrier_arrive(b.ds_free)
                    erased = written[len(for_dk) :]
                    dk = writes(written[: len(for_dk)])
                barrier_arrive(b.new_free)
                barrier_arrive(b.dv_free)
                t = tiles()
                reads = zero_rows()
                for i, h in enumerate(for_dk):
                    x_h = erased[i] * per_row(-entry(g, ROWS), SQUARE)
                    reads += row_sums(x_h, t.k[h])
                    dk[i] = held(dk[i] + x_h)
                dq = accumulated(*products_of(t.out, t.states, for_dq)) if for_dq else []
                barrier_arrive(b.s_free)
                for i, h in enumerate(for_dq):
                    dq[i] = dq[i] * per_row(entry(g, ROWS) * scale, SQUARE)
                    reads += row_sums(dq[i], t.q[h])
                t.sums.at[1][...] = reads
                barrier_wait(b.paired)
                t = tiles()
                terms = [(x, [(t.by_reads, t.k[h])]) for h, x in zip(for_dq, dq, strict=True)]
                for h, x in zip(for_dk, dk, strict=True):
                    by_rule = [(t.by_rule, t.k[h]), (t.by_rule.T, t.k[h])]
                    terms.append((x, [*by_rule, (t.by_reads.T, t.q[h])]))
                results = accumulated(*terms)
                commit_smem()
                join(b.ended)
                t = tiles()
                into = [(t.q[h], dq_ref, h) for h in for_dq] + [(t.k[h], dk_ref, h) for h in for_dk]
                for (tile_s, _, _), x in zip(into, results, strict=True):
                    tile_s[...] = x.astype(dtype)
                commit_smem()
                for tile_s, ref, h in into:
                    copy_out(tile_s, ref.at[batch, tokens_of(n), index, keys_of(h)])
                copy_out(t.sums, sums_ref.at[batch, index, chunk_of(n), role])

            lax.fori_loop(0, count, step, None)
            wait_copies_out(0)
            barrier_arrive(b.free.at[lax.rem(count - 1, 2)])
            join(b.left)

        for role in range(2):
            when(wg == outputs_first + role)(lambda role=role: outputs(role))

    arrays = [q, k, d_out, vectors, inverse]
    arrays += [errors, states, leaving] if full_pass else []
    return kernel(
        body,
        name="delta_gradients" if full_pass else "delta_piece_gradients",
        out_type=out_type,
        scratch=scratch(p, dtype, full_pass),
        grid=(q.shape[0] * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=feeder + 1,
    )(*arrays)
