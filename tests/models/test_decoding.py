# SPDX-License-Identifier: Apache-2.0
"""Prefill and decoding through the cache against the full pass."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.models import Model, close, config, rms_ratio, tree_close

TIME, CAPACITY = 24, 32
ONES = jnp.ones((2, TIME), jnp.int32)


@pytest.fixture(scope="module")
def model():
    return Model(config(layers=6))  # one scanned period and a remainder


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, TIME)), jnp.int32)


@pytest.fixture(scope="module")
def full(model, tokens):
    return model.logits(model.parameters, tokens)


def test_decoding_is_the_full_pass_past_the_window_too(model, tokens, full):
    assert 4 * model.config.mixers["local/attention"].window < TIME
    logits, positions, cache = model.decode(
        model.parameters, tokens, model().init_cache(2, CAPACITY)
    )
    close(logits, full)
    np.testing.assert_array_equal(positions, np.arange(1, TIME + 1)[None].repeat(2, 0))
    prefilled = model.prefill(model.parameters, tokens, ONES, model().init_cache(2, CAPACITY))
    close(prefilled[0], full)
    tree_close(cache, prefilled[1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_different_lengths_prefill_in_one_call(model, tokens, full, side):
    lengths = (9, 17)
    prompt, ids = np.zeros((2, TIME), np.int32), np.zeros((2, TIME), np.int32)
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(TIME - length, TIME)
        prompt[row, where], ids[row, where] = tokens[row, :length], 1
    empty = model().init_cache(2, CAPACITY)
    logits, cache = model.prefill(model.parameters, jnp.asarray(prompt), jnp.asarray(ids), empty)
    np.testing.assert_array_equal(cache.position, lengths)
    for row, length in enumerate(lengths):
        close(logits[row][ids[row] == 1], full[row, :length])
    rest = jnp.stack([tokens[row, length : length + 7] for row, length in enumerate(lengths)])
    logits, positions, _ = model.decode(model.parameters, rest, cache)
    for row, length in enumerate(lengths):
        close(logits[row], full[row, length : length + 7])
        assert positions[row, -1] == length + 7


def test_prefill_in_pieces_is_one_pass(model, tokens, full):
    cache, pieces = model().init_cache(2, CAPACITY), []
    for start, stop in ((0, 5), (5, 6), (6, 18), (18, TIME)):
        piece = jnp.zeros_like(tokens).at[:, : stop - start].set(tokens[:, start:stop])
        ids = (jnp.arange(TIME) < stop - start).astype(jnp.int32)[None].repeat(2, 0)
        logits, cache = model.prefill(model.parameters, piece, ids, cache)
        np.testing.assert_array_equal(cache.position, stop)
        pieces.append(logits[:, : stop - start])
    close(jnp.concatenate(pieces, axis=1), full)


def test_a_new_document_in_the_prefill_is_what_decoding_continues(model, tokens, full):
    # Row: document 1 of 10 tokens, then the whole of document 2.
    ids = jnp.repeat(jnp.asarray([1, 2]), jnp.asarray([10, 14]), total_repeat_length=TIME)
    row = jnp.concatenate([tokens[::-1, :10], tokens[:, :14]], axis=1)
    empty = model().init_cache(2, CAPACITY)
    _, cache = model.prefill(model.parameters, row, ids[None].repeat(2, 0), empty)
    np.testing.assert_array_equal(cache.position, 14)
    logits, _, _ = model.decode(model.parameters, tokens[:, 14:21], cache)
    close(logits, full[:, 14:21])


def test_more_tokens_than_the_cache_holds_are_nan_not_wrong(model, tokens):
    logits, _, _ = model.decode(model.parameters, tokens, model().init_cache(2, 10))
    assert jnp.isfinite(logits[:, :10]).all() and jnp.isnan(logits[:, 10:]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_512_steps_do_not_drift(dtype):
    model = Model(config("gated_delta_net, mamba2, local/attention", layers=3, dtype=dtype))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 512)), jnp.int32)
    full = model.logits(model.parameters, tokens)
    logits, _, _ = model.decode(model.parameters, tokens, model().init_cache(1, 512))
    if dtype == "float32":
        close(logits, full, 1e-4)
    else:
        first, second = rms_ratio(logits[:, :256], full[:, :256]), rms_ratio(logits, full)
        assert first < 0.05 and second < 1.5 * first
