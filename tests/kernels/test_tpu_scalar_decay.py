# SPDX-License-Identifier: Apache-2.0
"""What the shared suite does not ask of the scalar-decay TPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix_kernels.options import Heads, Options
from seqmix_kernels.tpu import _common as common
from seqmix_kernels.tpu import scalar_decay
from seqmix_kernels.tpu.scalar_decay_plan import make_plan
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments, draw_state, slow
from tests.mixers.parity import (
    FLOAT32_BAR,
    assert_within,
    draw_cotangents,
    evaluate,
    reference,
    relative_error,
)


def described(heads, key, value, time=4096, dtype=jnp.bfloat16, **options):
    """Options and arrays' shapes of a call."""
    sizes = [(heads.keys * heads.queries, key), (heads.keys, key), (heads.states, value)]
    arrays = [jax.ShapeDtypeStruct((1, time, *size), dtype) for size in sizes]
    arrays.append(jax.ShapeDtypeStruct((1, time, heads.states), jnp.float32))
    return Options(heads, 1.0, jnp.dtype(dtype), **options), tuple(arrays)


def check(name, shape, *, form="pallas@tpu", **options):
    mixer = MIXERS[name]
    arrays, state, segments = draw(mixer, shape), draw_state(mixer, shape), draw_segments(shape)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents, **options)
    got = evaluate(mixer, form, arrays, state, segments, cotangents, jnp.float32, **options)
    assert_within(got, want, FLOAT32_BAR)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=1, time=70, heads=(1, 1, 8), key=8, value=64),
        *slow(
            Shape(batch=2, time=70, heads=(4, 2, 2)),
            Shape(batch=1, time=150, heads=(2, 2, 2)),
        ),
    ],
    ids=str,
)
def test_no_races(shape):
    """Two blocks of chunks, one ragged; the tiles of one key head after each other."""
    check("simple_gla", shape, form="pallas@tpu:races", chunk_size=16)


def plan_of(heads, key, value):
    queries, keys, values = heads
    grouping = Heads(keys, max(values // keys, 1), max(queries // max(keys, values), 1))
    return make_plan(*described(grouping, key, value, time=40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "key", "value"), [((20, 20, 20), 12, 12), ((16, 2, 2), 16, 64)], ids=str
)
def test_uneven_heads(heads, key, value):
    """Heads that no lanes divide, which are padded; more queries of a state than fill a tile."""
    check("simple_gla", Shape(batch=1, time=40, heads=heads, key=key, value=value), chunk_size=16)


@pytest.mark.parametrize(
    ("heads", "key", "value", "tile"),
    [
        ((1, 1, 8), 8, 64, (1, 4, 8, 64)),
        ((1, 1, 80), 128, 64, (1, 4, 128, 64)),
        ((20, 20, 20), 12, 12, (4, 1, 128, 128)),
        ((16, 2, 2), 16, 64, (2, 1, 16, 64)),
        ((16, 16, 16), 128, 128, (4, 1, 128, 128)),
        ((16, 16, 16), 256, 512, (1, 1, 256, 512)),
    ],
)
def test_tiles_of_heads(heads, key, value, tile):
    plan = plan_of(heads, key, value)
    assert (plan.tile_keys, plan.tile_values, plan.key, plan.value) == tile


@pytest.mark.parametrize("keys", [1, 8, 16])
@pytest.mark.parametrize(("key", "value"), [(64, 64), (128, 64), (128, 128), (256, 256), (100, 72)])
@pytest.mark.parametrize("values", [1, 8])
def test_blocks_lie_on_lanes_and_fit(keys, key, value, values):
    options, arrays = described(Heads(keys, values, 1), key, value)
    plan = make_plan(options, arrays)
    totals = {name: shape.shape[-1] for name, shape in plan.shapes(*arrays[:3]).items()}
    for name, width in plan.widths.items():
        assert width % common.LANES == 0 or width == totals[name]
    assert plan.vmem_bytes() <= common.VMEM_LIMIT
    assert plan.chunk % 16 == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float16}, "float16"),
        ({"key": 4096, "value": 4096}, "do not fit"),
    ],
)
def test_refusals_say_why(change, reason):
    call = {"heads": Heads(2, 1, 1), "key": 64, "value": 64} | change
    assert reason in scalar_decay.refusal(*described(**call))


@pytest.mark.parametrize(("count", "bar"), [(3, 1e-6), (2, 1e-4)])
def test_range_sums_lose_nothing_to_strong_decays(count, bar):
    """Ranges of small decays beside one of -1e5, which would take all digits of a running sum."""
    rng = np.random.default_rng(0)
    row = -np.exp(rng.normal(size=(1, 64)) - 3).astype(np.float32)
    row[0, 20], row[0, 40] = common.RESET, -1e4
    masks = common.lower_mask(64), common.later_ones(64)
    sums = np.asarray(common.range_sums(jnp.asarray(row), *masks, count), np.float64)
    cumulative = np.cumsum(row[0].astype(np.float64))
    want = np.tril(cumulative[:, None] - cumulative[None, :])
    within = np.exp(want) * np.tril(np.ones((64, 64)))
    got = np.exp(sums) * np.tril(np.ones((64, 64)))
    assert relative_error(got, within) < bar

    pairs = np.tril(rng.normal(size=(64, 64)), -1).astype(np.float32)
    straddling = common.straddling_sums(jnp.asarray(pairs), *masks, count)
    want = [pairs[t:, :t].astype(np.float64).sum() for t in range(64)]
    assert relative_error(straddling[0], want) < bar
