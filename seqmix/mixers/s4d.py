# SPDX-License-Identifier: Apache-2.0
"""Diagonal structured state space (S4D): complex poles in conjugate pairs, held as real pairs."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import elementwise, time_invariant
from seqmix.mixers._numerics import contract, state_dtype
from seqmix.mixers._segments import mask_padding
from seqmix.typing import Channels, SegmentIds

# 2 pi in parts whose products with a count of turns below 2^12 are exact in float32.
_TURN = (6.28125, 0.0019350051879882812, 2 * math.pi - 6.28125 - 0.0019350051879882812)
_IMPLEMENTATIONS = ("associative", *time_invariant.IMPLEMENTATIONS)


def s4d(
    u: Channels,
    dt: Float[Array, " D"],
    A: Float[Array, "D M 2"],
    C: Float[Array, "D M 2"],
    D: Float[Array, " D"] | None = None,
    *,
    form: str = "auto",
    initial_state: Float[Array, "B D M 2"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Channels, Float[Array, "B D M 2"]]:
    """h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A u_t,  y_t = 2 Re(C h_t) + D u_t, per channel.

    One of each conjugate pair is held: M = N/2 poles for a state of N real numbers. The input
    enters every pole with weight 1 and both A and B are discretised by zero-order hold.

    Source: S4D (Gu et al. 2022, arXiv 2206.11893), `S4DKernel` of state-spaces/s4.

    Args:
      u: [B, T, D] float.
      dt: [D] float32, step sizes > 0.
      A: [D, N/2, 2] float32, real (negative) and imaginary parts.
      C: [D, N/2, 2] float32.
      D: [D] float, skip connection; None for none.
      form: 'conv' (whole rows by FFT; packed rows chunk by chunk, because one FFT would mix their
        documents), 'recurrent' (a scan over time), or 'auto' (what `impl` says). The numbers are
        the same.
      initial_state: [B, D, N/2, 2], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 32. Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'fft' (not for packed rows), 'pallas' or 'auto'.
        'associative' holds [B, T, D, N/2] complex numbers in memory.

    Returns:
      y: [B, T, D] in the dtype of u; 0 at padding.
      state: [B, D, N/2, 2] float32, of each row's last document.

    Raises:
      ValueError: for shapes or dtypes off the above, a form and an impl that contradict each other,
        or an impl that cannot run.
    """
    name = "s4d"
    check.rank(name, "u", u, "B T D")
    check.rank(name, "A", A, "D N/2 2")
    batch, time, width = u.shape
    poles = A.shape[1]
    if time == 0:
        raise ValueError(f"{name}: u must have T >= 1 tokens, got shape {list(u.shape)}")
    check.shape(name, "dt", dt, (width,), "D")
    for label, x in (("A", A), ("C", C)):
        check.shape(name, label, x, (width, poles, 2), "D N/2 2")
    for label, x in (("dt", dt), ("A", A), ("C", C)):
        check.float32(name, label, x)
    if D is not None:
        check.shape(name, "D", D, (width,), "D")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, width, poles, 2), "B D N/2 2")
    impl = time_invariant.choose_impl(name, form, impl, _IMPLEMENTATIONS, time, segment_ids)

    (u,) = mask_padding(segment_ids, u)
    dtype = state_dtype(u, dt, A)
    wide = u.astype(dtype)
    parameters = _discrete(*(p.astype(dtype) for p in (dt, A, C)))
    flat = None if initial_state is None else initial_state.reshape(batch, width, 2 * poles)
    if impl == "associative":
        out, state = _associative(wide, parameters, flat, segment_ids)
    else:
        out, state = time_invariant.scan(
            _SYSTEM,
            parameters,
            wide,
            initial_state=flat,
            size=2 * poles,
            segment_ids=segment_ids,
            chunk_size=chunk_size,
            impl=impl,
        )
    if D is not None:
        out = out + D.astype(dtype) * wide
    out = mask_padding(segment_ids, out.astype(u.dtype))[0]
    return out, state.reshape(batch, width, poles, 2)


def as_complex(pairs: jax.Array) -> jax.Array:
    """[..., M, 2] real pairs -> [..., M] complex."""
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])


def as_pairs(z: jax.Array) -> jax.Array:
    """[..., M] complex -> [..., 2 M] real pairs, the layout of states inside `time_invariant`."""
    return jnp.stack([z.real, z.imag], axis=-1).reshape(*z.shape[:-1], -1)


def flat_complex(x: jax.Array) -> jax.Array:
    """[..., 2 M] real pairs -> [..., M] complex."""
    return as_complex(x.reshape(*x.shape[:-1], -1, 2))


def twice_real(z: jax.Array) -> jax.Array:
    """What reads 2 Re(z h) from the real pairs of h: [..., M] complex -> [..., 2 M]."""
    return as_pairs(2 * jnp.conj(z))


@jax.custom_jvp
def _phase(dt, frequency):
    """Product dt * frequency less whole turns: the nearest float, and what it lacks.

    Fast poles turn by hundreds of radians a step, and what the powers of a pole multiply is the
    error of the product and of the reduced angle. The product is split into a sum of two floats.
    """
    product = dt * frequency
    (a, b), (c, d) = _split(dt), _split(frequency)
    error = ((a * c - product) + a * d + b * c) + b * d
    turns = jnp.round(product / (2 * math.pi))
    angle = product
    for part in _TURN[:2]:
        angle = angle - turns * jnp.asarray(part, product.dtype)
    error = error - turns * jnp.asarray(_TURN[2], product.dtype)
    near = angle + error
    return near, error - (near - angle)


@_phase.defjvp
def _phase_jvp(primals, tangents):
    (dt, frequency), (d_dt, d_frequency) = primals, tangents
    near, rest = _phase(dt, frequency)
    return (near, rest), (dt * d_frequency + frequency * d_dt, jnp.zeros_like(rest))


def _split(x):
    """x as a sum of two floats of half its digits, whose products are exact."""
    half = 25 if x.dtype == jnp.float64 else 11
    high = jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, half)
    return high, x - high


def _powers(parameters, exponents):
    """[D, L, M] powers of the poles."""
    log_pole, rest = parameters.log_pole, parameters.rest
    exponents = exponents.astype(rest.dtype)[:, None]
    x, (y, lack) = log_pole.real[:, None], _phase(exponents, log_pole.imag[:, None])
    return jnp.exp(jax.lax.complex(exponents * x, y + (lack + exponents * rest[:, None])))


class _Parameters(NamedTuple):
    """A discrete system, [D, M].

    Attributes:
      pole: complex.
      log_pole: its logarithm, complex.
      rest: what the imaginary part of `log_pole` lacks, real.
      weight: of the input, complex.
      C: complex.
    """

    pole: jax.Array
    log_pole: jax.Array
    rest: jax.Array
    weight: jax.Array
    C: jax.Array


def _discrete(dt, A, C):
    x, (y, rest) = dt[:, None] * A[..., 0], _phase(dt[:, None], A[..., 1])
    # exp(x + iy) - 1 without the cancellation of small steps.
    gained = jax.lax.complex(
        jnp.expm1(x) * jnp.cos(y) - 2 * jnp.sin(y / 2) ** 2, jnp.exp(x) * jnp.sin(y)
    )
    log_pole = jax.lax.complex(x, y)
    weight = gained / as_complex(A)
    return _Parameters(jnp.exp(log_pole), log_pole, rest, weight, as_complex(C))


def _advance(parameters, x, u):
    return as_pairs(parameters.pole * flat_complex(x) + parameters.weight * u[..., None])


def _output(parameters, x):
    return jnp.sum(twice_real(parameters.C) * x, axis=-1)


def _tables(parameters, chunk):
    powers = _powers(parameters, jnp.arange(chunk + 1))
    read = twice_real(parameters.C[:, None] * powers)
    write = as_pairs(parameters.weight[:, None] * powers[:, :-1])
    kernel = jnp.sum(read[:, :-1] * as_pairs(parameters.weight)[:, None], axis=-1)
    return time_invariant.Tables(kernel, read[:, 1:], write, powers[:, -1])


def _across(through, x):
    return as_pairs(through * flat_complex(x))


def _kernel(parameters, length):
    """Powers 0 .. length-1 as products of two short tables: nothing of size length x N is held."""
    short = 1 << ((length - 1).bit_length() + 1) // 2
    steps = short * jnp.arange(-(-length // short))
    within, across = _powers(parameters, jnp.arange(short)), _powers(parameters, steps)
    read = twice_real((parameters.C * parameters.weight)[:, None] * across)
    kernel = contract("dln,din->dli", read, as_pairs(within))
    return kernel.reshape(kernel.shape[0], -1)[:, :length]


_SYSTEM = time_invariant.System(_advance, _output, _tables, _across, _kernel)


def _associative(u, parameters, state, segment_ids):
    """As a member of the elementwise family, with complex states."""
    zeros = jnp.zeros((u.shape[0], u.shape[2], 2 * parameters.pole.shape[1]), u.dtype)
    out, state = elementwise.scan(
        elementwise.Family(_write, _read),
        u,
        parameters,
        initial_state=flat_complex(zeros if state is None else state.astype(u.dtype)),
        marks=elementwise.document_marks(segment_ids),
        chunk_size=None,
        impl="associative",
        out_dtype=u.dtype,
    )
    return out, as_pairs(state)


def _write(u, parameters, marks):
    write = u[..., None] * parameters.weight
    return jnp.broadcast_to(parameters.log_pole, write.shape), write


def _read(state, u, parameters):
    return 2 * jnp.sum((state * parameters.C).real, axis=-1)
