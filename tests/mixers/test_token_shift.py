# SPDX-License-Identifier: Apache-2.0
"""The token shift against each document's own shift, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix.mixers import token_shift
from tests.mixers.dense import short_convolution as dense

TAPS = np.stack([np.ones(3), np.zeros(3)])
IDS = np.array([[0, 1, 1, 0, 1, 2, 0, 0, 2, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4, 0]], np.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_rows_with_a_state(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 10, 3), dtype)
    state = jax.random.normal(jax.random.key(1), (2, 1, 3), dtype)
    y, final = token_shift(x, initial_state=state, segment_ids=jnp.asarray(IDS))
    expected, last = dense(*(np.asarray(a, np.float64) for a in (x, TAPS, 0, state)), IDS)
    assert y.dtype == final.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y, np.float64), expected)
    np.testing.assert_array_equal(np.asarray(final, np.float64), last)


def test_one_document_token_by_token_and_its_gradient():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3))
    y, _ = token_shift(x)
    np.testing.assert_array_equal(y[:, 1:], x[:, :-1])
    assert not np.any(y[:, 0])
    state = None
    for t in range(5):
        step, state = token_shift(x[:, t : t + 1], initial_state=state)
        np.testing.assert_array_equal(step, y[:, t : t + 1])
    weights = jnp.arange(30.0).reshape(x.shape)
    gradient = jax.grad(lambda x: jnp.sum(weights * token_shift(x)[0]))(x)
    np.testing.assert_array_equal(gradient[:, :-1], weights[:, 1:])
    assert not np.any(gradient[:, -1])


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (jnp.zeros((2, 3)), {}, "x must have shape"),
        (jnp.zeros((2, 0, 3)), {}, "x must have T >= 1"),
        (jnp.zeros((2, 4, 3)), {"initial_state": jnp.zeros((2, 2, 3))}, "initial_state must have"),
        (jnp.zeros((2, 4, 3)), {"segment_ids": jnp.zeros((2, 3), int)}, "segment_ids must have"),
    ],
)
def test_bad_arguments_name_themselves(x, options, message):
    with pytest.raises(ValueError, match=f"token_shift: {message}"):
        token_shift(x, **options)
