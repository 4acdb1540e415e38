# SPDX-License-Identifier: Apache-2.0
"""NSA against a token-by-token float64 derivation, its masked form and its own decode step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from seqmix import mixers
from seqmix.mixers._compression import compress
from seqmix.mixers._nsa_branches import Sizes
from tests.mixers import dense_routed
from tests.mixers.parity import (
    BFLOAT16_BAR,
    FLOAT32_BAR,
    assert_within,
    leaves,
    quick_jit,
    relative_error,
)
from tests.mixers.sparse import cost, packed_segments, sparing

TIME, KEY, VALUE, UNITS = 45, 8, 6, 5
OPTIONS = {
    "compression_block": 4,
    "stride": 2,
    "block_size": 6,
    "selected_blocks": 4,
    "initial_blocks": 1,
    "local_blocks": 2,
    "window": 7,
}
# flash-linear-attention's: windows, strides and blocks are one.
MEAN = {**OPTIONS, "compression_block": 4, "stride": 4, "block_size": 4}


def draw(heads=4, groups=2, seed=0, time=TIME, mlp=True):
    """Arguments by name; the compression's are None without an MLP."""
    rng = np.random.default_rng(seed)

    def array(*shape, scale=1.0):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    def compression(width, size=OPTIONS["compression_block"]):
        return mixers.NSACompression(
            array(groups, size, width),
            array(groups, size * width, UNITS, scale=0.3),
            array(groups, UNITS),
            array(groups, UNITS, width, scale=0.5),
        )

    return {
        "q": array(2, time, heads, KEY),
        "k": mixers.NSABranches(*(array(2, time, groups, KEY) for _ in range(3))),
        "v": mixers.NSABranches(*(array(2, time, groups, VALUE) for _ in range(3))),
        "gates": 1 / (1 + np.exp(-array(2, time, heads, 3))),
        "compress_keys": compression(KEY) if mlp else None,
        "compress_values": compression(VALUE) if mlp else None,
    }


def attend(arguments, segment_ids=None, state=None, options=OPTIONS, **more):
    return mixers.nsa_attention(
        **arguments, segment_ids=segment_ids, initial_state=state, **options, **more
    )


@functools.partial(quick_jit, static_argnames="capacity")
def run(arguments, segment_ids=None, state=None, capacity=None):
    return attend(arguments, segment_ids, state, capacity=capacity)


def empty_state():
    sizes = {n: OPTIONS[n] for n in ("compression_block", "stride", "window")}
    return mixers.init_nsa_state(2, TIME, 2, KEY, VALUE, jnp.float32, **sizes)


def rows(arguments, segments, options=OPTIONS):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
    mlps = (wide.pop("compress_keys"), wide.pop("compress_values"))
    return dense_routed.nsa_attention(**wide, mlps=mlps, segment_ids=segments, **options)


def evaluate(arguments, segments, weights, impl, options):
    def function(arguments, segments, weights):
        def out_of(arguments):
            return attend(arguments, segments, impl=impl, options=options)[0]

        out, pull = jax.vjp(out_of, arguments)
        return {"out": out} | leaves("d", pull(weights.astype(out.dtype))[0])

    return jax.tree.map(np.asarray, quick_jit(function)(arguments, segments, weights))


CASES = [
    ("long", "mlp", 4, 2),
    ("packed", "mean", 4, 2),
    ("whole", "mlp", 3, 3),
    ("packed", "mlp", 4, 1),
]


@pytest.mark.parametrize(("packing", "kind", "heads", "groups"), sparing(CASES, CASES[:1]))
def test_against_rows_and_the_masked_form(packing, kind, heads, groups):
    arguments, segments = draw(heads, groups, mlp=kind == "mlp"), packed_segments(packing)
    options = OPTIONS if kind == "mlp" else MEAN
    weights = np.random.default_rng(9).normal(size=(2, TIME, heads, VALUE))
    got = evaluate(arguments, segments, weights, "sparse", options)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), arguments)
        want = evaluate(wide, segments, weights, "dense", options)
    assert relative_error(want["out"], rows(arguments, segments, options)) < 1e-12
    assert_within(got, want, FLOAT32_BAR)
    assert all(np.any(x) for x in want.values())


@pytest.mark.parametrize(
    "time", [1, *(pytest.param(time, marks=pytest.mark.slow) for time in (3, 4)), 11]
)
def test_rows_about_as_long_as_a_window_or_a_block(time):
    arguments = draw(time=time)
    out, _ = run(arguments)
    assert relative_error(out, rows(arguments, None)) < FLOAT32_BAR


@pytest.mark.parametrize(
    ("dtype", "bar"), [(jnp.float64, 1e-15), (jnp.float32, 2e-7), (jnp.bfloat16, 2e-3)]
)
def test_means_of_windows_are_as_exact_as_their_dtype(dtype, bar):
    """A third is no number of any of them: it is not rounded before it multiplies."""
    with jax.enable_x64(True):
        tokens = jnp.asarray(np.random.default_rng(0).normal(size=(2, 40, 1, 2, 3)), dtype)
        got = compress(tokens, 3, None)[:, :38]
        assert got.dtype == dtype
        wide = np.asarray(tokens, np.float64)[:, :, 0]
        want = (wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]) / 3
        assert relative_error(got, want) < bar


def test_no_window_yet_gives_zero_and_no_nan():
    arguments = draw(time=5)
    arguments["gates"] = arguments["gates"] * np.array([1, 0, 0], np.float32)
    weights = np.ones((2, 5, 4, VALUE))
    got = evaluate(arguments, None, weights, "sparse", OPTIONS)
    assert not np.any(got["out"][:, :3]) and np.all(got["out"][:, 3:])
    assert all(np.all(np.isfinite(x)) for x in got.values())


def test_overlaps_of_windows_and_blocks():
    paper = Sizes(32, 16, 64, 16, 1, 2, 512, 1.0)
    assert paper.overlaps() == [1, 2, 2, 2, 1]
    assert paper._replace(compression_block=64, stride=64).overlaps() == [1]
    assert paper._replace(compression_block=16).overlaps() == [1, 1, 1, 1]


@pytest.mark.slow
def test_equal_importance_goes_to_the_earlier_block():
    arguments = draw(mlp=False)
    alike = np.broadcast_to(arguments["k"].compressed[:, :1], arguments["k"].compressed.shape)
    arguments["k"] = arguments["k"]._replace(compressed=alike)
    outs = [
        quick_jit(lambda a, impl=impl: attend(a, impl=impl, options=MEAN)[0])(arguments)
        for impl in ("sparse", "dense")
    ]
    want = rows(arguments, None, MEAN)
    assert all(relative_error(out, want) < FLOAT32_BAR for out in outs)


@pytest.mark.parametrize(
    ("cuts", "grows"),
    [
        pytest.param((0, 2, 9, 10, 30, 45), True, marks=pytest.mark.slow),
        ((0, 15, 30, 45), False),
    ],
)
def test_pieces_through_the_cache_equal_one_pass(cuts, grows):
    arguments = draw()
    mlps = {n: arguments.pop(n) for n in ("compress_keys", "compress_values")}
    segments = np.array(packed_segments("packed"))
    for cut in cuts[1:-1]:  # the cache belongs to the document that goes on
        segments[:, cut] = np.where(segments[:, cut - 1] > 0, segments[:, cut - 1], 1)
        segments[:, cut - 1] = segments[:, cut]
    whole, final = run(arguments | mlps, segments)
    state, outs = None if grows else empty_state(), []
    for start, stop in itertools.pairwise(cuts):
        piece = jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], arguments)
        out, state = run(piece | mlps, segments[:, start:stop], state, None if grows else TIME)
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    for cache, other in zip(state, final, strict=True):
        np.testing.assert_array_equal(cache.length, other.length)


def test_decode_equals_the_full_pass():
    arguments = draw()
    whole, _ = run(arguments)
    mlps = {n: arguments.pop(n) for n in ("compress_keys", "compress_values")}
    empty = empty_state()

    @quick_jit
    def decode(arguments, state, segment_ids):
        def step(state, token):
            ids, token = token
            token = jax.tree.map(lambda x: x[:, None], token)
            out, state = attend(token | mlps, ids[:, None], state, capacity=TIME)
            return state, out[:, 0]

        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (segment_ids, arguments))
        state, outs = jax.lax.scan(step, state, tokens)
        return outs.swapaxes(0, 1), state

    outs, state = decode(arguments, empty, np.ones((2, TIME), np.int32))
    assert relative_error(outs, whole) < FLOAT32_BAR
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, empty)
    out, after = decode(arguments, state, np.zeros((2, TIME), np.int32))
    assert not np.any(out)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    out, _ = decode(arguments, state, np.ones((2, TIME), np.int32))
    assert bool(jnp.all(jnp.isnan(out)))  # the cache is full


def test_nan_in_padding_and_other_documents_are_inert():
    arguments, segments = draw(), np.array(packed_segments("long"))
    mlps = {n: arguments.pop(n) for n in ("compress_keys", "compress_values")}
    out, _ = run(arguments | mlps, segments)
    last = segments == segments.max(axis=1, keepdims=True)
    poison = np.where(segments == 0, np.nan, np.where(last, 0, 7)).astype(np.float32)
    changed = jax.tree.map(
        lambda x: np.where(last[..., None, None], x, poison[..., None, None]), arguments
    )
    out2, _ = run(changed | mlps, segments)
    np.testing.assert_array_equal(out[last], out2[last])
    assert not np.any(np.asarray(out2)[segments == 0])


def test_bfloat16_and_annotations():
    arguments = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), draw(mlp=False))
    typed = jaxtyped(mixers.nsa_attention, typechecker=beartype)
    out, state = quick_jit(lambda a: typed(**a, **OPTIONS))(arguments)
    assert out.dtype == state.selected.key.dtype == jnp.bfloat16
    assert relative_error(out, rows(arguments, None)) < BFLOAT16_BAR


@pytest.mark.slow
def test_cost_grows_with_the_tokens():
    def of(time):
        shape = lambda *s: jax.ShapeDtypeStruct((1, time, *s), jnp.float32)  # noqa: E731
        q, gates = shape(4, 16), shape(4, 3)
        k = v = mixers.NSABranches(*[shape(1, 16)] * 3)
        loss = lambda *a: jnp.sum(jnp.sin(mixers.nsa_attention(*a)[0]))  # noqa: E731
        return cost(jax.grad(loss, argnums=(0, 1, 2, 3)), q, k, v, gates)

    (flops, memory), (flops2, memory2) = of(8192), of(16384)
    # Every sixteenth token is a window to every later token: the method's own square.
    windows = 9 * 2 * 4 * 2 * 16 * 8192**2 // 16
    assert flops2 - 4 * windows < 2.3 * (flops - windows)
    assert memory2 < 2.2 * memory


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block_size": 5}, "block_size must be a multiple of stride = 2, got 5"),
        ({"compression_block": 5}, "compression_block must be .* a multiple of stride = 2, got 5"),
        ({"compression_block": 1, "stride": 1}, "compression_block must be >= 2"),
        ({"selected_blocks": 2}, r"selected_blocks must be >= initial_blocks \+ .* = 3, got 2"),
        ({"selected_blocks": 0}, "selected_blocks must be an integer >= 1"),
        ({"initial_blocks": -1}, "initial_blocks must be an integer >= 0, got -1"),
        ({"stride": None}, "stride must be an integer >= 1, got None"),
        ({"k": (1, 2)}, "k must be an NSABranches of three arrays, got tuple"),
        ({"compress_keys": 1}, "compress_keys must be an NSACompression or None, got int"),
        ({"local_blocks": 0}, "local_blocks must be an integer >= 1"),
        ({"window": 0}, "window must be an integer >= 1, got 0"),
        ({"capacity": 0}, "capacity must be an integer >= 1"),
        ({"impl": "pallas"}, "impl='pallas' cannot run"),
        ({"segment_ids": np.ones((2, 3), np.int32)}, "segment_ids must have shape"),
        ({"gates": np.ones((2, TIME, 4, 2), np.float32)}, r"gates must have shape \[B, T, Hq, 3\]"),
        ({"compression_block": 6}, r"compress_keys.position must have shape .*= \[2, 6, 8\]"),
        (
            {"v": mixers.NSABranches(*[np.ones((2, TIME, 4, 6), np.float32)] * 3)},
            "k.compressed and v.compressed must have equally many heads|heads must be equal",
        ),
        (
            {
                "initial_state": mixers.init_nsa_state(
                    2, 9, 2, KEY, VALUE, jnp.float32, compression_block=4, stride=2, window=3
                )
            },
            "initial_state.window must have 7 slots for 9 tokens, got 3",
        ),
    ],
)
def test_bad_arguments(change, match):
    with pytest.raises(ValueError, match=f"nsa_attention: .*({match})"):
        mixers.nsa_attention(**(draw() | OPTIONS | change))
