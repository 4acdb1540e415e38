# SPDX-License-Identifier: Apache-2.0
"""DSA: selection, attention, the indexer's loss and its gradients, caches, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from seqmix import mixers
from tests.mixers.cases import Shape, draw_segments
from tests.mixers.dense_dsa import dsa
from tests.mixers.parity import BFLOAT16_BAR, FLOAT32_BAR, quick_jit, relative_error

SHAPE = Shape(time=45, key=8, value=6)
TOP_K = 5
NAMES = ("q", "k", "v", "index_q", "index_k", "index_weights")


def draw(heads=4, groups=2, index_heads=3, index_width=5, seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    rows = (shape.batch, shape.time)
    shapes = (
        (heads, shape.key),
        (groups, shape.key),
        (groups, shape.value),
        (index_heads, index_width),
        (index_width,),
        (index_heads,),
    )
    return tuple(rng.normal(size=(*rows, *s)).astype(np.float32) for s in shapes)


@functools.partial(
    quick_jit, static_argnames=("top_k", "stage", "impl", "chunk_size", "capacity", "index_loss")
)
def run(arrays, segment_ids=None, state=None, *, top_k=TOP_K, index_loss=True, **options):
    return mixers.dsa_attention(
        *arrays,
        segment_ids=segment_ids,
        initial_state=state,
        top_k=top_k,
        index_loss=index_loss,
        **options,
    )


@functools.partial(quick_jit, static_argnames=("options",))
def outputs_and_gradients(arrays, segments, *, options):
    """Output and loss; gradients of each alone by every argument."""

    def outputs(arrays):
        out, _, loss = mixers.dsa_attention(
            *arrays, segment_ids=segments, index_loss=True, top_k=TOP_K, **dict(options)
        )
        return jnp.sum(jnp.sin(out)), jnp.sum(loss), out, loss

    of_out = jax.grad(lambda a: outputs(a)[0])(arrays)
    of_loss = jax.grad(lambda a: outputs(a)[1])(arrays)
    return outputs(arrays)[2:], of_out, of_loss


def measure(arrays, segments, **options):
    return outputs_and_gradients(arrays, segments, options=tuple(options.items()))


@pytest.fixture(scope="module", params=["warmup", "sparse"])
def wanted(request):
    """Packed rows of a stage: what the token-by-token derivation gives, and the dense form's."""
    arrays, segments = draw(), np.array(draw_segments(SHAPE))
    with jax.enable_x64(True):
        wide = tuple(x.astype(np.float64) for x in arrays)
        rows = dsa(*wide, segments, top_k=TOP_K, warmup=request.param == "warmup")
        dense = measure(wide, segments, stage=request.param, impl="dense")
    return request.param, arrays, segments, rows, dense


def test_dense_form_against_rows(wanted):
    _, _, _, (out, loss, gradients), ((got, got_loss), of_out, of_loss) = wanted
    assert relative_error(got, out) < 1e-12
    assert relative_error(got_loss, loss) < 1e-12
    for gradient, want in zip(of_loss[3:], gradients, strict=True):
        assert relative_error(gradient, want) < 1e-11
    # Each loss trains its own: the indexer never sees the output, attention never the loss.
    assert not any(np.any(x) for x in (*of_out[3:], *of_loss[:3]))


def test_float32_against_float64(wanted):
    stage, arrays, segments, _, want = wanted
    got = measure(arrays, segments, stage=stage, impl="sparse", chunk_size=16)
    (got_outputs, got_out, got_loss), (outputs, of_out, of_loss) = got, want
    pairs = [*zip(got_outputs, outputs, strict=True), *zip(got_out[:3], of_out[:3], strict=True)]
    pairs += zip(got_loss[3:], of_loss[3:], strict=True)
    assert [relative_error(a, b) for a, b in pairs if relative_error(a, b) >= FLOAT32_BAR] == []
    assert not any(np.any(x) for x in (*got_out[3:], *got_loss[:3]))


def test_bfloat16_and_annotations():
    """Indexer and selection in float32, so that both select the same."""
    arrays = tuple(jnp.asarray(x, "bfloat16" if i < 3 else "float32") for i, x in enumerate(draw()))
    typed = jaxtyped(mixers.dsa_attention, typechecker=beartype)
    out, cache = quick_jit(functools.partial(typed, top_k=TOP_K))(*arrays)
    assert out.dtype == cache.kv.key.dtype == jnp.bfloat16
    want = dsa(*(np.asarray(x, np.float64) for x in arrays), None, top_k=TOP_K)[0]
    assert relative_error(out, want) < BFLOAT16_BAR


@functools.partial(quick_jit, static_argnames=("stage", "impl", "capacity"))
def run_latent(arrays, segments=None, state=None, **options):
    q, k, *index = arrays
    return mixers.dsa_attention(
        q,
        k,
        None,
        *index,
        value_width=6,
        segment_ids=segments,
        initial_state=state,
        top_k=TOP_K,
        index_loss=True,
        **options,
    )


def test_values_inside_the_keys():
    """One key head whose first channels are the values: as latent attention has it."""
    q, k, _, *index = draw(groups=1)
    apart = run((q, k, k[..., :6], *index), capacity=45)
    state, pieces = mixers.init_dsa_cache(2, 45, 1, 8, None, 5, jnp.float32), []
    for start in range(0, 45, 15):
        piece = tuple(x[:, start : start + 15] for x in (q, k, *index))
        out, state, _ = run_latent(piece, None, state, capacity=45)
        pieces.append(out)
    assert relative_error(np.concatenate(pieces, axis=1), apart[0]) < FLOAT32_BAR
    assert state.kv.value is None
    np.testing.assert_array_equal(state.kv.key, apart[1].kv.key)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["dense", "sparse"])
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_values_inside_the_keys_in_every_form(impl, stage):
    q, k, _, *index = draw(groups=1)
    segments = draw_segments(SHAPE)
    apart = run((q, k, k[..., :6], *index), segments, stage=stage, impl="dense")
    joined = run_latent((q, k, *index), segments, stage=stage, impl=impl)
    assert relative_error(joined[0], apart[0]) < FLOAT32_BAR
    assert relative_error(joined[2], apart[2]) < FLOAT32_BAR


@pytest.mark.parametrize("stage", [pytest.param("warmup", marks=pytest.mark.slow), "sparse"])
def test_pieces_through_the_cache_equal_one_pass(stage):
    """A document goes over every cut; others begin and end between them, with padding."""
    arrays = draw()
    lengths = ((19, 2, 17, 4, 3), (9, 3, 24, 1, 8))
    segments = np.stack([np.repeat([1, 0, 2, 0, 3], n) for n in lengths]).astype(np.int32)
    whole, final, loss = run(arrays, segments, stage=stage, capacity=45)
    state = mixers.init_dsa_cache(2, 45, 2, SHAPE.key, SHAPE.value, 5, jnp.float32)
    outs, losses = [], []
    for start in range(0, 45, 15):
        cut = slice(start, start + 15)
        piece = tuple(x[:, cut] for x in arrays)
        out, state, part = run(piece, segments[:, cut], state, stage=stage, capacity=45)
        outs.append(out)
        losses.append(part)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    assert relative_error(jnp.concatenate(losses, axis=1), loss) < FLOAT32_BAR
    np.testing.assert_array_equal(state.kv.length, final.kv.length)


def decode(arrays):
    state = mixers.init_dsa_cache(2, 45, 2, SHAPE.key, SHAPE.value, 5, jnp.float32)
    outs = []
    for t in range(45):
        token = tuple(x[:, t : t + 1] for x in arrays)
        out, state, _ = run(token, None, state, capacity=45)
        outs.append(out)
    return jnp.concatenate(outs, axis=1), state


def test_decode_step_by_step_equals_the_full_pass():
    arrays = draw()
    whole, final, _ = run(arrays, capacity=45)
    out, state = decode(arrays)
    assert relative_error(out, whole) < FLOAT32_BAR
    jax.tree.map(np.testing.assert_array_equal, state, final)


def test_as_many_keys_as_it_may_take_is_dense_attention():
    arrays = draw()
    few, _ = run(arrays, top_k=45, index_loss=False)
    plain, _ = quick_jit(mixers.attention)(*arrays[:3])
    np.testing.assert_array_equal(few, plain)


def test_equal_scores_take_the_earlier_token():
    """Scores that the rectifier makes 0, of either sign: every cut of the row selects the same."""
    arrays = list(draw())
    arrays[3], arrays[4] = -np.abs(arrays[3]), np.abs(arrays[4])
    arrays[5] = np.where(np.arange(45)[None, :, None] % 2, 1, -1) * np.abs(arrays[5])
    want = dsa(*(x.astype(np.float64) for x in arrays), None, top_k=TOP_K)[0]
    whole, _, _ = run(tuple(arrays), capacity=45)
    assert relative_error(whole, want) < FLOAT32_BAR
    assert relative_error(decode(arrays)[0], want) < FLOAT32_BAR


@pytest.mark.parametrize("time", [1, 3])
def test_short_rows_and_rows_of_padding(time):
    arrays = draw(shape=Shape(time=time, key=8, value=6))
    out, _, loss = run(arrays, np.ones((2, time), np.int32), top_k=2)
    want, want_loss, _ = dsa(*(x.astype(np.float64) for x in arrays), None, top_k=2)
    assert relative_error(out, want) < FLOAT32_BAR
    np.testing.assert_allclose(loss, want_loss, atol=1e-6)
    out, state, loss = run(arrays, np.zeros((2, time), np.int32), top_k=2)
    assert not np.any(out) and not np.any(loss) and not np.any(state.kv.length)


def test_other_documents_and_padding_change_nothing_bitwise():
    arrays, other = draw(), draw(seed=1)
    segments = np.where(np.arange(45) < 20, 1, 2) * np.ones((2, 1), np.int32)
    segments[:, 25:28] = 0
    mixed = tuple(
        np.concatenate([o[:, :20], a[:, 20:]], axis=1) for a, o in zip(arrays, other, strict=True)
    )
    first, _, loss = run(arrays, segments, chunk_size=16)
    poisoned = tuple(
        np.where((segments == 0).reshape(2, 45, *(1,) * (x.ndim - 2)), np.nan, x) for x in mixed
    )
    second, _, loss2 = run(poisoned, segments, chunk_size=16)
    np.testing.assert_array_equal(first[:, 20:], second[:, 20:])
    np.testing.assert_array_equal(loss[:, 20:], loss2[:, 20:])
    assert not np.any(np.asarray(second)[segments == 0])


def test_a_document_that_outgrows_its_cache_is_never_silently_wrong():
    out, _, loss = run(draw(), capacity=44)
    assert np.isnan(out).all() and np.isnan(loss).all()


def test_no_array_of_all_pairs_and_memory_that_follows_the_selection():
    def compiled(time, top_k=64):
        specs = [
            jax.ShapeDtypeStruct((1, time, *s), jnp.float32)
            for s in ((1, 16), (1, 16), (1, 16), (1, 4), (4,), (1,))
        ]

        def loss(*arrays):
            out, _, kl = mixers.dsa_attention(
                *arrays, top_k=top_k, index_loss=True, chunk_size=32, impl="sparse"
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(kl)

        lowered = jax.jit(jax.grad(loss, argnums=range(6))).lower(*specs)
        return lowered.compile().memory_analysis().temp_size_in_bytes, lowered.as_text()

    (small, _), (large, text) = compiled(2048), compiled(4096)
    assert large < 2.2 * small
    assert "4096x4096" not in text


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ({"top_k": None}, "top_k must be an integer >= 1, got None"),
        ({"stage": "dense"}, r"stage must be one of \['warmup', 'sparse'\], got 'dense'"),
        ({"impl": "pallas"}, "impl='pallas' cannot run"),
        ({"chunk_size": 0}, "chunk_size must be an integer >= 1"),
        ({"capacity": -1}, "capacity must be an integer >= 1"),
        ({"v": None}, "v=None needs value_width"),
        ({"v": None, "value_width": 9}, "value_width must be at most k's width, 8, got 9"),
        ({"value_width": 6}, "value_width needs v=None"),
        ({"index_k": np.ones((2, 45, 4), np.float32)}, r"index_k must have shape \[B, T, C\]"),
        ({"index_q": np.ones((2, 44, 3, 5), np.float32)}, r"index_q must have shape \[B, T, J, C"),
        ({"index_weights": np.ones((2, 45, 2), np.float32)}, r"index_weights must have shape"),
        ({"index_weights": np.ones((2, 45, 3), np.float16)}, "index_weights must be float32"),
        ({"v": np.ones((2, 45, 4, 6), np.float32)}, "heads"),
        ({"segment_ids": np.ones((2, 3), np.int32)}, "segment_ids must have shape"),
        (
            {"initial_state": mixers.init_dsa_cache(2, 9, 2, 8, 6, 4, np.float32)},
            r"initial_state.index_key must have shape \[B, S, C\] = \[2, 9, 5\]",
        ),
    ],
)
def test_bad_arguments(change, match):
    arguments = dict(zip(NAMES, draw(), strict=True))
    with pytest.raises(ValueError, match=f"dsa_attention: .*{match}"):
        mixers.dsa_attention(**(arguments | change))
