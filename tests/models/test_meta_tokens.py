# SPDX-License-Identifier: Apache-2.0
"""Learned tokens that every document begins with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import AttentionConfig, MambaConfig, ParallelHeadsConfig
from seqmix.models import HybridLMConfig, inspect
from tests.layers.modules import quick_jit
from tests.models.models import Model, close, config

META, TIME = 3, 16
_SSM = MambaConfig(expand=2, state_size=3, dt_rank=2, chunk_size=8)


def _parallel(**attention):
    heads = {"heads": 3, "kv_heads": 1, "head_width": 6, "value_width": 14, **attention}
    return ParallelHeadsConfig(attention=AttentionConfig(**heads), ssm=_SSM, merge="mean")


# Hymba in small: a layer that sees everything, two windows beside the meta tokens, of which the
# second reads the keys and values of the first.
SETTINGS = config(
    "local/parallel_heads, reuse/parallel_heads",
    leading="parallel_heads",
    layers=3,
    meta_tokens=META,
    mixers={
        "parallel_heads": _parallel(),
        "local/parallel_heads": _parallel(window=4, prefix=META, share_kv_as="kv"),
        "reuse/parallel_heads": _parallel(window=4, prefix=META, kv_from="kv"),
    },
)
IDS = np.arange(61, 61 + META)


@pytest.fixture(scope="module")
def model():
    return Model(SETTINGS)


def rows(*lengths, seed=0):
    """One packed row of documents of meta tokens and this many others, and its segment ids."""
    draw = np.random.default_rng(seed)
    documents = [np.concatenate([IDS, draw.integers(0, 61, n)]) for n in lengths]
    ids = np.repeat(np.arange(1, len(lengths) + 1), [len(d) for d in documents])
    row, ids = np.concatenate(documents), ids.astype(np.int32)
    pad = (0, TIME - len(row))
    return jnp.asarray(np.pad(row, pad)[None], jnp.int32), jnp.asarray(np.pad(ids, pad)[None])


def test_packed_documents_are_what_they_are_alone(model):
    tokens, ids = rows(5, 4)
    packed = model.logits(model.parameters, tokens, ids)
    assert packed.shape[-1] == 61 and jnp.isfinite(packed[:, :15]).all()
    for start, length in ((0, 8), (8, 7)):
        alone = jnp.zeros_like(tokens).at[:, :length].set(tokens[:, start : start + length])
        real = (jnp.arange(TIME) < length).astype(jnp.int32)[None]
        expected = model.logits(model.parameters, alone, real)
        close(packed[:, start : start + length], expected[:, :length])


def test_decoding_keeps_the_meta_tokens_in_sight_of_the_window(model):
    tokens, ids = rows(13)
    cache = model().init_cache(1, TIME)
    held = [c.attention for c in (*cache.layers.leading, *cache.layers.periods)]
    assert [getattr(c, "key", np.zeros(0)).shape[-3:-2] for c in held] == [(TIME,), (7,), ()]
    logits, positions, _ = model.decode(model.parameters, tokens, cache)
    close(logits, model.logits(model.parameters, tokens, ids))
    assert positions[0].tolist() == list(range(1, TIME + 1))


@pytest.fixture(scope="module")
def gradient(model):
    """Of the last token's logits in a row of 3 + 13 tokens with respect to the meta vectors."""

    def of(prefix):
        mixers = {
            key: dataclasses.replace(
                mixer, attention=dataclasses.replace(mixer.attention, prefix=prefix)
            )
            for key, mixer in SETTINGS.mixers.items()
            if key != "parallel_heads"
        }
        kept = {"parallel_heads": SETTINGS.mixers["parallel_heads"]}
        settings = dataclasses.replace(SETTINGS, mixers={**mixers, **kept})
        graph = Model(settings).graph

        def loss(parameters):
            logits = nnx.merge(graph, parameters)(rows(13)[0])
            return jnp.sum(logits[0, -1] * jnp.cos(jnp.arange(61)))

        return loss

    run = quick_jit(lambda p: (jax.grad(of(META))(p)["meta"][...], of(0)(p), of(META)(p)))
    return run(model.parameters)


def test_they_are_learned_and_the_prefix_shows_them_to_windows(gradient):
    vectors, without, with_prefix = gradient
    assert vectors.shape == (META, 21)
    assert jnp.abs(vectors).max(axis=1).min() > 1e-4
    assert abs(float(without - with_prefix)) > 1e-3


def test_ids_outside_are_nan_and_ids_inside_are_the_vectors(model):
    lm = model()
    tokens = jnp.asarray([[60, 61, 63, 64, -1]])
    x = lm._embed(tokens, None)
    np.testing.assert_array_equal(x[0, 0], lm.embedding[60])
    np.testing.assert_array_equal(x[0, 1:3], lm.meta[jnp.asarray([0, 2])])
    assert jnp.isnan(x[0, 3:]).all()


def test_counts_and_checks():
    plain = dataclasses.replace(SETTINGS, meta_tokens=0)
    with_meta, without = (inspect(c, contexts=(8,)) for c in (SETTINGS, plain))
    assert with_meta.parameters - without.parameters == META * 21
    assert with_meta.embedding_parameters - without.embedding_parameters == META * 21
    assert with_meta.head_flops == without.head_flops
    assert SETTINGS.meta_ids == range(61, 64) and plain.meta_ids == range(61, 61)
    with pytest.raises(ValueError, match="HybridLM.meta_tokens must be >= 0, got -1"):
        HybridLMConfig(meta_tokens=-1)
