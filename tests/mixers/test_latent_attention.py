# SPDX-License-Identifier: Apache-2.0
"""Latent attention: both forms, their gradients and the cache against float64 rows."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from seqmix import mixers
from tests.mixers import dense
from tests.mixers.cases import Shape, draw_segments, slow
from tests.mixers.parity import BFLOAT16_BAR, FLOAT32_BAR, quick_jit, relative_error

# Heads H, content N, shared P, rank R, values V.
H, N, P, R, V = 3, 5, 4, 6, 7
SHAPE = Shape(time=29, key=N + P, value=V)
NAMES = ("q", "latent", "key_up", "value_up")


def draw(shared=P, time=SHAPE.time, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (
        (SHAPE.batch, time, H, N + shared),
        (SHAPE.batch, time, R + shared),
        (R, H, N),
        (R, H, V),
    )
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def rows(q, latent, key_up, value_up, segment_ids):
    """Every head's keys and values written out, in float64."""
    q, latent, key_up, value_up = (np.asarray(x, np.float64) for x in (q, latent, key_up, value_up))
    shared = latent[..., None, R:].repeat(H, axis=2)
    keys = np.stack([latent[..., :R] @ key_up[:, h] for h in range(H)], axis=2)
    values = np.stack([latent[..., :R] @ value_up[:, h] for h in range(H)], axis=2)
    return dense.attention(q, np.concatenate([keys, shared], -1), values, segment_ids)


@functools.partial(quick_jit, static_argnames=("impl", "capacity", "chunk_size"))
def run(arrays, segment_ids=None, state=None, **options):
    return mixers.latent_attention(*arrays, segment_ids=segment_ids, initial_state=state, **options)


@pytest.mark.parametrize("impl", ["expanded", "absorbed"])
@pytest.mark.parametrize(("packed", "shared"), [(True, P), (False, 0)])
def test_against_rows(impl, packed, shared):
    arrays = draw(shared)
    segments = draw_segments(SHAPE) if packed else None
    out, cache = run(arrays, segments, impl=impl, chunk_size=16)
    assert relative_error(out, rows(*arrays, segments)) < FLOAT32_BAR
    assert cache.latent.shape == (SHAPE.batch, SHAPE.time, R + shared)


@pytest.mark.parametrize("impl", ["absorbed", *slow("expanded")])
def test_gradients(impl):
    """Of every argument, with a cache that was filled before."""
    arrays, segments = draw(), draw_segments(SHAPE)

    def loss(inputs, impl):
        arrays, latent = inputs
        state = mixers.LatentCache(latent, jnp.asarray([5, 3]))
        out, cache = mixers.latent_attention(
            *arrays, initial_state=state, segment_ids=segments, impl=impl
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(cache.latent))

    inputs = arrays, draw(time=6, seed=1)[1]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), inputs)
        want = quick_jit(jax.grad(loss), static_argnums=1)(wide, "dense")
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(want))
    got = quick_jit(jax.grad(loss), static_argnums=1)(inputs, impl)
    errors = jax.tree.leaves(jax.tree.map(relative_error, got, want))
    assert max(errors) < FLOAT32_BAR, errors


@pytest.mark.parametrize("cuts", [(0, 9, 10, 29), (0, 1, 2, 3, 29)])
def test_pieces_through_the_cache_equal_one_pass(cuts):
    """A document ends in one piece; padding in some."""
    arrays = draw()
    segments = np.where(np.arange(29) < 17, 1, 2) * np.ones((2, 1), np.int32)
    segments[0, [4, 12, 13, 20]] = 0
    whole, final = run(arrays, segments)
    state, outs = mixers.init_latent_cache(2, 29, R + P, jnp.float32), []
    for start, stop in itertools.pairwise(cuts):
        piece = [np.zeros_like(x) for x in arrays[:2]]
        ids = np.zeros_like(segments)
        for x, new in zip((*piece, ids), (*arrays[:2], segments), strict=True):
            x[:, : stop - start] = new[:, start:stop]
        out, state = run((*piece, *arrays[2:]), ids, state, capacity=29)
        outs.append(out[:, : stop - start])
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    np.testing.assert_array_equal(state.length, final.length)
    held = np.arange(29)[None] < np.asarray(state.length)[:, None]
    np.testing.assert_array_equal(
        np.where(held[..., None], state.latent, 0), np.where(held[..., None], final.latent, 0)
    )


def test_decoding_never_expands_the_cache():
    """Step by step it is the full pass, and no array has a key or value for each slot and head."""
    arrays, slots = draw(), 64
    whole, _ = run(arrays)
    state, outs = mixers.init_latent_cache(2, slots, R + P, jnp.float32), []
    for t in range(SHAPE.time):
        token = [x[:, t : t + 1] for x in arrays[:2]]
        out, state = run((*token, *arrays[2:]), None, state, capacity=slots)
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    np.testing.assert_array_equal(state.length, [SHAPE.time] * 2)

    def largest(impl):
        program = jax.make_jaxpr(functools.partial(run.__wrapped__, impl=impl))
        shapes = re.findall(r"f32\[([\d,]+)\]", str(program((*token, *arrays[2:]), None, state)))
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest("auto") == 2 * (slots + 1) * (R + P)
    assert largest("expanded") >= 2 * (slots + 1) * H * (N + P)


def test_nan_in_padding_is_inert():
    arrays, segments = draw(), draw_segments(SHAPE)
    padding = segments == 0
    poisoned = [
        np.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), np.nan, x)
        for x in arrays[:2]
    ]
    out, cache = run(arrays, segments)
    out2, cache2 = run((*poisoned, *arrays[2:]), segments)
    np.testing.assert_array_equal(out, out2)
    np.testing.assert_array_equal(cache.latent, cache2.latent)
    assert not np.any(np.asarray(out)[padding])


def test_a_document_that_outgrows_its_cache_is_never_silently_wrong():
    arrays = draw()
    for impl in ("expanded", "absorbed"):
        out, _ = run(arrays, capacity=28, impl=impl)
        assert bool(jnp.all(jnp.isnan(out)))


@pytest.mark.parametrize("impl", ["expanded", "absorbed"])
def test_bfloat16_and_annotations(impl):
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in draw())
    typed = jaxtyped(mixers.latent_attention, typechecker=beartype)
    jax.eval_shape(functools.partial(typed, impl=impl), *arrays)
    out, cache = run(arrays, impl=impl)
    assert out.dtype == cache.latent.dtype == jnp.bfloat16
    assert relative_error(out, rows(*arrays, None)) < BFLOAT16_BAR


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": np.ones((2, 29, H, N - 1), np.float32)}, r"at least the N = 5 channels .* got 4"),
        ({"latent": np.ones((2, 29, R), np.float32)}, r"latent must have shape .*\[2, 29, 10\]"),
        ({"key_up": np.ones((R, H + 1, N), np.float32)}, r"key_up must have shape \[R, H, N\]"),
        ({"value_up": np.ones((R + 1, H, V), np.float32)}, r"value_up must have shape"),
        ({"impl": "pallas"}, "impl='pallas' cannot run"),
        ({"capacity": 0}, "capacity must be an integer >= 1"),
        ({"segment_ids": np.ones((2, 3), np.int32)}, "segment_ids must have shape"),
        (
            {"initial_state": mixers.init_latent_cache(2, 8, R, jnp.float32)},
            r"initial_state.latent must have shape \[B, S, R\+P\] = \[2, 8, 10\]",
        ),
    ],
)
def test_bad_arguments(change, match):
    with pytest.raises(ValueError, match=f"latent_attention: .*{match}"):
        mixers.latent_attention(**(dict(zip(NAMES, draw(), strict=True)) | change))


def test_bad_cache_sizes():
    with pytest.raises(ValueError, match="init_latent_cache: capacity must be >= 1, got 0"):
        mixers.init_latent_cache(1, 0, 4, jnp.float32)
