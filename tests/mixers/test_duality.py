# SPDX-License-Identifier: Apache-2.0
"""The scalar-decay family as a scan, chunk by chunk, and as masked attention: the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments, draw_state
from tests.mixers.parity import (
    EXTREME_BAR,
    FLOAT32_BAR,
    assert_within,
    draw_cotangents,
    evaluate,
    reference,
    relative_error,
)

FAMILY = ["simple_gla", "ssd", "retention", "linear_attention", "second_order_attention", "mamba3"]


@pytest.mark.parametrize("name", FAMILY)
def test_four_forms_one_function(name):
    """Packed rows with states; outputs, final states and every gradient."""
    mixer, shape = MIXERS[name], Shape(batch=1, time=40, heads=(1, 1, 2), key=3, value=4)
    arrays, state, segments = draw(mixer, shape), draw_state(mixer, shape), draw_segments(shape)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents)
    for impl in ("recurrent", "associative", "chunked", "quadratic"):
        options = {} if impl in ("recurrent", "quadratic") else {"chunk_size": 16}
        got = evaluate(mixer, impl, arrays, state, segments, cotangents, jnp.float32, **options)
        assert_within(got, want, FLOAT32_BAR)


def test_masked_attention_with_extreme_decays():
    mixer, shape = MIXERS["simple_gla"], Shape(time=50)
    arrays, state = draw(mixer, shape, extreme=True), draw_state(mixer, shape)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, draw_segments(shape), cotangents)
    got = evaluate(mixer, "quadratic", arrays, state, draw_segments(shape), cotangents, jnp.float32)
    assert_within(got, want, EXTREME_BAR)


@pytest.mark.parametrize("packed", [False, True])
def test_out_is_the_mask_times_the_products_times_the_values(packed):
    mixer, shape = MIXERS["simple_gla"], Shape(time=40)
    arrays = {n: jnp.asarray(a, jnp.float32) for n, a in draw(mixer, shape).items()}
    segments = jnp.asarray(draw_segments(shape)) if packed else None
    mask = mixers.structured_mask(arrays["log_decay"], segment_ids=segments)
    products = jnp.einsum("bihk,bjhk->bhij", arrays["q"], arrays["k"], precision="highest")
    mixed = jnp.einsum("bhij,bjhv->bihv", mask * products, arrays["v"], precision="highest")
    out, _ = mixer(arrays, segment_ids=segments, scale=1.0)
    assert relative_error(mixed, out) < FLOAT32_BAR


def test_mask_is_its_definition():
    rng = np.random.default_rng(0)
    gate = -np.exp(rng.normal(size=(1, 9, 1)))
    gate[0, 4] = -np.inf
    ids = np.array([[1, 1, 0, 1, 1, 1, 2, 2, 0]])
    mask = np.asarray(
        mixers.structured_mask(jnp.asarray(gate, jnp.float32), segment_ids=jnp.asarray(ids))
    )[0, 0]
    for i in range(9):
        for j in range(9):
            real = [t for t in range(j + 1, i + 1) if ids[0, t]]
            seen = j <= i and ids[0, i] == ids[0, j] != 0
            want = np.exp(gate[0, real, 0].sum()) if seen else 0
            np.testing.assert_allclose(mask[i, j], want, rtol=1e-6)


def test_every_block_off_the_diagonal_is_of_rank_n():
    """C B^T under the mask of a Mamba-2 head, N = 3: what crosses any cut fits into N numbers."""
    shape, size = Shape(batch=1, time=24, heads=(1, 1, 1), key=3), 3
    arrays = draw(MIXERS["ssd"], shape)
    decay = jnp.asarray(arrays["dt"] * arrays["A"], jnp.float32)
    mask = np.asarray(mixers.structured_mask(decay), np.float64)[0, 0]
    matrix = mask * (arrays["C"][0, :, 0] @ arrays["B"][0, :, 0].T)
    assert np.linalg.matrix_rank(matrix) == shape.time
    for cut in range(1, shape.time):
        for block, most in ((mask, 1), (matrix, size)):
            values = np.linalg.svd(block[cut:, :cut], compute_uv=False)
            assert np.all(values[most:] < 1e-6 * values[0]), cut
    full = np.linalg.svd(matrix[12:, :12], compute_uv=False)
    assert full[size - 1] > 1e-6 * full[0]


def test_mask_refuses_what_it_cannot_read():
    with pytest.raises(ValueError, match=r"structured_mask: log_decay must have shape \[B, T, H\]"):
        mixers.structured_mask(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="structured_mask: log_decay must be float32"):
        mixers.structured_mask(jnp.zeros((2, 3, 1), jnp.bfloat16))
