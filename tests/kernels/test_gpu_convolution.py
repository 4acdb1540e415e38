# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of convolution, SiLU and L2 norm: interpreted, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seqmix_kernels
from seqmix.mixers.short_convolution import fused_short_convolution, short_convolution
from tests.mixers.parity import BFLOAT16_BAR, FLOAT32_BAR, assert_within


def composed(x, weight, bias, state, segments, *, activation, head_width):
    """The same in float32, as the layers compose it."""
    y, final = short_convolution(x, weight, bias, initial_state=state, segment_ids=segments)
    y = jax.nn.silu(y) if activation else y
    if head_width:
        heads = y.reshape(*y.shape[:2], -1, head_width)
        y = heads / jnp.sqrt(jnp.sum(heads**2, axis=-1, keepdims=True) + 1e-6)
        y = y.reshape(x.shape)
    if segments is not None:
        y = jnp.where((segments != 0)[..., None], y, 0)
    return y, final


def draw_documents(rng, batch, time, padding):
    """Documents of a few tokens; padding at the end, or (True) at any place."""
    ids = 1 + np.cumsum(rng.random((batch, time)) < 0.2, axis=1)
    if padding:
        ids[rng.random((batch, time)) < 0.2] = 0
    else:
        ids[:, time - 2 :] = 0
    return ids.astype(np.int32)


def check(
    batch, time, width, taps, *, head_width=None, activation=True, documents=None, state=True,
    bias=True, dtype="float32", interpret="races",
):  # fmt: skip
    """Output, final state and every gradient against the composed functions in float32."""
    rng = np.random.default_rng(0)
    shapes = ((batch, time, width), (taps, width), (width,), (batch, taps - 1, width))
    taken = [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]
    segments = None if documents is None else draw_documents(rng, batch, time, documents)
    if not state:
        taken[3] = jnp.zeros_like(taken[3])
    weights = [jnp.asarray(rng.normal(size=s), dtype) for s in (shapes[0], shapes[3])]
    options = {"activation": activation, "head_width": head_width}

    def results(function, taken, weights):
        out, pull = jax.vjp(function, *taken)
        return [*out, *pull(tuple(w.astype(o.dtype) for w, o in zip(weights, out, strict=True)))]

    def fused(x, weight, b, s):
        return fused_short_convolution(
            x, weight, b if bias else None, initial_state=s if state else None,
            segment_ids=segments, **options,
        )  # fmt: skip

    def plain(x, weight, b, s):
        return composed(x, weight, b if bias else None, s, segments, **options)

    wide = [a.astype(jnp.float32) for a in taken]
    want = results(plain, wide, [w.astype(jnp.float32) for w in weights])
    with seqmix_kernels.compile_for("gpu", interpret=interpret):
        got = jax.jit(functools.partial(results, fused))(taken, weights)
    names = ("out", "final", "d_x", "d_weight", "d_bias", "d_state")
    if not state:
        names, got, want = names[:-1], got[:-1], want[:-1]
    for a in (*got[:2], got[2]):
        assert a.dtype == jnp.dtype(dtype)
    bar = FLOAT32_BAR if dtype == "float32" else BFLOAT16_BAR
    got, want = (dict(zip(names, x, strict=True)) for x in (got, want))
    assert_within(got, want, bar)


def test_packed_heads_in_pieces():
    """T off the stage, three pieces of a row, documents that end at pieces' edges and inside."""
    check(1, 100, 512, 4, head_width=128, documents=False)


def test_one_document_with_a_state():
    check(2, 37, 512, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"head_width": 64, "width": 256, "documents": False, "taps": 3},
        {"activation": False, "taps": 2, "bias": False},
        {"taps": 5, "time": 3},
        {"width": 1024, "documents": False, "dtype": "bfloat16", "head_width": 128},
        {"dtype": "bfloat16", "time": 70, "state": False},
        {"documents": False, "state": False},
        # Padding between a document's tokens: the composed functions take over.
        {"documents": True, "head_width": 128},
    ],
    ids=str,
)
def test_against_the_composed_functions(options):
    check(**({"batch": 1, "time": 29, "width": 512, "taps": 4} | options))


def test_what_the_kernel_refuses():
    x, weight = jnp.zeros((1, 8, 96)), jnp.zeros((4, 96))
    with pytest.raises(ValueError, match="no kernel for backend 'cpu'"):
        fused_short_convolution(x, weight)
    with seqmix_kernels.compile_for("gpu", interpret="chip"):
        with pytest.raises(ValueError, match="512 channels, which do not divide 96"):
            fused_short_convolution(x, weight)
        with pytest.raises(ValueError, match="two to 5 taps, not 6"):
            fused_short_convolution(x, jnp.zeros((6, 96)))
        with pytest.raises(ValueError, match="channels, not 256"):
            fused_short_convolution(x, weight, head_width=256)


@pytest.mark.parametrize("head_width", [None, 64, 128])
def test_lowers_for_cuda(head_width):
    x = jax.ShapeDtypeStruct((2, 4096, 2048), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((4, 2048), jnp.float32)
    segments = jax.ShapeDtypeStruct((2, 4096), jnp.int32)

    def loss(x, weight, segments):
        y, _ = fused_short_convolution(x, weight, head_width=head_width, segment_ids=segments)
        return jnp.sum(y.astype(jnp.float32))

    with seqmix_kernels.compile_for("gpu"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(x, weight, segments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 1
