# SPDX-License-Identifier: Apache-2.0
"""MoBA against a token-by-token float64 derivation, its masked form and its own decode step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from seqmix import mixers
from tests.mixers import dense_routed
from tests.mixers.parity import (
    BFLOAT16_BAR,
    FLOAT32_BAR,
    assert_within,
    quick_jit,
    relative_error,
)
from tests.mixers.sparse import cost, packed_segments, sparing

TIME, KEY, VALUE = 45, 8, 6
OPTIONS = {"block_size": 4, "top_k": 3}


def draw(heads=4, groups=2, seed=0, time=TIME):
    rng = np.random.default_rng(seed)
    sizes = ((heads, KEY), (groups, KEY), (groups, VALUE))
    return tuple(rng.normal(size=(2, time, *size)).astype(np.float32) for size in sizes)


def attend(q, k, v, segment_ids=None, state=None, **options):
    return mixers.moba_attention(
        q, k, v, segment_ids=segment_ids, initial_state=state, **(OPTIONS | options)
    )


run = quick_jit(attend, static_argnames=("impl", "block_size", "top_k", "capacity"))


@quick_jit
def _sparse(arrays, segments, weights):
    return _evaluate(arrays, segments, weights, "sparse")


@quick_jit
def _dense(arrays, segments, weights):
    return _evaluate(arrays, segments, weights, "dense")


def _evaluate(arrays, segments, weights, impl):
    out, pull = jax.vjp(lambda arrays: attend(*arrays, segments, impl=impl)[0], arrays)
    return {"out": out} | dict(zip(("dq", "dk", "dv"), pull(weights.astype(out.dtype))[0]))  # noqa: B905


CASES = [("long", 4, 2), ("packed", 4, 2), ("whole", 4, 2), ("long", 3, 3), ("long", 4, 1)]


@pytest.mark.parametrize(("packing", "heads", "groups"), sparing(CASES, CASES[:1]))
def test_against_rows_and_the_masked_form(packing, heads, groups):
    arrays, segments = draw(heads, groups), packed_segments(packing)
    weights = np.random.default_rng(9).normal(size=(2, TIME, heads, VALUE))
    got = _sparse(arrays, segments, weights)
    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in arrays)
        want = {n: np.asarray(x) for n, x in _dense(wide, segments, weights).items()}
    rows = dense_routed.moba_attention(*wide, segments, **OPTIONS)
    assert relative_error(want["out"], rows) < 1e-12
    assert_within(got, want, FLOAT32_BAR)


@pytest.mark.parametrize("time", [1, 3, pytest.param(4, marks=pytest.mark.slow), 9])
def test_rows_about_as_long_as_a_block(time):
    arrays = draw(time=time)
    out, _ = run(*arrays)
    rows = dense_routed.moba_attention(*(x.astype(np.float64) for x in arrays), None, **OPTIONS)
    assert relative_error(out, rows) < FLOAT32_BAR


def test_equal_scores_go_to_the_earlier_block():
    q, k, v = draw()
    k = np.broadcast_to(k[:, :1], k.shape)
    rows = dense_routed.moba_attention(*(x.astype(np.float64) for x in (q, k, v)), None, **OPTIONS)
    assert relative_error(run(q, k, v)[0], rows) < FLOAT32_BAR


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 12},
        pytest.param({"block_size": 64}, marks=pytest.mark.slow),
        pytest.param({"block_size": 1, "top_k": 45}, marks=pytest.mark.slow),
    ],
)
def test_all_blocks_are_full_attention(options):
    arrays, segments = draw(), packed_segments("long")
    full, _ = mixers.attention(*arrays, segment_ids=segments)
    assert relative_error(run(*arrays, segments, **options)[0], full) < FLOAT32_BAR


@pytest.mark.parametrize(
    ("cuts", "grows"),
    [pytest.param((0, 9, 10, 30, 45), True, marks=pytest.mark.slow), ((0, 15, 30, 45), False)],
)
def test_pieces_through_the_cache_equal_one_pass(cuts, grows):
    arrays = draw()
    segments = np.array(packed_segments("packed"))
    for cut in cuts[1:-1]:  # the cache belongs to the document that goes on
        segments[:, cut] = np.where(segments[:, cut - 1] > 0, segments[:, cut - 1], 1)
        segments[:, cut - 1] = segments[:, cut]
    whole, final = run(*arrays, segments)
    empty = mixers.init_moba_state(2, TIME, 2, KEY, VALUE, jnp.float32, 4)
    state, outs = None if grows else empty, []
    for start, stop in itertools.pairwise(cuts):
        piece = [x[:, start:stop] for x in arrays]
        options = {} if grows else {"capacity": TIME}
        out, state = run(*piece, segments[:, start:stop], state, **options)
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    np.testing.assert_array_equal(state.cache.length, final.cache.length)


def test_decode_equals_the_full_pass():
    arrays = draw()
    whole, _ = run(*arrays)
    empty = mixers.init_moba_state(2, TIME, 2, KEY, VALUE, jnp.float32, 4)
    sizes = jax.tree.map(jnp.shape, empty)

    @quick_jit
    def decode(arrays, state):
        def step(state, token):
            out, state = attend(*(x[:, None] for x in token), None, state, capacity=TIME)
            return state, out[:, 0]

        tokens = tuple(x.swapaxes(0, 1) for x in arrays)
        state, outs = jax.lax.scan(step, state, tokens)
        return outs.swapaxes(0, 1), state

    outs, state = decode(arrays, empty)
    assert relative_error(outs, whole) < FLOAT32_BAR
    assert jax.tree.map(jnp.shape, state) == sizes
    padding = np.zeros((2, 1), np.int32)
    out, after = run(*(x[:, :1] for x in arrays), padding, state, capacity=TIME)
    assert not np.any(out)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    out, _ = run(*(x[:, :1] for x in arrays), None, state, capacity=TIME)
    assert bool(jnp.all(jnp.isnan(out)))  # the cache is full


def test_nan_in_padding_and_other_documents_are_inert():
    arrays, segments = draw(), np.array(packed_segments("long"))
    out, _ = run(*arrays, segments)
    first = segments == segments.max(axis=1, keepdims=True)
    poison = np.where(segments == 0, np.nan, np.where(first, 0.0, 7.0))[..., None, None]
    changed = tuple(np.where(first[..., None, None], x, poison).astype(np.float32) for x in arrays)
    out2, _ = run(*changed, segments)
    np.testing.assert_array_equal(out[first], out2[first])
    assert not np.any(np.asarray(out2)[segments == 0])


def test_bfloat16_and_annotations():
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in draw())
    typed = jaxtyped(mixers.moba_attention, typechecker=beartype)
    out, state = quick_jit(lambda *arrays: typed(*arrays, **OPTIONS))(*arrays)
    assert out.dtype == state.cache.key.dtype == jnp.bfloat16
    wide = (np.asarray(x, np.float64) for x in arrays)
    assert relative_error(out, dense_routed.moba_attention(*wide, None, **OPTIONS)) < BFLOAT16_BAR


@pytest.mark.slow
def test_cost_grows_with_the_tokens():
    def of(time):
        shapes = [jax.ShapeDtypeStruct((1, time, heads, 16), jnp.float32) for heads in (2, 1, 1)]
        options = {"block_size": 64, "top_k": 3}
        loss = lambda *a: jnp.sum(jnp.sin(mixers.moba_attention(*a, **options)[0]))  # noqa: E731
        return cost(jax.grad(loss, argnums=(0, 1, 2)), *shapes)

    (flops, memory), (flops2, memory2) = of(8192), of(16384)
    # The scores of all blocks are the method's own square.
    assert flops2 < 2.3 * flops
    assert memory2 < 2.2 * memory < 2.2 * 8192**2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"top_k": None}, "top_k must be an integer >= 1, got None"),
        ({"initial_state": ()}, "initial_state must be a MoBAState, got tuple"),
        ({"capacity": 0}, "capacity must be an integer >= 1"),
        ({"impl": "pallas"}, "impl='pallas' cannot run"),
        ({"impl": "chunked"}, "impl must be one of"),
        ({"segment_ids": np.ones((2, 3), np.int32)}, "segment_ids must have shape"),
        ({"v": np.ones((2, TIME, 4, 6), np.float32)}, "heads"),
        ({"k": np.ones((2, TIME, 2, 9), np.float32)}, "k must have the key width of q"),
        (
            {"initial_state": mixers.init_moba_state(2, 8, 2, KEY, VALUE, jnp.float32, 2)},
            r"initial_state.means must have shape .* = \[2, 2, 2, 8\], got \[2, 4, 2, 8\]",
        ),
    ],
)
def test_bad_arguments(change, match):
    q, k, v = draw()
    with pytest.raises(ValueError, match=f"moba_attention: .*{match}"):
        mixers.moba_attention(**({"q": q, "k": k, "v": v} | OPTIONS | change))
