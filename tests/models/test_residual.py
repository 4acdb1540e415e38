# SPDX-License-Identifier: Apache-2.0
"""How parts join the stream, the model's norms, and what stands before and after the layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import config as configs
from seqmix.layers import AttentionConfig, RMSNorm
from seqmix.models import (
    FeedForwardConfig,
    HybridLMConfig,
    LogitScaling,
    ResidualConfig,
    inspect,
    unstack,
    unstack_paths,
)
from seqmix.training.loss import chunked_cross_entropy
from seqmix.training.step import StepOptions, batch_loss
from tests.layers.modules import quick_jit
from tests.models.models import Model, close, config, tree_close

TIME, EPSILON = 12, 1e-3
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, TIME)), jnp.int32)
ONES = jnp.ones((2, TIME), jnp.int32)
WEIGHTS = jnp.cos(jnp.arange(2.0 * TIME)).reshape(2, TIME)


def normalise(name, norm, x):
    """The three norms' definitions, float64."""
    parameter = {
        key: np.asarray(leaf[...], np.float64)
        for key, leaf in vars(norm).items()
        if isinstance(leaf, nnx.Variable)
    }
    assert sorted(parameter) == (["bias", "scale"] if name == "layer" else ["scale"])
    if name == "layer":
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
        return x * parameter["scale"] + parameter["bias"]
    scale = parameter["scale"] + (name == "zero_centred")
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def part(module):
    """A part of a block as a function of float64 arrays [B, T, D]."""

    def call(x):
        out = quick_jit(module.__call__)(jnp.asarray(x, jnp.float32))
        return np.asarray(out[0] if isinstance(out, tuple) else out, np.float64)

    return call


def one_layer(norm, mixer, feed_forward):
    return config(
        "m/attention + f/feed_forward",
        layers=1,
        norm=norm,
        norm_epsilon=EPSILON,
        mixers={
            "m/attention": AttentionConfig(heads=3, head_width=6),
            "f/feed_forward": FeedForwardConfig(hidden=18),
        },
        feed_forward=None,
        residuals={"m/attention": mixer, "f/feed_forward": feed_forward},
        scan=False,
    )


@pytest.mark.parametrize(
    ("norm", "mixer", "feed_forward"),
    [
        ("rms", ResidualConfig("post"), ResidualConfig("pre", 2.0, 0.25)),
        ("zero_centred", ResidualConfig("both", 1.0, 3.0), ResidualConfig("post", 0.5)),
        ("layer", ResidualConfig("stream", 0.5, 1.5), ResidualConfig("both", 3.0, 0.5)),
        ("layer", ResidualConfig("pre", 0.25), ResidualConfig("stream", 2.0, 0.5)),
    ],
)
def test_the_forms_are_their_equations(norm, mixer, feed_forward):
    model = Model(one_layer(norm, mixer, feed_forward))
    built = model()
    block = built.stack.leading[0]
    x = np.asarray(built.embedding[...], np.float64)[np.asarray(TOKENS)]
    for residual, f, before, after in (
        (mixer, part(block.mixer), block.mixer_norm, block.mixer_output_norm),
        (
            feed_forward,
            part(block.feed_forward),
            block.feed_forward_norm,
            block.feed_forward_output_norm,
        ),
    ):
        assert (before is None) == (residual.norm == "post")
        assert (after is None) == (residual.norm in ("pre", "stream"))
        alpha, beta = residual.alpha, residual.beta
        if residual.norm == "pre":
            x = alpha * x + beta * f(normalise(norm, before, x))
        elif residual.norm == "post":
            x = alpha * x + beta * normalise(norm, after, f(x))
        elif residual.norm == "both":
            x = alpha * x + beta * normalise(norm, after, f(normalise(norm, before, x)))
        else:
            z = normalise(norm, before, x)
            x = alpha * z + beta * f(z)
    hidden = normalise(norm, built.norm, x)
    expected = hidden @ np.asarray(built.embedding[...], np.float64).T
    close(model.logits(model.parameters, TOKENS), expected)
    count = sum(leaf.size for leaf in jax.tree.leaves(model.parameters))
    report = inspect(model.config)
    assert report.parameters == count
    assert report.norm_parameters == (42 if norm == "layer" else 21)


def test_norms_start_as_the_identity_on_normalised_inputs():
    settings = one_layer("zero_centred", ResidualConfig("both"), ResidualConfig("post"))
    for norm in ("rms", "zero_centred", "layer"):
        model = Model(dataclasses.replace(settings, norm=norm, embedding_norm=True))
        x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 21)), jnp.float32)
        for layer in (model().norm, model().embedding_norm, model().stack.leading[0].mixer_norm):
            fresh = jax.tree.map(jnp.zeros_like, nnx.state(layer))
            if norm != "zero_centred":
                fresh["scale"] = fresh["scale"].replace(jnp.ones((21,)))
            layer = nnx.merge(nnx.graphdef(layer), fresh)
            y = x - x.mean(-1, keepdims=True) if norm == "layer" else x
            close(layer(x), y / jnp.sqrt((y**2).mean(-1, keepdims=True) + EPSILON))


# Scopes with every form, a layer norm whose bias reaches padding too, and all that stands around.
MIXED = config(
    "gated_delta_net, post/attention + post/feed_forward",
    leading="stream/mamba2 + both/feed_forward",
    layers=5,
    mixers={
        "gated_delta_net": dataclasses.replace(
            config().mixers["gated_delta_net"], impl="recurrent"
        ),
        "stream/mamba2": dataclasses.replace(config().mixers["mamba2"], impl="recurrent"),
        "post/attention": config().mixers["attention"],
        "post/feed_forward": FeedForwardConfig(hidden=18),
        "both/feed_forward": FeedForwardConfig(hidden=10, bias=True),
    },
    residual=ResidualConfig("pre", 0.75, 0.5),
    residuals={
        "post/attention": ResidualConfig("post", 1.0, 0.5),
        "post/feed_forward": ResidualConfig("post", 1.0, 0.5),
        "stream/mamba2": ResidualConfig("stream", 0.5, 0.5),
        "both/feed_forward": ResidualConfig("both"),
    },
    norm="layer",
    norm_epsilon=EPSILON,
    embedding_norm=True,
    embedding_multiplier=3.0,
    logits_multiplier=0.5,
    logit_softcap=2.0,
)


@pytest.fixture(scope="module")
def mixed():
    model = Model(MIXED)
    return model, model.gradient(model.parameters, TOKENS, ONES, WEIGHTS)


def test_scanned_is_unrolled(mixed):
    model, (logits, gradient) = mixed
    unrolled = Model(dataclasses.replace(MIXED, scan=False))
    expected, other = unrolled.gradient(nnx.state(unstack(model())), TOKENS, ONES, WEIGHTS)
    close(logits, expected)
    tree_close(
        unstack_paths(dict(nnx.to_flat_state(gradient)), MIXED), dict(nnx.to_flat_state(other))
    )


def test_packed_is_separate_and_padding_plays_no_part(mixed):
    model, _ = mixed
    ids = jnp.asarray([[1] * 4 + [0] * 2 + [2] * 6, [0] * 3 + [5] * 9], jnp.int32)
    weights = jnp.where((ids == 2) | (ids == 5), WEIGHTS, 0)
    logits, gradient = model.gradient(
        model.parameters, jnp.where(ids == 0, -1, TOKENS), ids, weights
    )
    alone, real, weight = (np.zeros((2, TIME), d) for d in (np.int32, np.int32, np.float32))
    for row, (start, length) in enumerate(((6, 6), (3, 9))):
        alone[row, :length] = TOKENS[row, start:]
        weight[row, :length] = weights[row, start:]
        real[row, :length] = 1
    alone, real, weight = map(jnp.asarray, (alone, real, weight))
    expected, separate = model.gradient(model.parameters, alone, real, weight)
    close(logits[0, 6:], expected[0, :6])
    close(logits[1, 3:], expected[1, :9])
    tree_close(gradient, separate)
    assert jnp.isfinite(logits).all()


def test_decoding_is_the_full_pass(mixed):
    model, (expected, _) = mixed
    logits, _, _ = model.decode(model.parameters, TOKENS, model().init_cache(2, TIME))
    close(logits, expected)


AROUND = config(
    "none/feed_forward",
    layers=1,
    mixers={"none/feed_forward": FeedForwardConfig(hidden=4)},
    norm="layer",
    norm_epsilon=EPSILON,
    embedding_norm=True,
    embedding_multiplier=3.0,
    logits_multiplier=0.7,
    logit_softcap=1.5,
)


@pytest.mark.parametrize("tied", [True, False])
def test_what_stands_around_the_layers(tied):
    model = Model(dataclasses.replace(AROUND, tied=tied))
    built = model()
    table = np.asarray(built.embedding[...], np.float64)
    x = normalise("layer", built.embedding_norm, 3.0 * table[np.asarray(TOKENS)])
    block = next(iter(unstack(built).stack.leading))
    y = jnp.asarray(normalise("layer", block.feed_forward_norm, x), jnp.float32)
    x = normalise("layer", built.norm, x + np.asarray(block.feed_forward(y), np.float64))
    # The head is the plain table: neither multiplier nor norm of the embedding reaches it.
    head = table.T if tied else np.asarray(built.head[...], np.float64)
    expected = 1.5 * np.tanh(0.7 * (x @ head) / 1.5)
    close(model.logits(model.parameters, TOKENS), expected)
    assert 1.0 < np.abs(expected).max() < 1.5


def test_the_training_loss_is_that_of_the_logits():
    model = Model(AROUND)
    options = StepOptions(
        gradient_accumulation=1, z_loss=0.1, chunk_tokens=6, byte_lengths=np.ones(61)
    )
    batch = {
        "tokens": TOKENS,
        "segment_ids": ONES.at[0, 7:].set(2),
        "positions": jnp.broadcast_to(jnp.arange(TIME), TOKENS.shape),
    }

    def trained(parameters):
        return batch_loss(model(parameters), batch, options)[0]

    def plain(parameters):
        built = model(parameters)
        logits = built(TOKENS[:, :-1], batch["segment_ids"][:, :-1])
        lse = jax.nn.logsumexp(logits, axis=-1)
        nll = lse - jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1)[..., 0]
        counted = jnp.ones_like(nll).at[0, 6].set(0)
        return jnp.sum(counted * (nll + 0.1 * lse**2))

    value, gradient = quick_jit(jax.value_and_grad(trained))(model.parameters)
    expected, wanted = quick_jit(jax.value_and_grad(plain))(model.parameters)
    close(value, expected)
    tree_close(gradient, wanted)


def test_the_norm_of_the_embedding_is_in_the_residual_dtype():
    half = dataclasses.replace(AROUND, dtype="bfloat16", norm="rms")
    embedded = jax.eval_shape(lambda: Model(half)()._embed(TOKENS, None))
    assert embedded.dtype == jnp.float32
    assert isinstance(Model(half)().embedding_norm, RMSNorm)


def test_scaling_backwards_is_its_derivative():
    products = jnp.linspace(-9.0, 9.0, 19)
    for scaling in (LogitScaling(), LogitScaling(0.3), LogitScaling(0.3, 2.0)):
        logits, pull = jax.vjp(scaling, products)
        cotangent = jnp.cos(products)
        close(scaling.backward(logits, cotangent), pull(cotangent)[0])


def test_a_capped_loss_keeps_no_logits():
    shapes = (
        jax.ShapeDtypeStruct((4, 64, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, 997), jnp.float32),
        jax.ShapeDtypeStruct((4, 64), jnp.int32),
        jax.ShapeDtypeStruct((4, 64), jnp.float32),
    )

    def loss(*arrays):
        return chunked_cross_entropy(*arrays, chunk_tokens=32, scaling=LogitScaling(2.0, 3.0))[0]

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 64 * 997 * 4 / 2


GIN = """
    HybridLM.pattern = '3 gated_delta_net, post/attention + post/feed_forward'
    HybridLM.norm = 'zero_centred'
    Residual.alpha = 2.0
    post/Residual.norm = 'post'
    """


def test_gin_fills_the_residuals_from_scopes():
    built = configs.from_text(GIN, filename="t.gin").build(HybridLMConfig)
    assert built.residual == ResidualConfig("pre", 2.0)
    post = ResidualConfig("post", 2.0)
    assert built.residuals == {"post/attention": post, "post/feed_forward": post}
    plan = built.plan().elements
    assert built.residuals_of(plan[3]) == (post, post)
    assert built.residuals_of(plan[0]) == (built.residual, built.residual)
    text = configs.resolved(built)
    assert configs.from_text(text, filename="again.gin").build(HybridLMConfig) == built
    assert hash(dataclasses.replace(built, layers=8)) != hash(built)


def test_python_fills_the_residuals_from_the_plain_one():
    plain = ResidualConfig(beta=0.5)
    built = HybridLMConfig(pattern="attention, local/attention", residual=plain)
    assert built.residuals == {"local/attention": plain}
    assert configs.from_text(configs.resolved(built)).build(HybridLMConfig) == built


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Residual.norm = 'after'", r"t\.gin:1.*'pre', 'post', 'both', 'stream'"),
        ("Residual.alpha = 0", r"t\.gin:1.*Residual.alpha must be positive, got 0"),
        ("local/Residual.alpha = 2.0", r"t\.gin:1"),
        ("HybridLM.norm = 'group'", r"t\.gin:1.*'rms', 'zero_centred', 'layer'"),
        ("HybridLM.logit_softcap = 0.0", r"t\.gin:1.*logit_softcap must be positive, got 0"),
        ("HybridLM.embedding_multiplier = -1.0", "embedding_multiplier must be positive"),
        ("HybridLM.logits_multiplier = 0.0", "logits_multiplier must be positive"),
    ],
)
def test_gin_mistakes_are_errors_with_their_line(text, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.from_text(text, filename="t.gin").build(HybridLMConfig)


def test_residuals_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="has 'attention', which is no part with a scope"):
        HybridLMConfig(pattern="attention", residuals={"attention": ResidualConfig()})
    with pytest.raises(ValueError, match="has 'x/moe', .* of the patterns: 'x/attention'"):
        HybridLMConfig(pattern="x/attention", residuals={"x/moe": ResidualConfig()})
    with pytest.raises(ValueError, match="'x/attention' and 'x/moe' have one scope and must be"):
        HybridLMConfig(
            pattern="x/attention + x/moe", residuals={"x/attention": ResidualConfig("post")}
        )
