# SPDX-License-Identifier: Apache-2.0
"""Scan, rematerialisation, stacking and initialisation of the layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import parameters
from seqmix.models import HybridLM, stack, stack_paths, unstack, unstack_paths
from tests.layers.modules import quick_jit
from tests.models.models import Model, close, config, rms_ratio, tree_close

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 11)), jnp.int32)
# Leading layer, two periods of two, a remainder and a trailing layer.
SETTINGS = config("mamba2, attention", layers=7, leading="attention", trailing="local/attention")
SHORT = config("mamba2, attention", layers=4)
WEIGHTS = jnp.asarray(np.random.default_rng(1).normal(size=(2, 11)), jnp.float32)


@pytest.fixture(scope="module")
def scanned():
    return Model(SETTINGS)


@pytest.fixture(scope="module")
def short():
    model = Model(SHORT)
    return model, model.gradient(model.parameters, TOKENS, None, WEIGHTS)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_stack_and_unstack_are_exact_and_inverse(scanned):
    model = scanned()
    flat = unstack(model)
    assert flat.config == dataclasses.replace(SETTINGS, scan=False)
    assert len(flat.stack.leading) == 7 and not len(flat.stack.periods)
    assert [type(block.mixer).__name__ for block in flat.stack.leading] == [
        "Attention",
        *["Mamba2", "Attention"] * 2,
        "Mamba2",
        "Attention",
    ]
    np.testing.assert_array_equal(
        flat.stack.leading[4].mixer.query.kernel[...],
        model.stack.periods[1].mixer.query.kernel[...][1],
    )
    back = stack(flat)
    assert nnx.graphdef(back) == nnx.graphdef(model)
    same(nnx.state(back), nnx.state(model))
    assert stack(model) is model and unstack(flat) is flat


def test_kinds_of_parameters_survive(scanned):
    flat = unstack(scanned())
    masks = [parameters.decay_mask(nnx.state(model)) for model in (flat, stack(flat))]
    kinds = [
        {path[-2:]: leaf.get_value() for path, leaf in nnx.to_flat_state(mask)} for mask in masks
    ]
    assert kinds[0] == kinds[1] and len(set(kinds[0].values())) == 2


def test_paths_convert_arrays_below_any_prefix(scanned):
    pure = nnx.to_flat_state(nnx.state(scanned()))
    flat = {("moments", *path): leaf[...] for path, leaf in pure}
    loose = unstack_paths(flat, SETTINGS)
    assert {path[:3] for path in loose if "stack" in path} == {("moments", "stack", "leading")}
    same(stack_paths(loose, SETTINGS), flat)
    broken = {path: leaf for path, leaf in loose.items() if path[3:4] != (3,)}
    with pytest.raises(ValueError, match="in 1 of 2 periods"):
        stack_paths(broken, SETTINGS)


def test_scanned_is_unrolled(short):
    model, (logits, gradient) = short
    unrolled = Model(dataclasses.replace(SHORT, scan=False))
    state = nnx.state(unstack(model()))
    expected, unrolled_gradient = unrolled.gradient(state, TOKENS, None, WEIGHTS)
    close(logits, expected)
    converted = unstack_paths(dict(nnx.to_flat_state(gradient)), SHORT)
    tree_close(converted, dict(nnx.to_flat_state(unrolled_gradient)))


@pytest.mark.parametrize("remat", [pytest.param("dots", marks=pytest.mark.slow), "full"])
def test_rematerialisation_changes_no_gradient(short, remat):
    model, (_, expected) = short
    other = Model(dataclasses.replace(SHORT, remat=remat))
    _, gradient = other.gradient(model.parameters, TOKENS, None, WEIGHTS)
    tree_close(gradient, expected)


@functools.cache
def saved_bytes(remat):
    """Bytes that the forward pass keeps for the backward pass, parameters aside."""
    model = Model(config("gated_delta_net, attention", layers=4, remat=remat))
    _, backward = jax.eval_shape(lambda p: jax.vjp(lambda p: model(p)(TOKENS), p), model.parameters)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


def test_rematerialisation_keeps_less():
    assert saved_bytes("full") < saved_bytes("dots") < 0.7 * saved_bytes("none")


def program_length(layers):
    settings = config("gated_delta_net, attention", layers=layers)
    model = nnx.eval_shape(lambda: HybridLM(settings, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def loss(state):
        return nnx.merge(graph, state)(TOKENS).sum()

    return len(jax.jit(jax.grad(loss)).lower(state).as_text().splitlines())


def test_the_program_does_not_grow_with_depth():
    assert program_length(4) == program_length(24)


@functools.partial(quick_jit, static_argnums=0)
def initialise(settings):
    return HybridLM(settings, rngs=nnx.Rngs(3))


def test_scanned_and_unrolled_models_start_with_the_same_parameters():
    settings = config("attention", layers=3, leading="attention")
    state, unrolled = (
        nnx.state(initialise(dataclasses.replace(settings, scan=scan))) for scan in (True, False)
    )
    same(unstack_paths(dict(nnx.to_flat_state(state)), settings), dict(nnx.to_flat_state(unrolled)))
    first, second = state["stack"]["periods"][0]["mixer"]["query"]["kernel"][...]
    assert (first != second).all()


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_starts_at_the_logarithm_of_the_vocabulary(tied):
    settings = config(
        "gated_delta_net, mamba2, attention", layers=3, vocabulary=257, width=96, tied=tied
    )
    model = initialise(settings)
    graph, state = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(0), (4, 32), 0, 257)
    logits = quick_jit(lambda state: nnx.merge(graph, state)(tokens))(state)
    logarithms = jax.nn.log_softmax(logits[:, :-1])
    losses = -jnp.take_along_axis(logarithms, tokens[:, 1:, None], axis=-1)
    assert abs(float(losses.mean()) - np.log(257)) < 0.15
    assert float(jnp.std(model.head_kernel())) == pytest.approx(0.4 / 96**0.5, rel=0.02)
    assert 0.3 < float(logits.std()) < 0.5


def test_residual_branches_start_scaled_by_depth():
    block = initialise(config("attention", layers=8, width=48)).stack.periods[0]
    for linear in (block.mixer.output, block.feed_forward.down):
        inputs = linear.kernel[...].shape[1]
        assert float(linear.kernel[...].std()) == pytest.approx((16 * inputs) ** -0.5, rel=0.05)


@pytest.mark.slow
def test_bfloat16_compute_over_float32_parameters():
    settings = config(dtype="bfloat16")
    model, exact = Model(settings), Model(config())
    logits = model.logits(model.parameters, TOKENS)
    assert logits.dtype == jnp.float32
    expected = exact.logits(exact.parameters, TOKENS)
    assert rms_ratio(logits, expected) < 0.1
    assert jnp.abs(logits - expected).max() > 1e-4
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model.parameters))
    # Residual stream and matrix products by their settings, as the traced program shows.
    hidden = jax.eval_shape(lambda: model().hidden(TOKENS)[0])
    assert hidden.dtype == jnp.bfloat16
    half = Model(dataclasses.replace(settings, residual_dtype="bfloat16"))
    rounded = half.logits(model.parameters, TOKENS)
    assert rms_ratio(rounded, expected) < 0.1
    assert (rounded != logits).any()
    # A cast model runs too, with its rates in float32.
    cast = parameters.cast(model.parameters, jnp.bfloat16)
    assert rms_ratio(model.logits(cast, TOKENS), expected) < 0.1
    rates = cast["stack"]["periods"][0]["mixer"]["A_log"]
    assert rates.dtype == jnp.float32
