# SPDX-License-Identifier: Apache-2.0
"""What the contract promises beyond parity: states, documents, transformations, clear errors."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import PartitionSpec
from jaxtyping import jaxtyped

from seqmix import mixers
from tests.mixers.cases import (
    CORES,
    FORMS,
    MIXERS,
    Shape,
    brief,
    draw,
    draw_segments,
    draw_state,
    slow,
)
from tests.mixers.parity import FLOAT32_BAR, cast, quick_jit, relative_error, tree_error

# Transformations act on a form as a whole: one form of each core, the rest in the slow suite.
TRANSFORMED = [
    *((name, "chunked") for name in CORES),
    *(
        pytest.param(name, impl, marks=pytest.mark.slow)
        for name, impl in [*FORMS, *((name, "recurrent") for name in CORES)]
        if impl != "chunked" or name not in CORES
    ),
]


@functools.partial(quick_jit, static_argnames=("name", "impl"))
def run(arrays, state=None, segment_ids=None, *, name, impl="chunked"):
    return MIXERS[name](arrays, initial_state=state, segment_ids=segment_ids, impl=impl)


def float32_case(name, shape, **options):
    mixer = MIXERS[name]
    return cast(mixer, draw(mixer, shape, **options), jnp.float32)


def float32_state(name, shape):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), draw_state(MIXERS[name], shape))


def tree_sum(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))


def part(name, arrays, rows=slice(None), tokens=slice(None)):
    """Rows and tokens of every [B, T, ...] argument; per-head parameters stay whole."""
    return {n: a[rows, tokens] if MIXERS[name].per_token(n, a) else a for n, a in arrays.items()}


@pytest.mark.parametrize(("name", "impl"), TRANSFORMED)
def test_split_anywhere_carries_the_state(name, impl):
    shape = Shape(time=70)
    arrays = float32_case(name, shape)
    segments = jnp.asarray(draw_segments(shape))
    # The cut is where no document ends: the second part must continue the first part's document.
    cut = 37
    segments = segments.at[:, cut - 1 : cut + 1].set(segments[:, cut - 2 : cut - 1])
    whole, final = run(arrays, None, segments, name=name, impl=impl)
    first, state = run(
        part(name, arrays, tokens=slice(cut)), None, segments[:, :cut], name=name, impl=impl
    )
    second, end = run(
        part(name, arrays, tokens=slice(cut, None)), state, segments[:, cut:], name=name, impl=impl
    )
    assert relative_error(jnp.concatenate([first, second], axis=1), whole) < FLOAT32_BAR
    assert tree_error(end, final) < FLOAT32_BAR


@pytest.mark.parametrize("name", CORES)
def test_token_by_token_equals_one_pass(name):
    shape = Shape(batch=1, time=12)
    arrays = float32_case(name, shape)
    whole, final = run(arrays, name=name)
    state, outs = MIXERS[name].empty_state(shape), []
    for t in range(shape.time):
        out, state = run(part(name, arrays, tokens=slice(t, t + 1)), state, name=name, impl="auto")
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), whole) < FLOAT32_BAR
    assert tree_error(state, final) < FLOAT32_BAR


@pytest.mark.parametrize("name", brief(CORES))
@pytest.mark.parametrize("boundary", [50, *slow(64)])
def test_packed_documents_equal_separate_ones(name, boundary):
    """Boundary on a chunk's edge and inside a chunk; outputs and gradients, batch of two rows."""
    shape = Shape(time=100)
    arrays = float32_case(name, shape)
    segments = jnp.where(jnp.arange(100) < boundary, 3, 7) * jnp.ones((2, 1), jnp.int32)

    def loss(arrays, segments):
        out, state = MIXERS[name](arrays, segment_ids=segments, impl="chunked")
        return jnp.sum(jnp.sin(out)), (out, state)

    grad = quick_jit(jax.grad(loss, has_aux=True))
    packed, (out, state) = grad(arrays, segments)
    first, (out1, _) = grad(part(name, arrays, tokens=slice(boundary)), segments[:, :boundary])
    second, (out2, state2) = grad(
        part(name, arrays, tokens=slice(boundary, None)), segments[:, boundary:]
    )
    assert relative_error(out, jnp.concatenate([out1, out2], axis=1)) < FLOAT32_BAR
    assert tree_error(state, state2) < FLOAT32_BAR
    for n, g in packed.items():
        joined = (
            jnp.concatenate([first[n], second[n]], axis=1)
            if MIXERS[name].per_token(n, g)
            else first[n] + second[n]
        )
        assert relative_error(g, joined) < FLOAT32_BAR, n


@pytest.mark.parametrize(("name", "impl"), FORMS)
def test_other_documents_change_nothing_bitwise(name, impl):
    shape = Shape(time=100)
    arrays, other = (float32_case(name, shape, seed=s) for s in (0, 1))
    other = {n: a if MIXERS[name].per_token(n, a) else arrays[n] for n, a in other.items()}
    segments = jnp.where(jnp.arange(100) < 41, 1, 2) * jnp.ones((2, 1), jnp.int32)
    mixed = {
        n: a.at[:, :41].set(other[n][:, :41]) if MIXERS[name].per_token(n, a) else a
        for n, a in arrays.items()
    }
    out, state = run(arrays, None, segments, name=name, impl=impl)
    out2, state2 = run(mixed, None, segments, name=name, impl=impl)
    np.testing.assert_array_equal(out[:, 41:], out2[:, 41:])
    jax.tree.map(np.testing.assert_array_equal, state, state2)
    assert not np.array_equal(out[:, :41], out2[:, :41])


@pytest.mark.parametrize(("name", "impl"), TRANSFORMED)
def test_padding_is_inert_wherever_it_stands(name, impl):
    """Padding full of NaN inside a row changes neither outputs nor state, and its output is 0."""
    shape = Shape(batch=1, time=40)
    arrays = float32_case(name, shape)
    state = float32_state(name, shape)
    out, final = run(arrays, state, None, name=name, impl=impl)
    real = np.r_[2:15, 20:40, 41:48]
    padded = {
        n: jnp.full((1, 50, *a.shape[2:]), jnp.nan).at[:, real].set(a)
        if MIXERS[name].per_token(n, a)
        else a
        for n, a in arrays.items()
    }
    segments = jnp.zeros((1, 50), jnp.int32).at[:, real].set(5)
    out2, final2 = run(padded, state, segments, name=name, impl=impl)
    assert relative_error(out2[:, real], out) < FLOAT32_BAR
    assert tree_error(final2, final) < FLOAT32_BAR
    assert not np.any(np.delete(np.asarray(out2), real, axis=1))


@pytest.mark.parametrize("name", CORES)
def test_a_row_of_padding_keeps_the_state(name):
    shape = Shape(batch=1, time=20)
    arrays = float32_case(name, shape)
    state = float32_state(name, shape)
    out, final = run(arrays, state, jnp.zeros((1, 20), jnp.int32), name=name)
    jax.tree.map(np.testing.assert_array_equal, final, state)
    assert not np.any(out)


@pytest.mark.parametrize("name", CORES)
def test_causal(name):
    shape = Shape(batch=1, time=70)
    arrays, other = (float32_case(name, shape, seed=s) for s in (0, 1))
    changed = {
        n: a.at[:, 33:].set(other[n][:, 33:]) if MIXERS[name].per_token(n, a) else a
        for n, a in arrays.items()
    }
    out, _ = run(arrays, name=name)
    out2, _ = run(changed, name=name)
    np.testing.assert_array_equal(out[:, :33], out2[:, :33])
    assert not np.allclose(out[:, 33:], out2[:, 33:])


@pytest.mark.parametrize("name", CORES)
def test_state_gradient_reaches_the_previous_segment(name):
    """Truncated backpropagation: the loss of part 2 differentiates the inputs of part 1."""
    arrays = float32_case(name, Shape(batch=1, time=32))

    def loss(arrays, cut):
        if cut is None:
            return jnp.sum(jnp.sin(MIXERS[name](arrays, impl="chunked")[0][:, 16:]))
        _, state = MIXERS[name](part(name, arrays, tokens=slice(cut)), impl="chunked")
        second = part(name, arrays, tokens=slice(cut, None))
        return jnp.sum(jnp.sin(MIXERS[name](second, initial_state=state, impl="chunked")[0]))

    grad = quick_jit(jax.grad(loss), static_argnums=1)
    whole, split = grad(arrays, None), grad(arrays, 16)
    for n in arrays:
        assert relative_error(split[n], whole[n]) < FLOAT32_BAR, n


@pytest.mark.parametrize("name", CORES)
def test_matmul_precision_setting_changes_nothing(name):
    arrays = float32_case(name, Shape(batch=1, time=70))
    outs = []
    for precision in ("bfloat16", "float32"):
        with jax.default_matmul_precision(precision):
            outs.append(quick_jit(functools.partial(MIXERS[name], impl="chunked"))(arrays))
    jax.tree.map(np.testing.assert_array_equal, *outs)


@pytest.mark.parametrize(("name", "impl"), TRANSFORMED)
def test_vmap_and_remat(name, impl):
    shape = Shape(batch=2, time=20)
    arrays = float32_case(name, shape)
    call = functools.partial(MIXERS[name], impl=impl)
    out, _ = run(arrays, name=name, impl=impl)
    lanes = {n: a[:, None] if MIXERS[name].per_token(n, a) else a for n, a in arrays.items()}
    axes = ({n: 0 if MIXERS[name].per_token(n, a) else None for n, a in arrays.items()},)
    by_lane, _ = quick_jit(jax.vmap(call, in_axes=axes))(lanes)
    assert relative_error(by_lane[:, 0], out) < FLOAT32_BAR

    def loss(run, arrays):
        return jnp.sum(jnp.sin(run(arrays)[0]))

    plain = quick_jit(jax.grad(functools.partial(loss, call)))(arrays)
    remat = quick_jit(jax.grad(functools.partial(loss, jax.checkpoint(call))))(arrays)
    for n in arrays:
        assert relative_error(remat[n], plain[n]) < FLOAT32_BAR, n


@pytest.mark.parametrize(("name", "impl"), TRANSFORMED)
def test_inside_shard_map(name, impl):
    """Constants of the scans take the mesh axes that their inputs vary over."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shape = Shape(batch=2, time=20)
    arrays = float32_case(name, shape)
    specs = {
        n: PartitionSpec("data") if MIXERS[name].per_token(n, a) else PartitionSpec()
        for n, a in arrays.items()
    }
    segments = jnp.asarray(draw_segments(shape))

    def loss(arrays, segments):
        out, state = MIXERS[name](arrays, segment_ids=segments, impl=impl)
        return jax.lax.psum(jnp.sum(jnp.sin(out)) + tree_sum(state), "data")

    sharded = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=mesh,
        in_specs=(specs, PartitionSpec("data")),
        out_specs=(PartitionSpec(), specs),
        # The interpreters of kernels do not follow which axes a value varies over.
        check_vma="@" not in impl,
    )
    value, grads = quick_jit(sharded)(arrays, segments)
    out, state = run(arrays, None, segments, name=name, impl=impl)
    assert abs(value - (jnp.sum(jnp.sin(out)) + tree_sum(state))) < 1e-3
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads.values())


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_and_annotations(name, dtype):
    """out follows v (x), states are float32, and the signature's shapes hold."""
    mixer = MIXERS[name]
    arrays = cast(mixer, draw(mixer, Shape(time=20)), dtype)
    function = jaxtyped(getattr(mixers, mixer.function), typechecker=beartype)
    out, state = function(**arrays, **dict(mixer.options))
    assert out.dtype == dtype
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    assert bool(jnp.all(jnp.isfinite(out)))


@pytest.mark.parametrize("name", brief(CORES))
def test_every_optional_argument_differentiates(name):
    shape = Shape(batch=1, time=20)
    arrays = float32_case(name, shape)
    optional = {
        "initial_state": MIXERS[name].empty_state(shape),
        "segment_ids": jnp.ones((1, 20), jnp.int32),
        "chunk_size": 16,
    }
    if MIXERS[name].scales:
        optional["scale"] = 0.5
    if "D" in arrays:
        optional["D"] = None
    for option, value in optional.items():
        kept = {n: a for n, a in arrays.items() if n != option}
        grads = jax.grad(lambda a: jnp.sum(MIXERS[name](a, **{option: value})[0]))(kept)  # noqa: B023
        assert all(bool(jnp.any(g != 0)) for g in grads.values()), option


@pytest.mark.parametrize("name", MIXERS)
def test_bad_arguments_name_the_argument(name):
    shape = Shape(batch=1, time=6)
    arrays = float32_case(name, shape)
    function = MIXERS[name].function
    signature = inspect.signature(getattr(mixers, function)).parameters
    wrong_state = jax.tree.map(lambda x: jnp.ones((*x.shape, 9)), draw_state(MIXERS[name], shape))
    for argument in arrays:
        if signature[argument].default is None:
            continue
        with pytest.raises(ValueError, match=rf"{function}: .*{argument}"):
            MIXERS[name](arrays | {argument: arrays[argument][..., None]})
        with pytest.raises(ValueError, match=rf"{function}: .*{argument}"):
            MIXERS[name](arrays | {argument: jnp.ones(arrays[argument].shape, jnp.int32)})
    for options, match in (
        ({"impl": "fast"}, "impl must be one of .* got 'fast'"),
        ({"impl": "pallas"}, "impl='pallas' cannot run"),
        ({"chunk_size": 0}, "chunk_size must be an integer >= 1, got 0"),
        ({"segment_ids": jnp.ones((1, 5), jnp.int32)}, r"segment_ids must have shape \[B, T\]"),
        ({"segment_ids": jnp.ones((1, 6))}, "segment_ids must be integers"),
        ({"initial_state": wrong_state}, r"initial_state\S* must have shape"),
    ):
        with pytest.raises(ValueError, match=f"{function}: {match}"):
            MIXERS[name](arrays, **options)


# With q, k and v alone, or a gate of k's shape, nothing tells heads from time.
UNGATED = {"linear_attention", "performer_attention", "retention", "gla", "hgrn2", "rwkv7"}
HEADED = [
    name
    for name, m in MIXERS.items()
    if name != "ssd" and not m.channels and m.function not in UNGATED
]


@pytest.mark.parametrize("name", HEADED)
def test_heads_before_time_raises(name):
    arrays = float32_case(name, Shape(batch=1, time=6))
    swapped = {n: jnp.swapaxes(a, 1, 2) if a.ndim == 4 else a for n, a in arrays.items()}
    with pytest.raises(ValueError, match=MIXERS[name].function):
        MIXERS[name](swapped)


def test_heads_that_do_not_group_raise():
    arrays = float32_case("simple_gla", Shape(batch=1, time=6, heads=(2, 2, 2)))
    wide = {"v": jnp.ones((1, 6, 3, 4)), "log_decay": jnp.zeros((1, 6, 3))}
    with pytest.raises(ValueError, match=r"heads must be equal.*got q 2, k 2, v 3"):
        MIXERS["simple_gla"](arrays | wide)


def test_low_precision_decays_raise():
    arrays = float32_case("simple_gla", Shape(batch=1, time=6))
    low = arrays["log_decay"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="log_decay must be float32"):
        MIXERS["simple_gla"](arrays | {"log_decay": low})
