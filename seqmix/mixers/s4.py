# SPDX-License-Identifier: Apache-2.0
"""Structured state space S4: diagonal plus rank one, its kernel through Cauchy sums.

The continuous matrix of a channel is diag(A) - P P^* on conjugate pairs, of which one of each is
held; a row vector r then reads a state as 2 Re(r h). Bilinear discretisation, c = dt / 2::

    Ad = (I - c A)^{-1} (I + c A),   Bd = (I - c A)^{-1} dt B

and every inverse is a diagonal one with Woodbury's correction for the rank-one part. At the L-th
roots of unity z = exp(-2 i h) the kernel's transform is, with C~ = C (I - Ad^L)::

    K(z) = C~ [(1 - z) I - c (1 + z) (diag(A) - P P^*)]^{-1} dt B
         = e^{ih} C~ [i sin(h) / c I - cos(h) (diag(A) - P P^*)]^{-1} B

which are four Cauchy sums. In the second line z = -1 is no special case and nothing cancels near
it, where the fastest poles are: c A is large there and 1 + z, as a sum, has few digits. The
gradient of c is a single term for the same reason.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import time_invariant
from seqmix.mixers._numerics import contract, state_dtype
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.s4d import as_complex, as_pairs, flat_complex, twice_real
from seqmix.typing import Channels, SegmentIds


def s4(
    u: Channels,
    dt: Float[Array, " D"],
    A: Float[Array, "D M 2"],
    P: Float[Array, "D M 2"],
    B: Float[Array, "D M 2"],
    C: Float[Array, "D M 2"],
    D: Float[Array, " D"] | None = None,
    *,
    form: str = "auto",
    initial_state: Float[Array, "B D M 2"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Channels, Float[Array, "B D M 2"]]:
    """h_t = Ad h_{t-1} + Bd u_t, y_t = 2 Re(C h_t) + D u_t, A - P P^* and B discretised bilinearly.

    Source: S4 (Gu et al. 2021, arXiv 2111.00396), `SSMKernelDPLR` of state-spaces/s4, in its stable
    form -P P^* (arXiv 2202.09729). C is the system's own, not the reference's truncated C~, so that
    any length and the recurrence read the same parameters.

    Args:
      u: [B, T, D] float.
      dt: [D] float32, step sizes > 0.
      A: [D, N/2, 2] float32, diagonal poles, real (negative) and imaginary parts.
      P, B, C: [D, N/2, 2] float32, rank-one part, input and output.
      D: [D] float, skip connection; None for none.
      form, initial_state, segment_ids, chunk_size: as `seqmix.mixers.s4d`.
      impl: 'recurrent', 'chunked', 'fft' (not for packed rows), 'pallas' or 'auto'.

    Returns:
      y: [B, T, D] in the dtype of u; 0 at padding.
      state: [B, D, N/2, 2] float32, of each row's last document.

    Raises:
      ValueError: for shapes or dtypes off the above, a form and an impl that contradict each other,
        or an impl that cannot run.
    """
    name = "s4"
    check.rank(name, "u", u, "B T D")
    check.rank(name, "A", A, "D N/2 2")
    batch, time, width = u.shape
    poles = A.shape[1]
    if time == 0:
        raise ValueError(f"{name}: u must have T >= 1 tokens, got shape {list(u.shape)}")
    check.shape(name, "dt", dt, (width,), "D")
    for label, x in (("A", A), ("P", P), ("B", B), ("C", C)):
        check.shape(name, label, x, (width, poles, 2), "D N/2 2")
    for label, x in (("dt", dt), ("A", A), ("P", P), ("B", B), ("C", C)):
        check.float32(name, label, x)
    if D is not None:
        check.shape(name, "D", D, (width,), "D")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, width, poles, 2), "B D N/2 2")
    impl = time_invariant.choose_impl(
        name, form, impl, time_invariant.IMPLEMENTATIONS, time, segment_ids
    )

    (u,) = mask_padding(segment_ids, u)
    dtype = state_dtype(u, dt, A)
    wide = u.astype(dtype)
    out, state = time_invariant.scan(
        _SYSTEM,
        _factors(dt.astype(dtype), *(as_complex(x.astype(dtype)) for x in (A, P, B, C))),
        wide,
        initial_state=None if initial_state is None else initial_state.reshape(batch, width, -1),
        size=2 * poles,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        impl=impl,
    )
    if D is not None:
        out = out + D.astype(dtype) * wide
    out = mask_padding(segment_ids, out.astype(u.dtype))[0]
    return out, state.reshape(batch, width, poles, 2)


def _dot(x, y):
    """Inner product over conjugate pairs: 2 Re(sum conj(x) y), [..., M] -> [..., 1]."""
    return 2 * jnp.sum((jnp.conj(x) * y).real, axis=-1, keepdims=True)


def _factors(dt, A, P, B, C):
    """The discrete system: c [D, 1], the arguments, 1 / (1 - c A), and what corrects it for P."""
    c = dt[:, None] / 2
    inverse = 1 / (1 - c * A)
    correction = c * inverse * P / (1 + c * _dot(P, inverse * P))
    return c, A, P, B, C, inverse, correction


def _solve(parameters, g):
    """(I - c (A - P P^*))^{-1} g by Woodbury."""
    _, _, P, _, _, inverse, correction = parameters
    g = inverse * g
    return g - correction * _dot(P, g)


def _advance(parameters, x, u):
    c, A, P, B, *_ = parameters
    h = flat_complex(x)
    g = h + c * (A * h - P * _dot(P, h)) + 2 * c * B * u[..., None]
    return as_pairs(_solve(parameters, g))


def _output(parameters, x):
    return jnp.sum(twice_real(parameters[4]) * x, axis=-1)


def _transition(parameters):
    """The discrete matrix [D, N, N] on real pairs: its columns are the images of unit vectors."""
    width, poles = parameters[1].shape
    units = jnp.eye(2 * poles, dtype=parameters[0].dtype)[:, None]
    units = jnp.broadcast_to(units, (2 * poles, width, 2 * poles))
    images = _advance(parameters, units, jnp.zeros(units.shape[:2], units.dtype))
    return jnp.moveaxis(images, 0, 2)


def _power(matrix, exponent):
    """matrix^exponent for [D, N, N] by squaring."""
    result = None
    while exponent:
        if exponent & 1:
            result = matrix if result is None else _product(result, matrix)
        exponent >>= 1
        if exponent:
            matrix = _product(matrix, matrix)
    return result


def _product(a, b):
    return contract("dij,djk->dik", a, b)


def _tables(parameters, chunk):
    transition = _transition(parameters)
    width, _, size = transition.shape
    zero = jnp.zeros((1, width, size), transition.dtype)
    none, one = (jnp.full((1, width), v, transition.dtype) for v in (0, 1))

    def write(x, _):
        return _advance(parameters, x, none), x[0]

    def read(row, _):
        row = contract("dk,dkn->dn", row, transition)
        return row, row

    row = twice_real(parameters[4])
    _, writes = lax.scan(write, _advance(parameters, zero, one), length=chunk)
    _, reads = lax.scan(read, row, length=chunk)
    writes, reads = jnp.moveaxis(writes, 0, 1), jnp.moveaxis(reads, 0, 1)
    kernel = jnp.sum(row[:, None] * writes, axis=-1)
    return time_invariant.Tables(kernel, reads, writes, _power(transition, chunk))


def _across(through, x):
    return contract("dij,bdj->bdi", through, x)


def _kernel(parameters, length):
    """[D, length] by inverse FFT of the kernel's values at the roots of unity."""
    c, A, P, B, C, *_ = parameters
    row = twice_real(C)
    row = row - contract("dk,dkn->dn", row, _power(_transition(parameters), length))
    C = jnp.conj(flat_complex(row)) / 2
    # h = pi k / L from both ends, so that sine and cosine keep their digits where they vanish.
    k = jnp.arange(length // 2 + 1)
    sine = jnp.sin(jnp.pi / length * k.astype(c.dtype))
    cosine = jnp.sin(jnp.pi / (2 * length) * (length - 2 * k).astype(c.dtype))
    height = sine / c

    # One pole (and its conjugate) at a time: no array of roots times poles.
    @jax.checkpoint
    def add(sums, pole):
        numerators = jnp.stack(pole[1:])
        for top, root in ((numerators, pole[0]), (numerators.conj(), pole[0].conj())):
            sums = sums + top[..., None] / (1j * height - root[:, None] * cosine)
        return sums, None

    terms = (A, C * B, C * P, jnp.conj(P) * B, jnp.conj(P) * P)
    sums = jnp.zeros((4, *height.shape), A.dtype)
    (cb, cp, pb, pp), _ = lax.scan(add, sums, jax.tree.map(jnp.transpose, terms))
    transform = lax.complex(cosine, sine) * (cb - cosine * cp * pb / (1 + cosine * pp))
    return jnp.fft.irfft(transform, length, axis=-1).astype(c.dtype)


_SYSTEM = time_invariant.System(_advance, _output, _tables, _across, _kernel)
