# SPDX-License-Identifier: Apache-2.0
"""Sweeps over the chunks of the delta rule with scalar decay, on Hopper.

A unit is one output head and 64 columns of its values, done by one warpgroup that keeps its state
S^T [64, K] in float32 registers. A block has one or two units and a warpgroup that feeds them
through TMA and prepares the reads inside the chunk. With T~ from `delta_inverse`, all on transposes
so that each product has its left operand in registers and no intermediate goes through memory::

    W^T  = V^T - e^G S^T K^T;   V~^T = W^T T~^T
    O^T  = s e^G S^T Q^T + V~^T (A beta)^T,   A = s (Q K^T) * D
    S^T  = e^{G_C} S^T + (e^{G_C - G} beta V~^T) K

V~ is what the rule calls the error, v_t - k_t S~_t, so that beta can be zero. `outputs` does all of
it, and stores the states that enter the chunks and V~ where a backward pass will want them;
`entering_states` stores these alone; `piece_ends` finds what a piece of a row does to its entering
state: the end state from zero, and the transition, which is the same recursion on K columns without
values that starts from the identity.

Bytes of `outputs` a token and head: q, k, v, out and 128 of T~, 1.2 KiB at K = V = 128, and 2 V
+ 2 K V / 64 of what it keeps, 0.75 KiB. FLOPs of `outputs` a unit and chunk: 6 64^2 K + 4 64^3, 4.2
MFLOP at K = 128.
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
    accumulated,
    barrier_arrive,
    barrier_wait,
    commit_smem,
    copy_in,
    copy_out,
    depth,
    ds,
    iota,
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
    copy_vectors,
    entry,
    leave,
    matmul,
    products,
    strength,
    through,
    upper_decay,
)

UNIT = (WIDTH, C)


def outputs(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    vectors: jax.Array,
    inverse: jax.Array,
    entering: jax.Array,
    *,
    scale: float,
    out_dtype,
    store: bool,
) -> tuple[jax.Array, ...]:
    """Outputs and end states.

    Args:
      plan: the cut.
      q: [B, T, Hq, K] bfloat16, T whole chunks.
      k: [B, T, Hk, K] bfloat16.
      v: [B, T, Hv, V] bfloat16.
      vectors: [B, Hs, chunks, 4, 64] float32; see `delta_pieces.chunk_vectors`.
      inverse: [B, Hs, chunks, 64, 64] bfloat16, T~^T.
      entering: [B * pieces, Hs, V, K] float32, transposed states entering the pieces.
      scale: factor on the output.
      out_dtype: dtype of the output.
      store: whether to keep what `gradients` reads; each state must have one query head.

    Returns:
      out [B, T, Ho, V]; states after the pieces [B * pieces, Ho, V, K] float32; with `store` also
      what `entering_states` returns.
    """
    batch, time = q.shape[:2]
    p = plan
    out_type = (
        jax.ShapeDtypeStruct((batch, time, p.heads.outputs, p.value), out_dtype),
        jax.ShapeDtypeStruct((batch * p.pieces, p.heads.outputs, p.value, p.key), jnp.float32),
    )
    if store:
        out_type += _kept(plan, k, v)
    return _sweep(plan, "outputs", q, k, v, vectors, inverse, entering, out_type, scale, store)


def _kept(plan, k, v):
    states = (k.shape[0], plan.heads.states, plan.chunks, plan.value, plan.key)
    return (jax.ShapeDtypeStruct(states, k.dtype), jax.ShapeDtypeStruct(v.shape, k.dtype))


def entering_states(plan, k, v, vectors, inverse, entering) -> tuple[jax.Array, jax.Array]:
    """What the backward pass reads; arguments as in `outputs`.

    Returns:
      States that enter the chunks [B, Hs, chunks, V, K], V~ [B, T, Hs, V], both bfloat16.
    """
    plan = plan._replace(heads=plan.heads._replace(queries=1))
    out_type = _kept(plan, k, v)
    return _sweep(plan, "states", None, k, v, vectors, inverse, entering, out_type, 1.0, True)


def piece_ends(plan, k, v, vectors, inverse) -> jax.Array:
    """What each piece does to a transposed state, S^T -> S^T X_V+.. + X_..V; arguments as above.

    Returns:
      [B * pieces, Hs, V + K, K] float32: the end state from zero, then the transposed transition.
    """
    heads = plan.heads._replace(queries=1)
    columns = (plan.value + plan.key) // WIDTH
    units = 2 if columns % 2 == 0 else 1
    plan = plan._replace(heads=heads, value=plan.value + plan.key, units=units)
    shape = (k.shape[0] * plan.pieces, heads.states, plan.value, plan.key)
    out_type = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _sweep(plan, "ends", None, k, v, vectors, inverse, None, out_type, 1.0, False)


def _sweep(plan, mode, q, k, v, vectors, inverse, entering, out_type, scale, store):
    p, dtype, reads = plan, k.dtype, mode == "outputs"
    batch, values = k.shape[0], v.shape[-1]
    out_size = jnp.dtype(out_type[0].dtype).itemsize if reads else 0
    fixed = p.units * C * WIDTH * out_size + (2 * 2 * C * C if reads else 0)
    fixed += p.units * WIDTH * (p.key + C) * 2 if store else 0
    stage = 2 * C * ((2 if reads else 1) * p.key + C + p.units * WIDTH)
    stages = depth(stage + 8 * C * VECTORS, fixed)
    feeder = p.units
    pipeline = {"k_s": tile((stages, C, p.key), dtype)}
    if reads:
        pipeline["q_s"] = tile((stages, C, p.key), dtype)
    else:  # the end state takes as much room as two tiles
        pipeline["v_s"] = tile((stages * p.units, C, WIDTH), dtype)
        pipeline["t_s"] = tile((stages, C, C), dtype)
    scratch = {
        "tiles": union(list(pipeline.values()), [SMEM((p.units, WIDTH, p.key), jnp.float32)]),
        "g_s": SMEM((stages, 2, VECTORS, C), jnp.float32),
        "full": Barrier(num_arrivals=(5 if reads else 4) + p.units, num_barriers=stages),
        "free": Barrier(num_arrivals=p.units, num_barriers=stages),
        "begun": Barrier(num_barriers=p.units),
        "joined": Barrier(num_arrivals=p.units + 1, num_barriers=2),
    }
    if reads:
        scratch["v_s"] = tile((stages * p.units, C, WIDTH), dtype)
        scratch["t_s"] = tile((stages, C, C), dtype)
        scratch["a_s"] = tile((2, C, C), dtype)
        scratch["ready"] = Barrier(num_barriers=2)
        scratch["out_s"] = tile((p.units, C, WIDTH), out_type[0].dtype)
    if store:
        scratch["state_s"] = tile((p.units, WIDTH, p.key), dtype)
        scratch["new_s"] = tile((p.units, C, WIDTH), dtype)

    def body(*refs, tiles, g_s, full, free, begun, joined, **own):
        named = dict(zip(pipeline, tiles[0], strict=True), **own)
        k_s, v_s, t_s = named["k_s"], named["v_s"], named["t_s"]
        (ends_s,) = tiles[1]
        refs = list(refs)
        q_ref = refs.pop(0) if reads else None
        k_ref, v_ref, g_ref, t_ref = (refs.pop(0) for _ in range(4))
        first_ref = refs.pop(0) if entering is not None else None
        states_ref, new_ref = refs[-2:] if store else (None, None)
        row, index, wg = lax.axis_index("row"), lax.axis_index("block"), lax.axis_index("wg")
        b, piece = lax.div(row, p.pieces), lax.rem(row, p.pieces)
        start = piece * p.piece_chunks
        count = jnp.minimum(p.piece_chunks, p.chunks - start)

        def issue(n):
            stage = lax.rem(n, stages)
            bar, chunk = full.at[stage], start + n
            tokens = ds(chunk * C, C)
            here = place(p, index, 0)
            copy_in(k_ref.at[b, tokens, here.key], k_s.at[stage], bar)
            if reads:
                copy_in(q_ref.at[b, tokens, here.query], named["q_s"].at[stage], bar)
            copy_in(t_ref.at[b, here.state, chunk], t_s.at[stage], bar)
            copy_vectors(g_ref.at[b, here.state, chunk], g_s.at[stage], bar)
            for i in range(p.units):
                here = place(p, index, i)
                # Units of a transition have no values, but they wait for as many copies.
                column = lax.rem(here.column, values) if mode == "ends" else here.column
                columns = ds(column, WIDTH)
                copy_in(v_ref.at[b, tokens, here.state, columns], v_s.at[stage * p.units + i], bar)

        def prepare(n):
            """(A beta)^T of chunk n."""
            g = g_s.at[lax.rem(n, stages)]
            scores = matmul(k_s.at[lax.rem(n, stages)], named["q_s"].at[lax.rem(n, stages)].T)
            scores = scores * per_row(strength(g, ROWS) * scale, SQUARE)
            weights = scores * upper_decay(g, strict=False)
            named["a_s"].at[lax.rem(n, 2)][...] = weights.astype(dtype)
            commit_smem()
            barrier_arrive(named["ready"].at[lax.rem(n, 2)])

        @when(wg == feeder)
        def _feed():
            if p.units == 2:
                registers(104 if reads else 40, "decrease")
            if entering is not None:  # the first state lies where the tiles will
                join(joined.at[0])
            for n in range(stages):

                @when(n < count)
                def _(n=n):
                    issue(jnp.int32(n))

            def step(n, _):
                if reads:
                    barrier_wait(full.at[lax.rem(n, stages)])
                    prepare(n)

                @when(n > 0)
                def _():
                    barrier_wait(free.at[lax.rem(n - 1, stages)])

                    @when(n - 1 + stages < count)
                    def _():
                        issue(n - 1 + stages)

            lax.fori_loop(0, count, step, None)
            barrier_wait(free.at[lax.rem(count - 1, stages)])
            join(joined.at[1])

        @when(wg < feeder)
        def _compute():
            if p.units == 2:
                registers(200 if reads else 232, "increase")
            here = place(p, index, wg)
            columns = ds(here.column, WIDTH)
            if entering is not None:
                copy_in(first_ref.at[row, here.state, columns], ends_s.at[wg], begun.at[wg])
                barrier_wait(begun.at[wg])
                first = load(ends_s.at[wg], layout=WGMMA)
                commit_smem()  # read before TMA writes there
                join(joined.at[0])
            else:
                first = zeros((WIDTH, p.key))
                shape = first.shape
                unit = iota(shape, 0) + (here.column - values) == iota(shape, 1)
                first = first + jnp.where(unit, 1.0, 0.0)
            has_values = 1.0
            if mode == "ends":
                has_values = jnp.where(here.column < values, 1.0, 0.0)

            def step(n, s):
                stage = lax.rem(n, stages)
                mine, g = stage * p.units + wg, g_s.at[stage]
                barrier_wait(full.at[stage])
                low = s.astype(dtype)
                if store:  # the last chunk's tiles, its outputs' too, have been sent by now
                    wait_copies_out(0, wait_read_only=True)
                    named["state_s"].at[wg][...] = low
                    commit_smem()
                    copy_out(
                        named["state_s"].at[wg],
                        states_ref.at[b, here.state, start + n, columns],
                    )
                known, *read = products(
                    (low, k_s.at[stage].T),
                    *([(low, named["q_s"].at[stage].T)] if reads else []),
                )
                values_t = load(v_s.at[mine].T, layout=WGMMA).astype(jnp.float32)
                if mode == "ends":
                    values_t = values_t * has_values
                error = values_t - known * per_column(entry(g, COLS), UNIT)
                new = matmul(error.astype(dtype), t_s.at[stage])
                write = leave(g, COLS) * strength(g, COLS)
                written = (new * per_column(write, UNIT)).astype(dtype)
                terms = [(s * through(g), [(written, k_s.at[stage])])]
                if reads:
                    barrier_wait(named["ready"].at[lax.rem(n, 2)])
                    read = read[0] * per_column(entry(g, COLS) * scale, UNIT)
                    terms.append((read, [(new.astype(dtype), named["a_s"].at[lax.rem(n, 2)])]))
                s, *out = accumulated(*terms)
                tokens = ds((start + n) * C, C)
                if store:
                    named["new_s"].at[wg].T[...] = new.astype(dtype)
                if reads:
                    if not store:
                        wait_copies_out(0, wait_read_only=True)
                    out_s = named["out_s"].at[wg]
                    out_s.T[...] = out[0].astype(out_s.dtype)
                commit_smem()  # also what was read of the stage, before TMA writes there
                barrier_arrive(free.at[stage])
                if store:
                    copy_out(named["new_s"].at[wg], new_ref.at[b, tokens, here.state, columns])
                if reads:
                    copy_out(out_s, refs[0].at[b, tokens, here.out, columns])
                return s

            s = lax.fori_loop(0, count, step, first)
            join(joined.at[1])  # the end state goes where the tiles were
            if mode != "states":
                ends_s.at[wg][...] = s
                commit_smem()
                head = here.out if reads else here.state
                copy_out(ends_s.at[wg], refs[1 if reads else 0].at[row, head, columns])
            wait_copies_out(0)

    arrays = [x for x in (q, k, v, vectors, inverse, entering) if x is not None]
    return kernel(
        body,
        name=f"delta_{mode}",
        out_type=out_type,
        scratch=scratch,
        grid=(batch * p.pieces, p.blocks),
        grid_names=("row", "block"),
        warpgroups=p.units + 1,
    )(*arrays)
