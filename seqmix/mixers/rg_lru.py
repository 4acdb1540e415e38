# SPDX-License-Identifier: Apache-2.0
"""Real-gated linear recurrent unit of Griffin: one real decay per channel and token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import elementwise
from seqmix.mixers._dispatch import choose, kernel_refusal
from seqmix.mixers._numerics import state_dtype
from seqmix.mixers._segments import last_real_index, mask_padding
from seqmix.typing import Channels, SegmentIds

FAMILY = "linear_scan"
_MAX_ROOT_DERIVATIVE = 1000.0


def rg_lru(
    x: Channels,
    log_a: Float[Array, "B T D"],
    *,
    initial_state: Float[Array, "B D"] | None = None,
    continues: Bool[Array, " B"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Channels, Float[Array, "B D"]]:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) x_t, out = h, with a = exp(log_a).

    A document's first token is written whole, as if a were 0 there. The derivative of the root is
    bounded by 1000, as in the reference code: at a = 1 it has none.

    Source: Griffin (De et al. 2024, arXiv 2402.19427), section 2.4; `RGLRU` of recurrentgemma,
    whose gates make `x` (input gate times input) and `log_a` (-8 times recurrence gate times
    softplus(Lambda)).

    Args:
      x: [B, T, D] float, gated inputs.
      log_a: [B, T, D] float32, natural-log decays <= 0.
      initial_state: [B, D], state of each row's first document; None for zeros.
      continues: [B] bool, whether the row's first token goes on with a document that began before.
        None: where the row's initial state is not all zero, which is what a document leaves behind
        unless every input was 0.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64 on a CPU and 16 elsewhere; a kernel has its own.
        Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'pallas' or 'auto'.

    Returns:
      out: [B, T, D] in the dtype of x; 0 at padding.
      state: [B, D] float32, of each row's last document.

    Raises:
      ValueError: for shapes or dtypes off the above, or an impl that cannot run.
    """
    name = "rg_lru"
    check.rank(name, "x", x, "B T D")
    batch, time, width = x.shape
    if time == 0:
        raise ValueError(f"{name}: x must have T >= 1 tokens, got shape {list(x.shape)}")
    check.shape(name, "log_a", log_a, x.shape, "B T D")
    check.float32(name, "log_a", log_a)
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, width), "B D")
    if continues is not None and (continues.shape != (batch,) or continues.dtype != jnp.bool):
        raise ValueError(
            f"{name}: continues must be bool [B] = [{batch}], got {continues.dtype} "
            f"{list(continues.shape)}"
        )
    impl = choose(
        name,
        impl,
        elementwise.IMPLEMENTATIONS,
        time=time,
        refusal=lambda: kernel_refusal(FAMILY, impl, batch, None, (x, log_a)),
    )

    dtype = state_dtype(x, log_a)
    if initial_state is None:
        state, continues = jnp.zeros((batch, width), dtype), jnp.zeros((batch,), jnp.bool)
    else:
        state = initial_state.astype(dtype)
        if continues is None:
            continues = jnp.any(state != 0, axis=1)
    x, log_a = mask_padding(segment_ids, x, log_a)
    marks = _marks(segment_ids, continues, time)
    if impl == "pallas":
        # A reset is a decay of 0, which also writes the input whole.
        log_a = elementwise.with_resets(log_a, marks)
        out, state = elementwise.run_kernel(FAMILY, (x, log_a), state)
    else:
        out, state = elementwise.scan(
            _MAPS,
            (x, log_a),
            (),
            initial_state=state,
            marks=marks,
            chunk_size=chunk_size,
            impl=impl,
            out_dtype=x.dtype,
        )
    return mask_padding(segment_ids, out)[0], state


def _marks(segment_ids, continues, time):
    """Document marks, with the row's first real token marked unless its document began before."""
    first = jnp.arange(time) == 0
    if segment_ids is None:
        return jnp.where(first & ~continues[:, None], elementwise.START, 0).astype(jnp.int8)
    last = last_real_index(segment_ids)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    first = (segment_ids != 0) & (before < 0)
    marks = elementwise.document_marks(segment_ids)
    return jnp.where(first & ~continues[:, None], elementwise.START, marks).astype(jnp.int8)


@jax.custom_jvp
def _bounded_root(x):
    return jnp.sqrt(x)


@_bounded_root.defjvp
def _bounded_root_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    bound = jnp.asarray(_MAX_ROOT_DERIVATIVE**-2, x.dtype)
    return jnp.sqrt(x), t * jax.lax.rsqrt(jnp.maximum(4 * x, bound))


def _write(tokens, parameters, marks):
    x, log_a = tokens
    gain = _bounded_root(-jnp.expm1(2 * log_a))
    if marks is not None:
        gain = jnp.where(marks[..., None] == elementwise.START, 1, gain)
    return log_a, gain * x.astype(log_a.dtype)


def _read(state, tokens, parameters):
    return state


_MAPS = elementwise.Family(_write, _read)
