# SPDX-License-Identifier: Apache-2.0
"""Packed documents and padding through the whole hybrid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.models import Model, close, config, tree_close

TIME = 32
# Chunks hold 8 tokens: boundaries inside one and on an edge, and a document of one token.
ROWS = ((5, 11, 16), (8, 1, 23))


@pytest.fixture(scope="module")
def model():
    return Model(config())


def tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 61, (len(ROWS), TIME)), jnp.int32)


def packed_ids():
    return jnp.asarray([np.repeat([1, 2, 3], lengths) for lengths in ROWS], jnp.int32)


def documents():
    """(row, start, length) of every document."""
    return [
        (row, int(sum(lengths[:i])), length)
        for row, lengths in enumerate(ROWS)
        for i, length in enumerate(lengths)
    ]


def test_packed_equals_separate_outputs_and_gradients(model):
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, TIME)), jnp.float32)
    logits, gradient = model.gradient(model.parameters, tokens(), packed_ids(), weights)
    total = None
    # Two documents at a time, so that the compiled function is the same.
    pairs = np.array(documents()).reshape(-1, 2, 3)
    for pair in pairs:
        alone, ids, weight = (np.zeros((2, TIME), x) for x in (np.int32, np.int32, np.float32))
        for i, (row, start, length) in enumerate(pair):
            alone[i, :length] = tokens()[row, start : start + length]
            ids[i, :length] = 1
            weight[i, :length] = weights[row, start : start + length]
        separate, part = model.gradient(
            model.parameters, jnp.asarray(alone), jnp.asarray(ids), jnp.asarray(weight)
        )
        for i, (row, start, length) in enumerate(pair):
            close(logits[row, start : start + length], separate[i, :length])
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    tree_close(gradient, total)


def test_a_document_alone_without_segment_ids(model):
    packed = model.logits(model.parameters, tokens(), packed_ids())
    row, start, length = documents()[1]
    alone = model.logits(model.parameters, tokens()[row : row + 1, start : start + length])
    close(packed[row, start : start + length], alone[0])


def test_changing_a_document_leaves_the_others_bitwise(model):
    ids = packed_ids()
    before = model.logits(model.parameters, tokens(), ids)
    for changed in (1, 2, 3):
        after = model.logits(model.parameters, jnp.where(ids == changed, tokens(9), tokens()), ids)
        np.testing.assert_array_equal(before[ids != changed], after[ids != changed])
        assert (before[ids == changed] != after[ids == changed]).any()


def test_the_future_does_not_reach_the_past(model):
    ids = jnp.ones((2, TIME), jnp.int32)
    before = model.logits(model.parameters, tokens(), ids)
    after = model.logits(model.parameters, tokens().at[:, 19:].set(tokens(3)[:, 19:]), ids)
    close(before[:, :19], after[:, :19])
    assert jnp.abs(before[:, 19:] - after[:, 19:]).max() > 0.1


def test_padding_changes_nothing_wherever_it_stands(model):
    length = 13
    full = model.logits(model.parameters, tokens(), jnp.ones((2, TIME), jnp.int32))[:, :length]
    for where in (slice(0, length), slice(TIME - length, TIME), slice(3, 3 + 2 * length, 2)):
        # At padding any id will do, even one outside the vocabulary.
        padded = jnp.full((2, TIME), -1).at[:, where].set(tokens()[:, :length])
        ids = jnp.zeros((2, TIME), jnp.int32).at[:, where].set(1)
        logits = model.logits(model.parameters, padded, ids)
        close(logits[:, where], full)
        assert jnp.isfinite(logits).all()


def test_an_id_outside_the_vocabulary_gives_nan(model):
    ids = jnp.ones((2, TIME), jnp.int32)
    for bad in (-1, 61):
        logits = model.logits(model.parameters, tokens().at[0, 20].set(bad), ids)
        assert jnp.isnan(logits[0, 20:]).all()
        assert jnp.isfinite(logits[1]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((jnp.zeros(4, jnp.int32),), r"tokens must have \[B, T\], got \[4\]"),
        ((jnp.zeros((1, 4)),), "tokens must be integers, got float32"),
        ((jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 5), jnp.int32)), "segment_ids must have the"),
        ((jnp.zeros((1, 4), jnp.int32), None, jnp.ones((1, 4))), "positions must be integers"),
    ],
)
def test_bad_inputs_raise(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model()(*arguments)
