# SPDX-License-Identifier: Apache-2.0
"""BigBird's attention against a token-by-token float64 derivation, its plan and its sparsity."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from seqmix import mixers
from seqmix.mixers._bigbird import Options, random_plan
from tests.mixers import dense_block_sparse as dense
from tests.mixers.parity import BFLOAT16_BAR, FLOAT32_BAR, quick_jit, relative_error
from tests.mixers.sparse import PACKINGS, cost, packed_segments, sparing

TIME = 45


def draw(heads=4, groups=2, seed=0, time=TIME):
    rng = np.random.default_rng(seed)
    widths = ((heads, 8), (groups, 8), (groups, 6))
    return tuple(rng.normal(size=(2, time, h, w)).astype(np.float32) for h, w in widths)


def attend(arrays, segment_ids=None, state=None, **options):
    return mixers.bigbird_attention(
        *arrays, segment_ids=segment_ids, initial_state=state, **options
    )


STATIC = ("block_size", "window_blocks", "random_blocks", "seed", "causal", "capacity", "impl")
run = quick_jit(attend, static_argnames=STATIC)
CAUSAL = {"block_size": 4, "window_blocks": 2, "random_blocks": 2}
BOTH = {"block_size": 4, "window_blocks": 3, "random_blocks": 2, "causal": False}
FORMS = {"causal": CAUSAL, "both": BOTH}


def rows(arrays, segments, options):
    return dense.bigbird(
        *(np.asarray(x, np.float64) for x in arrays),
        segments,
        block=options["block_size"],
        window=options["window_blocks"],
        random=options["random_blocks"],
        seed=options.get("seed", 0),
        causal=options.get("causal", True),
    )


EVERY = [
    *itertools.product(FORMS, PACKINGS, ("sparse",)),
    *itertools.product(FORMS, ("packed",), ("dense",)),
]
FAST = [
    ("causal", "packed", "dense"),
    ("causal", "long", "sparse"),
    ("both", "long", "sparse"),
]


@pytest.mark.parametrize(("form", "packing", "impl"), sparing(EVERY, FAST))
def test_against_rows(form, packing, impl):
    arrays, segments = draw(), packed_segments(packing)
    out, _ = run(arrays, segments, impl=impl, **FORMS[form])
    assert relative_error(out, rows(arrays, segments, FORMS[form])) < FLOAT32_BAR


@pytest.mark.parametrize(
    ("form", "packing"),
    sparing([("causal", "long"), ("causal", "whole"), ("both", "packed")], [("causal", "long")]),
)
def test_gradients_equal_the_dense_ones(form, packing):
    arrays, segments = draw(), packed_segments(packing)

    def loss(arrays, impl):
        out, _ = attend(arrays, segments, impl=impl, **FORMS[form])
        return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32))))

    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in arrays)
        want = quick_jit(jax.grad(loss), static_argnums=1)(wide, "dense")
    got = quick_jit(jax.grad(loss), static_argnums=1)(arrays, "sparse")
    errors = [relative_error(g, w) for g, w in zip(got, want, strict=True)]
    assert max(errors) < FLOAT32_BAR, errors


@pytest.mark.parametrize("causal", [True, False])
def test_the_plan_is_a_function_of_its_names_only(causal):
    """Of seed, head, block and, unless causal, number of blocks; distinct, none seen anyway."""
    most = 12
    plan = Options(4, 1, 0 if causal else 1, 3, 7, causal, 1.0)
    head, count, block = jnp.ogrid[:2, 1 : most + 1, :most]
    draw = quick_jit(lambda: random_plan(plan, head, block, None if causal else count))
    drawn = np.broadcast_to(draw(), (2, most if not causal else 1, most, 3))
    for h, n, i in np.ndindex(*drawn.shape[:3]):
        blocks = most if causal else n + 1
        if i >= blocks or (not causal and i in (0, blocks - 1)):
            continue  # there is none, or it sees all
        got = [j for j in drawn[h, n, i] if j >= 0]
        options = {"window": 2 if causal else 3, "causal": causal, "seed": 7, "head": h}
        sees = dense.bigbird_blocks(i, blocks, random=3, **options)
        near = dense.bigbird_blocks(i, blocks, random=0, **options)
        assert set(got) == sees - near
        assert len(got) == len(set(got)) == min(3, (i + 1 if causal else blocks) - len(near))


def test_random_blocks_are_even_and_heads_differ():
    options = Options(4, 1, 0, 2, 0, True, 1.0)
    heads = jnp.arange(2000, dtype=jnp.int32)
    drawn = np.asarray(random_plan(options, heads, jnp.full_like(heads, 12), None))
    counts = np.bincount(drawn.reshape(-1), minlength=12)
    assert set(np.flatnonzero(counts)) == set(range(1, 11))
    assert np.abs(counts[1:11] - 400).max() < 80  # four deviations
    other = np.asarray(random_plan(options._replace(seed=1), heads, heads * 0 + 12, None))
    assert (drawn != other).mean() > 0.8


@pytest.mark.parametrize(
    ("impl", "size"), sparing([("sparse", 5), ("sparse", 9), ("dense", 9)], [("sparse", 5)])
)
def test_pieces_through_the_cache_equal_one_pass(impl, size):
    """Cuts on and off the blocks of documents, which end inside a piece."""
    arrays = draw()
    segments = np.repeat([[1, 2, 2], [3, 3, 4]], (17, 9, 19), axis=1).astype(np.int32)
    segments[:, [7, 16, 20, 33]] = 0
    whole, final = run(arrays, segments, capacity=45, **CAUSAL)
    state, outs = mixers.init_kv_cache(2, 45, 2, 8, 6, jnp.float32), []
    for start in range(0, 45, size):
        piece = [x[:, start : start + size] for x in arrays]
        ids = segments[:, start : start + size]
        out, state = run(piece, ids, state, impl=impl, capacity=45, **CAUSAL)
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    np.testing.assert_array_equal(state.length, final.length)


@pytest.mark.slow
def test_decoding_is_the_full_pass():
    arrays = draw()
    whole, final = run(arrays, **CAUSAL)
    state, outs = mixers.init_kv_cache(2, 45, 2, 8, 6, jnp.float32), []
    for t in range(TIME):
        out, state = run([x[:, t : t + 1] for x in arrays], None, state, capacity=45, **CAUSAL)
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    for got, want in zip(state, final, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_gradients_through_the_cache():
    arrays = draw()

    def loss(arrays, impl):
        first, state = attend([x[:, :21] for x in arrays], impl=impl, **CAUSAL)
        rest, _ = attend([x[:, 21:] for x in arrays], None, state, impl=impl, **CAUSAL)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(rest))

    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in arrays)
        want = quick_jit(jax.grad(loss), static_argnums=1)(wide, "dense")
    got = quick_jit(jax.grad(loss), static_argnums=1)(arrays, "sparse")
    assert all(relative_error(g, w) < FLOAT32_BAR for g, w in zip(got, want, strict=True))


def test_a_document_that_outgrows_its_cache_is_never_silently_wrong():
    out, _ = run(draw(), capacity=44, **CAUSAL)
    assert bool(jnp.all(jnp.isnan(out)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_other_documents_and_padding_change_nothing_bitwise(form):
    arrays, other = draw(), draw(seed=1)
    segments = np.repeat([[1, 0, 2], [1, 0, 2]], (19, 3, 23), axis=1)
    mixed = [np.concatenate([o[:, :19], a[:, 19:]], 1) for a, o in zip(arrays, other, strict=True)]
    mixed = [np.where((segments == 0)[..., None, None], np.nan, x) for x in mixed]
    out, _ = run(arrays, segments, **FORMS[form])
    out2, _ = run(mixed, segments, **FORMS[form])
    np.testing.assert_array_equal(out[:, 22:], out2[:, 22:])
    assert not np.array_equal(out[:, :19], out2[:, :19])
    assert not np.any(np.asarray(out2)[segments == 0])


CHANGES = [
    ("causal", {"window_blocks": 1, "random_blocks": 0, "block_size": 3}),
    ("both", {"window_blocks": 1, "random_blocks": 9}),
    ("both", {"window_blocks": 5, "random_blocks": 0, "block_size": 1}),
    ("causal", {"window_blocks": 4, "seed": 3, "block_size": 1}),
    ("both", {"block_size": 64}),
]


@pytest.mark.parametrize(("form", "change"), sparing(CHANGES, CHANGES[:1]))
def test_options(form, change):
    options = FORMS[form] | change
    for time in (2, 26):
        arrays = draw(time=time)
        out, _ = run(arrays, **options)
        assert relative_error(out, rows(arrays, None, options)) < FLOAT32_BAR


def test_bfloat16_and_annotations():
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in draw())
    typed = jaxtyped(mixers.bigbird_attention, typechecker=beartype)
    out, cache = quick_jit(lambda a: typed(*a, **CAUSAL))(arrays)
    assert out.dtype == cache.key.dtype == jnp.bfloat16
    assert relative_error(out, rows(arrays, None, CAUSAL)) < BFLOAT16_BAR


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_cost_follows_the_length(form):
    """Forward and backward: the products exactly, the bytes but for what does not grow."""
    options = FORMS[form] | {"block_size": 32}

    def gradient(time):
        shapes = [jax.ShapeDtypeStruct((1, time, 1, 16), jnp.float32)] * 3
        ids = jax.ShapeDtypeStruct((1, time), jnp.int32)
        return cost(
            jax.grad(lambda a, ids: jnp.sum(jnp.sin(attend(a, ids, **options)[0]))), shapes, ids
        )

    (flops, held), (flops2, held2) = gradient(1024), gradient(2048)
    assert flops2 == 2 * flops
    assert held2 < 2.1 * held
    if form == "causal":
        # Window, block 0, and the random blocks of the two blocks that a chunk may lie in.
        keys = (2 + 1) * 32 - 1 + 32 + 2 * 2 * 32
        assert flops2 / 2048 == 8 * 2 * 16 * keys  # two products, recomputed, and four backwards


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"window_blocks": None}, "window_blocks must be an integer >= 1, got None"),
        ({"window_blocks": 2, "causal": False}, "window_blocks must be odd with causal=False"),
        ({"random_blocks": -1}, "random_blocks must be an integer >= 0, got -1"),
        ({"seed": 0.5}, "seed must be an integer >= 0, got 0.5"),
        (
            {"causal": False, "initial_state": mixers.init_kv_cache(2, 9, 2, 8, 6, "float32")},
            "initial_state needs causal=True",
        ),
        (
            {"initial_state": mixers.init_kv_cache(2, 9, 2, 8, 5, "float32")},
            "initial_state.value must have shape",
        ),
        ({"impl": "chunked"}, "impl must be one of"),
        ({"impl": "pallas"}, "impl='pallas' cannot run"),
        ({"capacity": 0}, "capacity must be an integer >= 1"),
        ({"v": np.ones((2, 45, 4, 6), np.float32)}, "heads"),
    ],
)
def test_bad_arguments(change, match):
    arrays = dict(zip(("q", "k", "v"), draw(), strict=True))
    with pytest.raises(ValueError, match=f"bigbird_attention: .*{match}"):
        mixers.bigbird_attention(**(arrays | change))
