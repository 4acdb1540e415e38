# SPDX-License-Identifier: Apache-2.0
"""Softmax attention and its cache against a row-by-row float64 derivation."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from seqmix import mixers
from tests.mixers import dense
from tests.mixers.cases import Shape, draw_segments
from tests.mixers.parity import BFLOAT16_BAR, FLOAT32_BAR, quick_jit, relative_error

SHAPE = Shape(time=45, key=8, value=6)


def draw(heads=4, groups=2, seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    rows = (shape.batch, shape.time)
    return tuple(
        rng.normal(size=(*rows, h, w)).astype(np.float32)
        for h, w in ((heads, shape.key), (groups, shape.key), (groups, shape.value))
    )


def attend(q, k, v, segment_ids=None, state=None, sinks=None, *, softcap=None, **options):
    return mixers.attention(
        q,
        k,
        v,
        segment_ids=segment_ids,
        initial_state=state,
        sinks=sinks,
        logit_softcap=softcap,
        **options,
    )


run = quick_jit(
    attend,
    static_argnames=("causal", "window", "prefix", "impl", "chunk_size", "capacity", "softcap"),
)


OPTIONS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 7},
    "prefix": {"window": 5, "prefix": 3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
}


@pytest.mark.parametrize("impl", ["dense", "chunked"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_against_rows(option, impl, packed):
    q, k, v = draw()
    segments = draw_segments(SHAPE) if packed else None
    out, _ = run(q, k, v, segments, impl=impl, chunk_size=16, **OPTIONS[option])
    wide = [x.astype(np.float64) for x in (q, k, v)]
    want = dense.attention(*wide, segments, **OPTIONS[option])
    assert relative_error(out, want) < FLOAT32_BAR


@pytest.mark.parametrize("option", ["causal", "window", "prefix", "sinks"])
def test_gradients_of_chunks_equal_the_dense_ones(option):
    arrays = draw()
    segments = draw_segments(SHAPE)
    options = OPTIONS[option]

    def loss(arrays, impl):
        out, _ = attend(*arrays, segments, impl=impl, chunk_size=16, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in arrays)

        def loss64(arrays):
            return jnp.sum(jnp.sin(attend(*arrays, segments, impl="dense", **options)[0]))

        want = quick_jit(jax.grad(loss64))(wide)
    for impl in ("dense", "chunked"):
        got = quick_jit(jax.grad(loss), static_argnums=1)(arrays, impl)
        assert all(relative_error(g, w) < FLOAT32_BAR for g, w in zip(got, want, strict=True))


# The last prefix is longer than the first pieces, so that the cache has to grow inside it.
@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (7, 0), (64, 0), (5, 3), (3, 12)])
def test_pieces_through_the_cache_equal_one_pass(window, prefix):
    """Cuts inside a document, and one at which a document ends; padding in every piece."""
    arrays = draw()
    segments = np.array(draw_segments(SHAPE))
    cuts = [0, 9, 10, 30, 45]
    for cut in cuts[1:-1]:
        segments[:, cut - 1 : cut + 1] = np.maximum(segments[:, cut - 1 : cut], 1)
    segments = np.where(np.arange(45) >= 30, np.maximum(segments, segments[:, 29:30]), segments)
    whole, final = run(*arrays, segments, window=window, prefix=prefix)
    state, outs = None, []
    for start, stop in itertools.pairwise(cuts):
        piece = [x[:, start:stop] for x in arrays]
        out, state = run(*piece, segments[:, start:stop], state, window=window, prefix=prefix)
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    np.testing.assert_array_equal(state.length, final.length)


def test_scale_and_sinks_hold_through_the_cache():
    """With grouped heads, a window and a cut; gradient of the sinks against float64."""
    q, k, v = draw()
    sinks, cut = OPTIONS["sinks"]["sinks"], 19

    def pieces(sinks, q, k, v):
        options = {"sinks": sinks, "window": 7, "scale": 0.3}
        first, state = attend(q[:, :cut], k[:, :cut], v[:, :cut], **options)
        last, _ = attend(q[:, cut:], k[:, cut:], v[:, cut:], state=state, **options)
        return jnp.concatenate([first, last], axis=1)

    def loss(*arguments):
        return jnp.sum(jnp.sin(pieces(*arguments)))

    wide = [x.astype(np.float64) for x in (sinks, q, k, v)]
    want = dense.attention(wide[1] * 0.3 * SHAPE.key**0.5, *wide[2:], None, window=7, sinks=wide[0])
    out, gradient = quick_jit(lambda *a: (pieces(*a), jax.grad(loss)(*a)))(sinks, q, k, v)
    assert relative_error(out, want) < FLOAT32_BAR
    numeric = np.zeros(4)
    for head in range(4):
        step = np.zeros(4)
        step[head] = 1e-4
        up, down = (
            np.sin(
                dense.attention(
                    wide[1] * 0.3 * SHAPE.key**0.5, *wide[2:], None, window=7, sinks=wide[0] + s
                )
            ).sum()
            for s in (step, -step)
        )
        numeric[head] = (up - down) / 2e-4
    assert relative_error(gradient, numeric) < FLOAT32_BAR


@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (7, 0), (5, 3)])
def test_decode_past_the_window_with_constant_size(window, prefix):
    arrays = draw()
    whole, prefilled = run(*arrays, window=window, prefix=prefix)
    state = mixers.init_kv_cache(2, 45, 2, SHAPE.key, SHAPE.value, jnp.float32, window, prefix)
    slots = state.key.shape[1]
    assert slots == (45 if window is None else window + prefix)
    outs = []
    for t in range(45):
        token = [x[:, t : t + 1] for x in arrays]
        out, state = run(*token, None, state, window=window, prefix=prefix, capacity=slots)
        assert state.key.shape[1] == slots
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    jax.tree.map(np.testing.assert_array_equal, state, prefilled)
    np.testing.assert_array_equal(state.length, [45, 45])


@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (7, 0), (5, 3)])
def test_a_new_document_empties_the_cache(window, prefix):
    arrays = draw()
    one, two = np.full((2, 20), 1, np.int32), np.full((2, 25), 2, np.int32)
    limits = {"window": window, "prefix": prefix}
    _, state = run(*(x[:, :20] for x in arrays), one, **limits)
    joined = np.concatenate([np.full((2, 5), 9, np.int32), two[:, :20]], axis=1)
    rest = [x[:, 20:] for x in arrays]
    out, after = run(*rest, joined, state, **limits, capacity=45)
    alone, fresh = run(*(x[:, 25:] for x in arrays), two[:, :20], **limits, capacity=45)
    assert relative_error(out[:, 5:], alone) < FLOAT32_BAR
    np.testing.assert_array_equal(after.length, fresh.length)


def test_rows_of_different_lengths_keep_their_own_positions():
    arrays = draw()
    lengths = np.array([13, 31])
    segments = (np.arange(45)[None] < lengths[:, None]).astype(np.int32)
    _, state = run(*arrays, segments, capacity=60)
    np.testing.assert_array_equal(state.length, lengths)
    token = draw(seed=1, shape=Shape(time=1, key=8, value=6))
    out, _ = run(*token, None, state, capacity=60)
    for row, length in enumerate(lengths):
        joined = [
            np.concatenate([x[row : row + 1, :length], t[row : row + 1]], axis=1)
            for x, t in zip(arrays, token, strict=True)
        ]
        alone, _ = run(*joined)
        assert relative_error(out[row, 0], alone[0, -1]) < FLOAT32_BAR


def test_a_document_that_outgrows_its_cache_is_never_silently_wrong():
    arrays = draw()
    out, _ = run(*arrays, capacity=44)
    assert bool(jnp.all(jnp.isnan(out)))
    out, _ = run(*arrays, capacity=45)
    assert bool(jnp.all(jnp.isfinite(out)))
    out, _ = run(*arrays, window=7, capacity=44)
    assert bool(jnp.all(jnp.isfinite(out)))
    for slots, enough in ((2, False), (3, False), (7, False), (8, True)):
        out, _ = run(*arrays, window=5, prefix=3, capacity=slots)
        assert bool(jnp.all(jnp.isfinite(out) == enough))


def test_other_documents_change_nothing_bitwise():
    arrays, other = draw(), draw(seed=1)
    segments = np.where(np.arange(45) < 20, 1, 2) * np.ones((2, 1), np.int32)
    mixed = [np.concatenate([o[:, :20], a[:, 20:]], axis=1) for a, o in zip(arrays, other)]  # noqa: B905
    out, _ = run(*arrays, segments, impl="chunked", chunk_size=16)
    out2, _ = run(*mixed, segments, impl="chunked", chunk_size=16)
    np.testing.assert_array_equal(out[:, 20:], out2[:, 20:])
    assert not np.array_equal(out[:, :20], out2[:, :20])


def test_nan_in_padding_is_inert():
    arrays = draw()
    segments = np.array(draw_segments(SHAPE))
    out, _ = run(*arrays, segments)
    poisoned = [np.where((segments == 0)[..., None, None], np.nan, x) for x in arrays]
    out2, _ = run(*poisoned, segments)
    np.testing.assert_array_equal(out, out2)
    assert not np.any(np.asarray(out)[segments == 0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("option", ["causal", "window", "prefix"])
def test_the_masks_that_cudnn_gets(option, packed, monkeypatch):
    """Its form with XLA's kernel in its place."""
    library = jax.nn.dot_product_attention
    xla = lambda *a, implementation, **o: library(*a, implementation="xla", **o)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", xla)
    module = importlib.import_module("seqmix.mixers.attention")  # the package has its function
    monkeypatch.setattr(module, "_cudnn_refusal", lambda *a: None)
    arrays = draw(shape=Shape(time=45, key=8, value=8))  # it wants equal widths
    segments = draw_segments(SHAPE) if packed else None
    out, _ = attend(*arrays, segments, impl="cudnn", **OPTIONS[option])
    want = dense.attention(*(x.astype(np.float64) for x in arrays), segments, **OPTIONS[option])
    assert relative_error(out, want) < FLOAT32_BAR


def test_bfloat16_and_annotations():
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in draw())
    out, cache = jaxtyped(mixers.attention, typechecker=beartype)(*arrays)
    assert out.dtype == jnp.bfloat16
    assert cache.key.dtype == jnp.bfloat16
    want = dense.attention(*(np.asarray(x, np.float64) for x in arrays), None)
    assert relative_error(out, want) < BFLOAT16_BAR


def test_memory_does_not_hold_all_pairs():
    def gradient(time):
        specs = [jax.ShapeDtypeStruct((1, time, 1, 16), jnp.float32)] * 3
        loss = lambda q, k, v: jnp.sum(jnp.sin(mixers.attention(q, k, v)[0]))  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*specs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert gradient(8192) < 2.2 * gradient(4096)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"window": 0}, "window must be an integer >= 1"),
        ({"window": 3, "causal": False}, "window needs causal=True"),
        ({"prefix": 3}, "prefix needs a window, got prefix=3, window=None"),
        ({"prefix": -1, "window": 3}, "prefix must be an integer >= 0, got -1"),
        ({"logit_softcap": 0.0}, "logit_softcap must be > 0"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks must have shape \[Hq\]"),
        ({"impl": "cudnn"}, "impl='cudnn' cannot run: the backend is 'cpu'"),
        ({"impl": "chunkwise"}, "impl must be one of"),
        ({"capacity": 0}, "capacity must be an integer >= 1"),
        ({"segment_ids": np.ones((2, 3), np.int32)}, "segment_ids must have shape"),
        ({"segment_ids": [[1] * 45] * 2}, r"segment_ids must be an array \[B, T\], got list"),
        ({"initial_state": ()}, "initial_state must be a KVCache, got tuple"),
        ({"v": np.ones((2, 45, 4, 6), np.float32)}, "heads"),
        ({"k": np.ones((2, 45, 2, 9), np.float32)}, "k must have the key width of q"),
    ],
)
def test_bad_arguments(change, match):
    q, k, v = draw()
    with pytest.raises(ValueError, match=f"attention: .*{match}"):
        mixers.attention(**({"q": q, "k": k, "v": v} | change))
