# SPDX-License-Identifier: Apache-2.0
"""Selective state space of Mamba: a diagonal [D, N] state with input-dependent steps (S6)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import elementwise
from seqmix.mixers._dispatch import choose, kernel_refusal
from seqmix.mixers._numerics import state_dtype
from seqmix.mixers._segments import mask_padding
from seqmix.typing import Channels, SegmentIds

FAMILY = "selective_scan"


def selective_scan(
    x: Channels,
    dt: Float[Array, "B T D"],
    A: Float[Array, "D N"],
    B: Float[Array, "B T N"],
    C: Float[Array, "B T N"],
    D: Float[Array, " D"] | None = None,
    *,
    initial_state: Float[Array, "B D N"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Channels, Float[Array, "B D N"]]:
    """h_t = exp(dt_t A) h_{t-1} + (dt_t x_t) B_t;  y_t = h_t C_t + D x_t, for each channel of D.

    Source: Mamba (Gu & Dao 2023, arXiv 2312.00752) as `selective_scan_fn` of mamba_ssm computes it:
    A is discretised by zero-order hold and B by Euler's step, where the paper holds both.

    Args:
      x: [B, T, D] float.
      dt: [B, T, D] float32, step sizes after softplus, >= 0.
      A: [D, N] float32, negative.
      B: [B, T, N] float, shared by the channels.
      C: [B, T, N] float.
      D: [D] float, skip connection; None for none.
      initial_state: [B, D, N], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64 on a CPU and 16 elsewhere; a kernel has its own.
        Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'pallas' or 'auto'. 'associative' holds
        [B, T, D, N] in memory.

    Returns:
      y: [B, T, D] in the dtype of x; 0 at padding.
      state: [B, D, N] float32, of each row's last document.

    Raises:
      ValueError: for shapes or dtypes off the above, or an impl that cannot run.
    """
    name = "selective_scan"
    check.rank(name, "x", x, "B T D")
    check.rank(name, "A", A, "D N")
    batch, time, width = x.shape
    size = A.shape[1]
    if time == 0:
        raise ValueError(f"{name}: x must have T >= 1 tokens, got shape {list(x.shape)}")
    check.shape(name, "A", A, (width, size), "D N")
    check.shape(name, "dt", dt, x.shape, "B T D")
    check.shape(name, "B", B, (batch, time, size), "B T N")
    check.shape(name, "C", C, (batch, time, size), "B T N")
    for label, gate in (("dt", dt), ("A", A)):
        check.float32(name, label, gate)
    if D is not None:
        check.shape(name, "D", D, (width,), "D")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, width, size), "B D N")
    impl = choose(
        name,
        impl,
        elementwise.IMPLEMENTATIONS,
        time=time,
        refusal=lambda: kernel_refusal(FAMILY, impl, batch, None, (x, dt, B, C)),
    )

    dtype = state_dtype(x, dt)
    state = jnp.zeros((batch, width, size), dtype) if initial_state is None else initial_state
    tokens = mask_padding(segment_ids, x, dt, B, C)
    parameters = (A.astype(dtype), None if D is None else D.astype(dtype))
    state, marks = state.astype(dtype), elementwise.document_marks(segment_ids)
    if impl == "pallas":
        out, state = elementwise.run_kernel(FAMILY, tokens, state, marks, parameters)
    else:
        out, state = elementwise.scan(
            _MAPS,
            tokens,
            parameters,
            initial_state=state,
            marks=marks,
            chunk_size=chunk_size,
            impl=impl,
            out_dtype=x.dtype,
        )
    return mask_padding(segment_ids, out)[0], state


def _write(tokens, parameters, marks):
    x, dt, B, _ = tokens
    A, _ = parameters
    dt = dt.astype(A.dtype)
    return dt[..., None] * A, (dt * x.astype(A.dtype))[..., None] * B.astype(A.dtype)[..., None, :]


def _read(state, tokens, parameters):
    x, _, _, C = tokens
    A, D = parameters
    y = jnp.sum(state * C.astype(A.dtype)[..., None, :], axis=-1)
    return y if D is None else y + D * x.astype(A.dtype)


_MAPS = elementwise.Family(_write, _read)
