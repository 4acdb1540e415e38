# SPDX-License-Identifier: Apache-2.0
"""Every form of every recurrent mixer against the float64 recurrence: outputs, state, gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.mixers.cases import (
    ALL_FORMS,
    FORMS,
    MIXERS,
    Shape,
    brief,
    draw,
    draw_segments,
    draw_state,
    slow,
    sparing,
)
from tests.mixers.parity import (
    BFLOAT16_BAR,
    EXTREME_BAR,
    FLOAT32_BAR,
    assert_within,
    draw_cotangents,
    evaluate,
    leaves,
    reference,
    relative_error,
)

GATED_FORMS = [(name, impl) for name, impl in ALL_FORMS if MIXERS[name].gate is not None]


def check(
    name,
    impl,
    shape,
    *,
    packed=True,
    with_state=True,
    extreme=False,
    dtype=jnp.float32,
    bar=FLOAT32_BAR,
    **options,
):
    mixer = MIXERS[name]
    arrays = draw(mixer, shape, extreme=extreme)
    if dtype == jnp.bfloat16:  # the reference reads what the bfloat16 form reads
        arrays = {
            n: np.asarray(jnp.asarray(a, "float32" if n in mixer.float32 else dtype), np.float64)
            for n, a in arrays.items()
        }
    state = draw_state(mixer, shape) if with_state else None
    segments = draw_segments(shape) if packed else None
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents, **options)
    got = evaluate(mixer, impl, arrays, state, segments, cotangents, dtype, **options)
    assert_within(got, want, bar)


@pytest.mark.parametrize(
    ("name", "grouping"), [(name, i) for name, m in MIXERS.items() for i in range(len(m.groupings))]
)
def test_definition_agrees_with_the_dense_matrix_form(name, grouping):
    mixer = MIXERS[name]
    shape = Shape(time=23, heads=mixer.groupings[grouping], key=3, value=4)
    arrays, state = draw(mixer, shape), draw_state(mixer, shape)
    segments = None if grouping == 1 else draw_segments(shape)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    got = reference(mixer, arrays, state, segments, cotangents)
    out, final = mixer.dense(arrays, state, segments)
    assert relative_error(got["out"], out) < 1e-13
    for leaf, value in leaves("state", final).items():
        assert relative_error(got[leaf], value) < 1e-13, leaf


@pytest.mark.parametrize(("name", "impl"), sparing(ALL_FORMS))
def test_packed_rows_with_states(name, impl):
    check(name, impl, Shape(time=100))


@pytest.mark.parametrize(("name", "impl"), brief(FORMS))
def test_single_documents_without_a_state(name, impl):
    check(name, impl, Shape(time=65), packed=False, with_state=False)


@pytest.mark.parametrize(
    ("name", "impl", "grouping"),
    brief(
        [
            (name, impl, i)
            for name, impl in ALL_FORMS
            for i in range(1, len(MIXERS[name].groupings))
        ],
        kernels=True,
    ),
)
def test_grouped_heads(name, impl, grouping):
    check(name, impl, Shape(time=63, heads=MIXERS[name].groupings[grouping]))


@pytest.mark.parametrize(("name", "impl"), sparing(FORMS))
@pytest.mark.parametrize("time", [1, *slow(2, 3, 4, 5, 6, 7, 8)])
def test_shortest_rows(name, impl, time):
    check(name, impl, Shape(batch=1, time=time, key=4, value=4))


@pytest.mark.parametrize(("name", "impl"), brief(FORMS))
@pytest.mark.parametrize("time", [128, *slow(64)])
def test_rows_on_the_chunk_grid(name, impl, time):
    check(name, impl, Shape(batch=1, time=time), packed=time == 128)


@pytest.mark.parametrize(("name", "impl"), brief(FORMS))
def test_many_blocks(name, impl):
    """More than one block of chunks, and a block count that does not divide the chunks."""
    check(name, impl, Shape(batch=1, time=1100, heads=(1, 1, 1), key=4, value=4))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "impl"), FORMS)
def test_a_thousand_tokens(name, impl):
    check(name, impl, Shape(batch=1, time=1000, heads=(1, 1, 1), key=8, value=8))


@pytest.mark.parametrize(("name", "impl"), brief(ALL_FORMS, kernels=True))
def test_bfloat16(name, impl):
    shape = Shape(time=128, key=32, value=32)
    check(name, impl, shape, dtype=jnp.bfloat16, bar=BFLOAT16_BAR)


@pytest.mark.parametrize(("name", "impl"), sparing(GATED_FORMS))
@pytest.mark.parametrize("packed", [True, *slow(False)])
def test_decays_from_zero_to_minus_ten_thousand_in_one_chunk(name, impl, packed):
    check(name, impl, Shape(time=100), packed=packed, extreme=True, bar=EXTREME_BAR)


@pytest.mark.parametrize(("name", "impl"), brief([f for f in FORMS if MIXERS[f[0]].scales]))
@pytest.mark.parametrize("scale", [0.3, *slow(1.0)])
def test_scales(name, impl, scale):
    check(name, impl, Shape(batch=1, time=20), scale=scale)


@pytest.mark.parametrize(("name", "impl"), brief(FORMS))
@pytest.mark.parametrize("chunk_size", [24, *slow(1, 16, 128)])
def test_every_chunk_size(name, impl, chunk_size):
    check(name, impl, Shape(batch=1, time=100), chunk_size=chunk_size)


@pytest.mark.parametrize(("name", "impl"), brief(FORMS))
def test_head_width_100_packed(name, impl):
    check(name, impl, Shape(batch=1, time=70, heads=(1, 1, 1), key=100, value=100))
