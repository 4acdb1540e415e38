# SPDX-License-Identifier: Apache-2.0
"""State-space duality: the selective state space of Mamba-2."""

import jax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import scalar_decay
from seqmix.mixers._numerics import state_dtype
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import SegmentIds


def ssd(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"] | None = None,
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "B H N P"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, Float[Array, "B H N P"]]:
    """h_t = exp(dt_t A) h_{t-1} + B_t (dt_t x_t)^T;  y_t = scale C_t h_t + D x_t.

    Source: Mamba-2 (Dao & Gu 2024, arXiv 2405.21060); `mamba_chunk_scan_combined` of mamba_ssm
    (its state is [B, H, P, N]).

    Args:
      x: [B, T, H, P] float.
      dt: [B, T, H] float32, step sizes after softplus, >= 0.
      A: [H] float32, negative.
      B: [B, T, G, N] float; each of the G groups serves H / G consecutive heads.
      C: [B, T, G, N] float.
      D: [H] float, skip connection; None for none.
      scale: static factor on the state's output.
      initial_state: [B, H, N, P], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64. Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'quadratic', 'pallas' or 'auto'.

    Returns:
      y: [B, T, H, P] in the dtype of x; 0 at padding.
      state: [B, H, N, P] float32, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or group counts off the above, or an impl that cannot run.
    """
    name = "ssd"
    check.rank(name, "x", x, "B T H P")
    check.rank(name, "B", B, "B T G N")
    batch, time, heads, width = x.shape
    if time == 0:
        raise ValueError(f"{name}: x must have T >= 1 tokens, got shape {list(x.shape)}")
    groups, size = B.shape[2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"{name}: H = {heads} heads must be a multiple of B's G = {groups} groups")
    check.shape(name, "B", B, (batch, time, groups, size), "B T G N")
    check.shape(name, "C", C, (batch, time, groups, size), "B T G N")
    check.shape(name, "dt", dt, (batch, time, heads), "B T H")
    check.shape(name, "A", A, (heads,), "H")
    for label, gate in (("dt", dt), ("A", A)):
        check.float32(name, label, gate)
    if D is not None:
        check.shape(name, "D", D, (heads,), "H")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, heads, size, width), "B H N P")

    x, dt, B, C = mask_padding(segment_ids, x, dt, B, C)
    dtype = state_dtype(x, dt)
    out, state = scalar_decay.scan(
        C,
        B,
        x,
        dt * A,
        heads=check.Heads(groups, heads // groups, 1),
        scale=scale,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        strength=dt,
        mixer=name,
        impl=impl,
    )
    if D is not None:
        out = (out.astype(dtype) + D.astype(dtype)[:, None] * x).astype(x.dtype)
    return mask_padding(segment_ids, out)[0], state
