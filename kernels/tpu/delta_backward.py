# SPDX-License-Identifier: Apache-2.0
"""Backward kernel of the delta rule with scalar decay; see `delta`."""

import jax.numpy as jnp

from seqmix_kernels.tpu import _common as tpu
from seqmix_kernels.tpu.delta_chunk import (
    CHUNK,
    Decays,
    KeyHead,
    Plan,
    inverses,
    lanes,
    strictly_lower,
    valid_rows,
)


def body(plan: Plan, *references):
    """One chunk of one block of heads, the last chunk first.

    The references, as in the forward kernel::

        q, k, v, gates, entering, d_out [C, s queries V], d_final [s, K, V];
        dq, dk, dv, d_gates, d_initial [s, K, V]

    `d_initial` holds the gradients of the states from chunk to chunk.
    """
    q, k, v, gates, entering, d_out, d_final, dq, dk, dv, d_gates, d_initial = references
    step = tpu.program_id(2)

    @tpu.when(step == 0)
    def _():
        d_initial[...] = d_final[...]

    valid = valid_rows(plan, tpu.num_programs(2) - 1 - step)
    q, k, v, d_out = (valid(x[...]) for x in (q, k, v, d_out))
    decays = Decays(gates[...])
    heads = [KeyHead(plan, head, q, k) for head in range(plan.block)]
    width = plan.heads.values * plan.value
    for head, keys in enumerate(heads):
        solved = inverses(plan, decays, head, keys.kk)
        before = entering[:, head * width : (head + 1) * width]
        outputs = (d_initial, dq, dk, dv, d_gates)
        _head(plan, head, keys, v, d_out, decays, solved, before, *outputs)


def _head(plan, head, keys, v, d_out, decays, solved, before, d_state, dq, dk, dv, d_gates):
    """Gradients of one key head's inputs, and of the states entering the chunk."""
    values, queries, low = plan.heads.values, plan.heads.queries, plan.low
    places = range(head * values, (head + 1) * values)
    states = before.astype(low)
    d_after = jnp.concatenate([d_state[s] for s in places], axis=1)
    d_after_low = d_after.astype(low)
    # For all states at once: what they give to the errors and reads, and to the writes' gradients.
    read = tpu.dot(keys.kq, states)
    d_write = tpu.dot(keys.k, d_after_low)
    d_pairs = [jnp.zeros((CHUNK, CHUNK), jnp.float32) for _ in range(1 + queries)]
    d_reads, written, through = [], [], []
    for value, s in enumerate(places):
        at = slice(s * queries * plan.value, (s + 1) * queries * plan.value)
        solution = [x[value] for x in solved]
        own = (lanes(v, s, plan.value), lanes(read, value, plan.value))
        state = _State(plan, s, keys, decays, solution, *own)
        state.differentiate(d_out[:, at], lanes(d_write, value, plan.value))
        dv[:, s * plan.value : (s + 1) * plan.value] = state.d_values.astype(dv.dtype)
        d_pairs = [total + part for total, part in zip(d_pairs, state.d_pairs, strict=True)]
        d_reads.append(state.d_read)
        written.append(state.leave * state.new)
        through.append(decays.through(s))
        passing = through[-1] * jnp.sum(
            lanes(before, value, plan.value) * lanes(d_after, value, plan.value)
        )
        d_gates[s : s + 1] = state.d_log_decay() + passing
        d_gates[decays.count + s : decays.count + s + 1] = state.d_beta()

    d_reads = jnp.concatenate(d_reads, axis=1).astype(low)
    written = jnp.concatenate(written, axis=1).astype(low)
    d_pairs = jnp.concatenate(d_pairs, axis=0).astype(low)
    # Rows as those of `kq`.
    grads = tpu.dot(d_reads, states, rhs=1) + tpu.dot(d_pairs, keys.k)
    d_key = grads[:CHUNK] + tpu.dot(d_pairs, keys.kq, lhs=0)
    d_key += tpu.dot(written, d_after_low, rhs=1)
    dk[:, head * plan.key : (head + 1) * plan.key] = d_key.astype(dk.dtype)
    for x in range(queries):
        place = head * queries + x
        grad = grads[(1 + x) * CHUNK : (2 + x) * CHUNK]
        dq[:, place * plan.key : (place + 1) * plan.key] = grad.astype(dq.dtype)
    update = tpu.dot(keys.kq, d_reads, lhs=0)
    for value, s in enumerate(places):
        carried = through[value] * lanes(d_after, value, plan.value)
        d_state[s] = carried + lanes(update, value, plan.value)


class _State:
    """One state's part of a chunk.

    Attributes:
      leave: [C, 1], from `Decays`.
      new: [C, V], what the tokens write, V' of the module's formulas.

    and, after `differentiate`::

      d_values: [C, V].
      d_pairs: [C, C] each, the gradients of K K^T and of each query's Q K^T.
      d_read: [(1 + queries) C, V], the gradient of K S and of each query's Q S.
    """

    def __init__(self, plan, s, keys, decays, solution, v, read):
        self.plan, self.keys = plan, keys
        self.beta, self.entry, self.leave = decays.beta(s), decays.entry(s), decays.leave(s)
        self.intra, inverse = solution
        self.strict, self.inverse = strictly_lower(self.intra), inverse.astype(plan.low)
        self.read = read
        self.error = v.astype(jnp.float32) - self.entry * read[:CHUNK]
        self.new = tpu.dot(self.inverse, (self.beta * self.error).astype(plan.low))

    def differentiate(self, d_out, d_write):
        """From the outputs' gradient [C, queries V] and that of the writes, K dS [C, V]."""
        plan, low = self.plan, self.plan.low
        new = self.new.astype(low)
        d_new = self.leave * d_write
        d_reads, d_pairs, pairs = [], [], 0
        for x, qk in enumerate(self.keys.qk):
            d = plan.scale * lanes(d_out, x, plan.value).astype(jnp.float32)
            d_reads.append(self.entry * d)
            d = d.astype(low)
            d_new += tpu.dot((qk * self.intra).astype(low), d, lhs=0)
            d_pairs.append(tpu.dot(d, new, rhs=1) * self.intra)
            pairs += d_pairs[-1] * qk
        # V' solves (I + L) V' = beta (V - e^G K S); this is the gradient of the right side.
        d_right = tpu.dot(self.inverse, d_new.astype(low), lhs=0)
        self.d_values = self.beta * d_right
        d_lower = -tpu.dot(d_right.astype(low), new, rhs=1) * self.strict
        erased = d_lower * self.keys.kk
        self._pairs = pairs + self.beta * erased
        self._d_beta = jnp.sum(erased, axis=1, keepdims=True) + jnp.sum(
            d_right * self.error, axis=1, keepdims=True
        )
        self.d_pairs = [self.beta * d_lower, *d_pairs]
        self.d_read = jnp.concatenate([-self.entry * self.d_values, *d_reads], axis=0)
        # What each token's reads of the entering state, and each write, add to the differential.
        reads = jnp.sum(self.d_read * self.read, axis=1, keepdims=True)
        self._reads = sum(reads[i : i + CHUNK] for i in range(0, reads.shape[0], CHUNK))
        self._writes = jnp.sum(self.leave * self.new * d_write, axis=1, keepdims=True)

    def d_beta(self):
        """[1, C]."""
        return tpu.as_row(self._d_beta)

    def d_log_decay(self):
        """[1, C], but for what passes through the chunk.

        The decay at t multiplies the pairs (i, j) with i >= t > j, the reads at i >= t and the
        writes at j < t.
        """
        parts = tpu.pieces(strictly_lower(self._pairs), self.plan.digits)
        ones = tpu.later_ones(CHUNK)
        before = sum(tpu.dot(part.astype(jnp.bfloat16), ones, rhs=1) for part in parts)
        terms = jnp.where(tpu.lower_mask(CHUNK), before + self._reads, self._writes)
        return jnp.sum(terms, axis=0, keepdims=True)
