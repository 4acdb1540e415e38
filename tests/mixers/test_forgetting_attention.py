# SPDX-License-Identifier: Apache-2.0
"""Softmax attention with a decay mask: against rows of weights, documents, caches, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from tests.mixers.dense import documents
from tests.mixers.parity import EXTREME_BAR, FLOAT32_BAR, relative_error

SEGMENTS = np.array([[1, 1, 0, 1, 1, 1, 2, 2, 0, 2, 3, 3], [0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0]])


def draw(time=12, heads=4, kv_heads=2, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {
        "q": rng.normal(size=(2, time, heads, 5)),
        "k": rng.normal(size=(2, time, kv_heads, 5)),
        "v": rng.normal(size=(2, time, kv_heads, 3)),
        "log_decay": -np.exp(rng.normal(size=(2, time, heads))),
    }
    return {n: jnp.asarray(a, jnp.float32) for n, a in arrays.items()}


def dense(q, k, v, log_decay, segment_ids):
    q, k, v, log_decay = (np.asarray(a, np.float64) for a in (q, k, v, log_decay))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(len(q)):
        for tokens in documents(segment_ids, b, q.shape[1]):
            for h in range(q.shape[2]):
                kv = h // (q.shape[2] // k.shape[2])
                for place, t in enumerate(tokens):
                    seen = tokens[: place + 1]
                    forgotten = [
                        log_decay[b, tokens[j + 1 : place + 1], h].sum() for j in range(place + 1)
                    ]
                    logits = k[b, seen, kv] @ q[b, t, h] * q.shape[-1] ** -0.5 + forgotten
                    weights = np.exp(logits - logits.max())
                    out[b, t, h] = weights / weights.sum() @ v[b, seen, kv]
    return out


run = jax.jit(
    lambda arrays, state, segments, **options: mixers.forgetting_attention(
        **arrays, initial_state=state, segment_ids=segments, **options
    ),
    static_argnames=("impl", "chunk_size", "capacity"),
)


@pytest.mark.parametrize("options", [{"impl": "dense"}, {"impl": "chunked", "chunk_size": 5}])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_weights(options, packed):
    arrays = draw()
    segments = SEGMENTS if packed else None
    out, _ = run(arrays, None, None if segments is None else jnp.asarray(segments), **options)
    assert relative_error(out, dense(**arrays, segment_ids=segments)) < FLOAT32_BAR


def test_strong_decays_and_resets():
    arrays = draw(time=40)
    coin = np.random.default_rng(1).random(arrays["log_decay"].shape)
    gates = np.where(coin < 0.2, -1e4, np.where(coin < 0.3, -np.inf, arrays["log_decay"]))
    arrays["log_decay"] = jnp.asarray(gates, jnp.float32)
    finite = arrays | {"log_decay": jnp.maximum(arrays["log_decay"], -1e9)}
    out, _ = run(arrays, None, None, impl="chunked", chunk_size=16)
    assert relative_error(out, dense(**finite, segment_ids=None)) < EXTREME_BAR


@pytest.mark.parametrize("cuts", [(5, 6, 9), tuple(range(1, 12))])
def test_pieces_through_the_cache_equal_one_pass(cuts):
    arrays, segments = draw(), jnp.asarray(SEGMENTS)
    whole, last = run(arrays, None, segments, capacity=12)
    state, pieces = mixers.init_forgetting_cache(2, 12, 4, 2, 5, 3, jnp.float32), []
    for start, stop in zip((0, *cuts), (*cuts, 12), strict=True):
        part = {n: a[:, start:stop] for n, a in arrays.items()}
        # A document that goes on over a cut keeps its id; one that begins there needs a new cache.
        ids = segments[:, start:stop]
        if start in (6, 10):
            out, fresh = run(part, None, ids, capacity=12)
            keep, state2 = run(part, state, ids, capacity=12)
            pieces.append(jnp.concatenate([out[:1], keep[1:]]))
            state = jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b[1:]]), fresh, state2)
            continue
        out, state = run(part, state, ids, capacity=12)
        pieces.append(out)
    assert relative_error(jnp.concatenate(pieces, axis=1), whole) < FLOAT32_BAR
    np.testing.assert_array_equal(state.kv.length, last.kv.length)
    for b, length in enumerate(np.asarray(last.kv.length)):
        got, want = (s.log_decay[b, :length] for s in (state, last))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_of_the_chunked_form():
    arrays, segments = draw(), jnp.asarray(SEGMENTS)

    def loss(arrays, options):
        return jnp.sum(jnp.sin(run(arrays, None, segments, **dict(options))[0]))

    chunked = jax.grad(loss)(arrays, (("chunk_size", 5), ("impl", "chunked")))
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(a, jnp.float64) for n, a in arrays.items()}
        want = jax.grad(functools.partial(loss, options=(("impl", "dense"),)))(wide)
    for n, g in chunked.items():
        assert relative_error(g, want[n]) < FLOAT32_BAR, n


def test_too_small_a_cache_gives_nan_and_bad_arguments_raise():
    arrays = draw()
    assert np.isnan(run(arrays, None, None, capacity=11)[0]).all()
    with pytest.raises(ValueError, match=r"forgetting_attention: log_decay must have shape"):
        mixers.forgetting_attention(**arrays | {"log_decay": arrays["log_decay"][..., :2]})
    cache = mixers.init_forgetting_cache(2, 12, 2, 2, 5, 3, jnp.float32)
    with pytest.raises(ValueError, match=r"initial_state.log_decay must have shape"):
        mixers.forgetting_attention(**arrays, initial_state=cache)
    with pytest.raises(ValueError, match="impl must be one of"):
        mixers.forgetting_attention(**arrays, impl="recurrent")
