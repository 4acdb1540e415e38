# SPDX-License-Identifier: Apache-2.0
"""Longformer's attention against a token-by-token float64 derivation, and its sparsity."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from seqmix import mixers
from tests.mixers import dense_block_sparse as dense
from tests.mixers.cases import slow
from tests.mixers.parity import BFLOAT16_BAR, FLOAT32_BAR, quick_jit, relative_error
from tests.mixers.sparse import PACKINGS, cost, packed_segments, sparing


def draw(heads=4, groups=2, seed=0, time=45):
    """q, k, v and the same for global rows."""
    rng = np.random.default_rng(seed)
    widths = ((heads, 8), (groups, 8), (groups, 6)) * 2
    return tuple(rng.normal(size=(2, time, h, w)).astype(np.float32) for h, w in widths)


STATIC = ("window", "global_tokens", "causal", "capacity", "chunk_size", "impl")


def attend(arrays, segment_ids=None, state=None, mask=None, **options):
    return mixers.longformer_attention(
        *arrays, segment_ids=segment_ids, initial_state=state, global_mask=mask, **options
    )


run = quick_jit(attend, static_argnames=STATIC)

CAUSAL = {"window": 7, "global_tokens": 3}
BOTH = {"window": 6, "global_tokens": 3, "causal": False}


EVERY = [
    *itertools.product(("causal", "both", "mask"), PACKINGS, ("sparse",)),
    *itertools.product(("causal", "both", "mask"), ("packed",), ("dense",)),
]
FAST = [
    ("causal", "packed", "dense"),
    ("causal", "long", "sparse"),
    ("mask", "long", "sparse"),
    ("both", "whole", "sparse"),
]


def draw_mask(segments):
    """At most three tokens of each document, wherever they fall."""
    mask = np.zeros(segments.shape, bool)
    rng = np.random.default_rng(5)
    for b, row in enumerate(segments):
        for places in dense.documents(segments, b, len(row)):
            mask[b, rng.permutation(places)[: rng.integers(0, 4)]] = True
    return mask


@pytest.mark.parametrize(("form", "packing", "impl"), sparing(EVERY, FAST))
def test_against_rows(form, packing, impl):
    arrays = draw()
    segments = packed_segments(packing)
    options = CAUSAL if form == "causal" else BOTH
    mask = None
    if form == "mask":
        mask = draw_mask(np.ones((2, 45), np.int32) if segments is None else segments)
    out, _ = run(arrays, segments, None, mask, impl=impl, chunk_size=8, **options)
    wide = [x.astype(np.float64) for x in arrays]
    want = dense.longformer(
        wide[:3],
        wide[3:],
        segments,
        window=options["window"],
        tokens=3,
        causal=form == "causal",
        mask=mask,
    )
    assert relative_error(out, want) < FLOAT32_BAR


@pytest.mark.parametrize(
    ("form", "packing"),
    sparing(
        itertools.product(("causal", "both"), ("long", "packed")),
        [("causal", "long"), ("both", "packed")],
    ),
)
def test_gradients_equal_the_dense_ones(form, packing):
    arrays = draw()
    segments = packed_segments(packing)
    options = CAUSAL if form == "causal" else BOTH

    def loss(arrays, impl):
        out, _ = attend(arrays, segments, impl=impl, chunk_size=8, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32))))

    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in arrays)
        want = quick_jit(jax.grad(loss), static_argnums=1)(wide, "dense")
    got = quick_jit(jax.grad(loss), static_argnums=1)(arrays, "sparse")
    errors = [relative_error(g, w) for g, w in zip(got, want, strict=True)]
    assert max(errors) < FLOAT32_BAR, errors


def empty(capacity, dtype=jnp.float32, window=7):
    return mixers.init_longformer_cache(2, capacity, 2, 8, 6, dtype, window=window, global_tokens=3)


@pytest.mark.parametrize(
    ("separate", "impl", "size"),
    sparing([(True, "sparse", 5), (True, "dense", 9), (False, "sparse", 9)], [(True, "sparse", 5)]),
)
def test_pieces_through_the_cache_equal_one_pass(separate, impl, size):
    """Cuts among the global tokens and inside the window; documents end inside a piece."""
    arrays = draw() if separate else (*draw()[:3], None, None, None)
    segments = np.repeat([[1, 2, 2], [3, 3, 4]], (17, 9, 19), axis=1).astype(np.int32)
    segments[:, [7, 16, 20, 33]] = 0
    whole, final = run(arrays, segments, chunk_size=8, **CAUSAL)
    state, outs = None, []
    for start in range(0, 45, size):
        piece = [None if x is None else x[:, start : start + size] for x in arrays]
        ids = segments[:, start : start + size]
        if state is None:
            state = mixers.init_longformer_cache(
                2, 45, 2, 8, 6, jnp.float32, window=7, global_tokens=3, separate=separate
            )
        out, state = run(piece, ids, state, impl=impl, capacity=7, **CAUSAL)
        assert state.ring.key.shape[1] == 7
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(final), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_decoding_is_the_full_pass_with_constant_size():
    arrays = draw()
    whole, final = run(arrays, None, empty(45), capacity=45, **CAUSAL)
    state, outs = empty(45), []
    for t in range(45):
        out, state = run([x[:, t : t + 1] for x in arrays], None, state, capacity=7, **CAUSAL)
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(final), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_gradients_through_the_cache():
    arrays = draw()

    def loss(arrays, impl):
        first, state = attend([x[:, :21] for x in arrays], impl=impl, chunk_size=8, **CAUSAL)
        rest, state = attend([x[:, 21:] for x in arrays], None, state, impl=impl, **CAUSAL)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(rest)) + jnp.sum(state.global_value**2)

    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in arrays)
        want = quick_jit(jax.grad(loss), static_argnums=1)(wide, "dense")
    got = quick_jit(jax.grad(loss), static_argnums=1)(arrays, "sparse")
    assert all(relative_error(g, w) < FLOAT32_BAR for g, w in zip(got, want, strict=True))


def test_a_document_that_outgrows_its_ring_is_never_silently_wrong():
    out, _ = run(draw(), capacity=6, **CAUSAL)
    assert bool(jnp.all(jnp.isnan(out)))


def test_more_global_tokens_than_stated_are_never_silently_left_out():
    mask = np.zeros((2, 45), bool)
    mask[0, [4, 9, 30]] = mask[1, [4, 9, 30, 31]] = True
    one, two = np.ones((2, 45), np.int32), np.repeat([[1, 2], [1, 2]], (20, 25), axis=1)
    out, _ = run(draw(), one, None, mask, **BOTH)
    assert bool(jnp.all(jnp.isfinite(out[0]))) and bool(jnp.all(jnp.isnan(out[1])))
    out, _ = run(draw(), two, None, mask, **BOTH)  # the bound is one document's
    assert bool(jnp.all(jnp.isfinite(out)))


@pytest.mark.parametrize("options", [BOTH, *slow(CAUSAL)], ids=["both", "causal"])
def test_other_documents_and_padding_change_nothing_bitwise(options):
    arrays, other = draw(), draw(seed=1)
    segments = np.repeat([[1, 0, 2], [1, 0, 2]], (19, 3, 23), axis=1)
    mixed = [np.concatenate([o[:, :19], a[:, 19:]], 1) for a, o in zip(arrays, other, strict=True)]
    mixed = [np.where((segments == 0)[..., None, None], np.nan, x) for x in mixed]
    out, _ = run(arrays, segments, chunk_size=16, **options)
    out2, _ = run(mixed, segments, chunk_size=16, **options)
    np.testing.assert_array_equal(out[:, 22:], out2[:, 22:])
    assert not np.array_equal(out[:, :19], out2[:, :19])
    assert not np.any(np.asarray(out2)[segments == 0])


def test_a_window_without_global_tokens_has_gradients():
    """A cache of no global tokens is filled with nothing, which JAX does not differentiate."""
    q, k, v = draw(time=5)[:3]

    def loss(function, **options):
        return quick_jit(jax.grad(lambda q: jnp.sum(jnp.sin(function(q, k, v, **options)[0]))))(q)

    got = loss(mixers.longformer_attention, window=3, global_tokens=0)
    want = loss(mixers.attention, window=3, impl="dense")
    assert relative_error(got, want) < FLOAT32_BAR


@pytest.mark.parametrize("time", [1, *slow(3)])
@pytest.mark.parametrize("tokens", [0, 9])
def test_short_rows(time, tokens):
    arrays = draw(time=time)
    wide = [x.astype(np.float64) for x in arrays]
    for causal, window in ((True, 1), (False, 4)):
        options = {"window": window, "global_tokens": tokens, "causal": causal}
        out, _ = run(arrays, **options)
        want = dense.longformer(
            wide[:3], wide[3:], None, window=window, tokens=tokens, causal=causal
        )
        assert relative_error(out, want) < FLOAT32_BAR


def test_bfloat16_and_annotations():
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in draw())
    typed = jaxtyped(mixers.longformer_attention, typechecker=beartype)
    out, cache = quick_jit(lambda a: typed(*a, **CAUSAL))(arrays)
    assert out.dtype == cache.ring.key.dtype == cache.row_value.dtype == jnp.bfloat16
    wide = [np.asarray(x, np.float64) for x in arrays]
    want = dense.longformer(wide[:3], wide[3:], None, window=7, tokens=3)
    assert relative_error(out, want) < BFLOAT16_BAR


@pytest.mark.parametrize("causal", [True, *slow(False)])
def test_cost_follows_the_length(causal):
    """Forward and backward: the products exactly, the bytes but for what does not grow."""

    def gradient(time):
        shapes = [jax.ShapeDtypeStruct((1, time, 1, 16), jnp.float32)] * 6
        ids = jax.ShapeDtypeStruct((1, time), jnp.int32)
        options = {"window": 64, "global_tokens": 4, "causal": causal, "chunk_size": 64}
        return cost(
            jax.grad(lambda a, ids: jnp.sum(jnp.sin(attend(a, ids, **options)[0]))), shapes, ids
        )

    (flops, held), (flops2, held2) = gradient(1024), gradient(2048)
    assert flops2 == 2 * flops
    assert held2 < 2.1 * held
    if causal:
        keys = 63 + 64 + 4, 64 + 4  # of the tokens' rows and of the global tokens'
        assert flops2 / 2048 == 8 * 2 * 16 * sum(keys)


ARRAYS = dict(zip(("q", "k", "v", "q_global", "k_global", "v_global"), draw(), strict=True))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"window": 0}, "window must be an integer >= 1, got 0"),
        ({"window": 5, "causal": False}, "window must be even with causal=False.* got 5"),
        ({"global_tokens": -1}, "global_tokens must be an integer >= 0, got -1"),
        ({"global_mask": np.ones((2, 45), bool)}, "global_mask needs causal=False"),
        (
            {"global_mask": np.ones((2, 9), bool), "causal": False, "window": 4},
            r"global_mask must be bool of shape \[B, T\] = \[2, 45\], got bool \[2, 9\]",
        ),
        (
            {"global_mask": [[True] * 45] * 2, "causal": False, "window": 4},
            r"global_mask must be bool of shape \[B, T\] = \[2, 45\], got list",
        ),
        ({"k_global": None}, "must be given together, .* k_global None"),
        ({"v_global": np.ones((2, 45, 2, 5), np.float32)}, r"v_global must have shape"),
        ({"initial_state": empty(9), "causal": False, "window": 4}, "needs causal=True"),
        ({"initial_state": empty(9), "global_tokens": 2}, "initial_state.global_key must have"),
        (
            {"initial_state": empty(9)._replace(row_key=None, row_value=None)},
            "initial_state.row_key must be an array with k_global",
        ),
        ({"impl": "chunked"}, "impl must be one of"),
        ({"impl": "pallas"}, "impl='pallas' cannot run"),
        ({"chunk_size": 0}, "chunk_size must be an integer >= 1"),
        ({"v": np.ones((2, 45, 4, 6), np.float32)}, "heads"),
    ],
)
def test_bad_arguments(change, match):
    with pytest.raises(ValueError, match=f"longformer_attention: .*{match}"):
        mixers.longformer_attention(**(ARRAYS | CAUSAL | change))
