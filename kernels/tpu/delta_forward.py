# SPDX-License-Identifier: Apache-2.0
"""Forward kernel of the delta rule with scalar decay; see `delta`."""

import jax.numpy as jnp

from seqmix_kernels.tpu import _common as tpu
from seqmix_kernels.tpu.delta_chunk import (
    CHUNK,
    Decays,
    KeyHead,
    Plan,
    inverses,
    lanes,
    valid_rows,
)


def body(plan: Plan, *references):
    """One chunk of one block of heads.

    The references, with C tokens, h key heads, s states::

        q [C, h queries K], k [C, h K], v [C, s V], gates [2 s, C], initial [s, K, V];
        out [C, s queries V], final [s, K, V], and entering [K, s V] where it is kept

    `final` holds the states from chunk to chunk.
    """
    q, k, v, gates, initial, out, final, *entering = references
    chunk = tpu.program_id(2)

    @tpu.when(chunk == 0)
    def _():
        final[...] = initial[...]

    valid = valid_rows(plan, chunk)
    q, k, v = (valid(x[...]) for x in (q, k, v))
    decays = Decays(gates[...])
    heads = [KeyHead(plan, head, q, k) for head in range(plan.block)]
    for head, keys in enumerate(heads):
        solved = inverses(plan, decays, head, keys.kk)
        _head(plan, head, keys, v, decays, solved, out, final, entering)


def _head(plan, head, keys, v, decays, solved, out, state, entering):
    """Outputs and states of one key head."""
    values, queries, low = plan.heads.values, plan.heads.queries, plan.low
    states = range(head * values, (head + 1) * values)
    before = jnp.concatenate([state[s] for s in states], axis=1)
    for kept in entering:
        kept[:, head * values * plan.value : (head + 1) * values * plan.value] = before
    # Errors and outputs from the entering states, of all states at once.
    read = tpu.dot(keys.kq, before.astype(low))
    written = []
    for value, s in enumerate(states):
        beta, entry = decays.beta(s), decays.entry(s)
        intra, inverse = (x[value] for x in solved)
        old = lanes(read, value, plan.value)
        error = beta * (lanes(v, s, plan.value).astype(jnp.float32) - entry * old[:CHUNK])
        new = tpu.dot(inverse.astype(low), error.astype(low))
        written.append(decays.leave(s) * new)
        for x, qk in enumerate(keys.qk):
            inside = tpu.dot((qk * intra).astype(low), new.astype(low))
            whole = plan.scale * (inside + entry * old[(1 + x) * CHUNK : (2 + x) * CHUNK])
            place = s * queries + x
            out[:, place * plan.value : (place + 1) * plan.value] = whole.astype(out.dtype)
    written = jnp.concatenate(written, axis=1).astype(low)
    update = tpu.dot(keys.k, written, lhs=0)
    for value, s in enumerate(states):
        carried = decays.through(s) * lanes(before, value, plan.value)
        state[s] = carried + lanes(update, value, plan.value)
