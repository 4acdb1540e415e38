# SPDX-License-Identifier: Apache-2.0
"""Attention layers that read the keys, values and cache of one below."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import config as configs
from seqmix.layers import AttentionConfig, LinearScaling
from seqmix.models import HybridLMConfig, inspect, unstack
from tests.models.models import Model, close, config, tree_close

TIME = 14
SHARING = AttentionConfig(heads=4, kv_heads=2, head_width=6, window=6, share_kv_as="kv")
READING = AttentionConfig(heads=6, head_width=6, window=4, kv_from="kv")
MIXERS = {"attention": SHARING, "reuse/attention": READING}
# Layers of the scan read the leading layer, then that of the period before; the trailing one reads
# the last period's.
SETTINGS = config(
    "reuse/attention, attention",
    leading="attention",
    trailing="reuse/attention",
    layers=6,
    mixers=MIXERS,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, TIME)), jnp.int32)


@pytest.fixture(scope="module")
def model():
    return Model(SETTINGS)


def test_decoding_is_the_full_pass_and_readers_hold_nothing(model):
    cache = model().init_cache(2, TIME)
    leading, periods, trailing = cache.layers
    assert periods[0] == () == trailing[0]
    assert leading[0].key.shape == (2, 6, 2, 6) and periods[1].key.shape == (2, 2, 6, 2, 6)
    logits, _, after = model.decode(model.parameters, TOKENS, cache)
    close(logits, model.logits(model.parameters, TOKENS))
    assert jax.tree.structure(after) == jax.tree.structure(cache)


def test_packed_prefill_in_pieces_is_one_pass(model):
    """Rows that hold the end of one document, padding, and the beginning of the next."""
    ids = jnp.asarray([[1] * 8 + [0, 0] + [2] * 4, [0] + [3] * 11 + [0, 3]], jnp.int32)
    whole, _ = model.prefill(model.parameters, TOKENS, ids, model().init_cache(2, TIME))
    alone = jnp.zeros_like(TOKENS).at[0, :4].set(TOKENS[0, 10:])
    real = jnp.zeros_like(ids).at[0, :4].set(1)
    expected, _ = model.prefill(model.parameters, alone, real, model().init_cache(2, TIME))
    close(whole[0, 10:], expected[0, :4])
    cache, pieces = model().init_cache(2, TIME), []
    for start, stop in ((0, 7), (7, TIME)):
        piece = jnp.zeros_like(TOKENS).at[:, :7].set(TOKENS[:, start:stop])
        real = jnp.zeros_like(ids).at[:, :7].set(ids[:, start:stop])
        logits, cache = model.prefill(model.parameters, piece, real, cache)
        pieces.append(logits[:, :7])
    mask = (ids != 0)[..., None]
    close(jnp.where(mask, jnp.concatenate(pieces, axis=1), 0), jnp.where(mask, whole, 0))


@pytest.mark.slow
def test_scanned_and_rematerialised_is_unrolled(model):
    weights = jnp.cos(jnp.arange(2.0 * TIME)).reshape(2, TIME)
    unrolled = Model(dataclasses.replace(SETTINGS, scan=False))
    flat = nnx.state(unstack(model()))
    expected, gradient = unrolled.gradient(flat, TOKENS, None, weights)
    again = Model(dataclasses.replace(SETTINGS, remat="full"))
    logits, scanned = again.gradient(model.parameters, TOKENS, None, weights)
    close(logits, expected)
    tree_close(nnx.state(unstack(model(scanned))), gradient)


def test_counts(model):
    report = inspect(SETTINGS, contexts=(10,))
    sharing, reading = report.layers[:2]
    # Keys and values of two heads of 6 at width 21, and what six query heads need beyond four.
    kv, query = 2 * 21 * 12, 2 * 21 * 12
    assert sharing.parameters - reading.parameters == kv - query
    assert sharing.cache_bytes == (2 * 6 * 2 * 6 * 4 + 4,) and reading.cache_bytes == (0,)
    assert report.cache_bytes == (4 + 3 * sharing.cache_bytes[0],)
    assert READING.flops_per_token(21, 1) == 2 * 21 * 2 * 36 + 4 * 36
    held = jax.tree.leaves(jax.eval_shape(lambda: model().init_cache(1, 10)))
    assert sum(x.size * x.dtype.itemsize for x in held) == report.cache_bytes[0]


def test_gin_names_the_pair():
    text = """
        HybridLM.pattern = 'attention, reuse/attention'
        Attention.share_kv_as = 'pair'
        Attention.kv_heads = 2
        reuse/Attention.kv_from = 'pair'
        """
    mixers = configs.from_text(text, filename="t.gin").build(HybridLMConfig).mixers
    assert mixers["attention"] == AttentionConfig(kv_heads=2, share_kv_as="pair")
    assert mixers["reuse/attention"].kv_from == "pair"
    with pytest.raises(configs.ConfigError, match=r"t\.gin.*layer 1 .*no layer below has"):
        configs.from_text(
            text.replace("kv_from = 'pair'", "kv_from = 'bear'").replace(
                "Attention.share", "global/Attention.share"
            ),
            filename="t.gin",
        ).build(HybridLMConfig)


@pytest.mark.parametrize(
    ("pattern", "sharing", "reading", "message"),
    [
        (
            "reuse/attention, attention",
            {},
            {},
            r"HybridLM.pattern, layer 0 \('reuse/attention'\): Attention.kv_from = 'kv': no layer "
            "below has share_kv_as = 'kv'",
        ),
        (None, {"share_kv_as": None}, {}, "layer 1 .* no layer below has share_kv_as = 'kv'"),
        (None, {"kv_heads": 4}, {}, "heads must be a multiple of .* kv_heads = 4, got 6"),
        (None, {}, {"kv_heads": 3}, "kv_heads must be that of the sharing layer below, 2, got 3"),
        (None, {}, {"head_width": 8}, "head_width must be that of the sharing layer below, 6"),
        (None, {}, {"rotary_base": 5.0}, "rotary_base must be that of the sharing layer below"),
        (None, {}, {"rotary_scaling": LinearScaling(2.0)}, "rotary_scaling must be that of"),
        (None, {}, {"window": None}, "window must be at most the sharing layer's = 6, got None"),
        (None, {}, {"prefix": 2}, "prefix must be at most the sharing layer's = 0, got 2"),
        (None, {}, {"value_width": 8}, "value_width must be that of the sharing layer below, 6"),
        (None, {}, {"key_multiplier": 0.5}, "key_multiplier must be that of the sharing layer"),
        (
            "attention, other/attention",
            {},
            {},
            r"layer 1 \('other/attention'\): .*share_kv_as: window must be .* 6, got 9",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(pattern, sharing, reading, message):
    pattern = pattern or "attention, reuse/attention"
    mixers = {
        "attention": dataclasses.replace(SHARING, **sharing),
        "reuse/attention": dataclasses.replace(READING, **reading),
        "other/attention": dataclasses.replace(SHARING, window=9),
    }
    used = {name: mixer for name, mixer in mixers.items() if name in pattern.split(", ")}
    with pytest.raises(ValueError, match=message):
        HybridLMConfig(pattern=pattern, layers=2, mixers=used)
