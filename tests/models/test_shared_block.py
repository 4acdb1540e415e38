# SPDX-License-Identifier: Apache-2.0
"""Layers that share a transformer: Zamba's equations, its gradient over all uses, every form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import config as configs
from seqmix.layers import AttentionConfig, LayerInfo, Mamba2Config, MambaConfig
from seqmix.models import (
    FeedForwardConfig,
    HybridLM,
    HybridLMConfig,
    ResidualConfig,
    SharedBlockConfig,
    inspect,
    stack,
    unstack,
    unstack_paths,
)
from seqmix.models.shared_block import SharedUse
from seqmix.training.program import is_stacked
from seqmix.training.state import ModelDefinition
from tests.layers.modules import quick_jit
from tests.models.models import Model, close, config, tree_close

TIME, WIDTH = 14, 16
# The recurrent form compiles quickest.
MAMBA2 = Mamba2Config(head_width=8, state_size=5, impl="recurrent")
FIRST = SharedBlockConfig(
    block="first",
    mixer=MAMBA2,
    attention=AttentionConfig(heads=4, kv_heads=2, head_width=6, scale=3**-0.5),
    feed_forward=FeedForwardConfig(hidden=18, activation="gelu"),
    adapter_rank=3,
    attention_adapters=True,
)
SECOND = dataclasses.replace(
    FIRST,
    block="second",
    mixer=MambaConfig(state_size=3, impl="recurrent"),
    attention=AttentionConfig(heads=3, head_width=6, window=5, rotary_fraction=0.0),
    feed_forward=FeedForwardConfig(hidden=10, gated=False, bias=True),
    attention_adapters=False,
)
# Each transformer is used in both periods, and the first one in the leading layer too.
SETTINGS = config(
    "a/shared_block, b/shared_block",
    leading="lowest/shared_block",
    layers=5,
    width=WIDTH,
    feed_forward=None,
    mixers={
        "lowest/shared_block": dataclasses.replace(
            FIRST, adapter_rank=None, attention_adapters=False
        ),
        "a/shared_block": FIRST,
        "b/shared_block": SECOND,
    },
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, TIME)), jnp.int32)
# Half an ulp on every parameter moves this model's gradients by 6e-5 to 9e-5 of their largest.
GRADIENT = 1e-4
ONES = jnp.ones((2, TIME), jnp.int32)
WEIGHTS = jnp.cos(jnp.arange(2.0 * TIME)).reshape(2, TIME)


@pytest.fixture(scope="module")
def model():
    return Model(SETTINGS)


@pytest.fixture(scope="module")
def result(model):
    return model.gradient(model.parameters, TOKENS, ONES, WEIGHTS)


def pair(second="first", **settings):
    """Two uses of one transformer, or of two of the same shape."""
    first = dataclasses.replace(FIRST, **settings)
    mixers = {"a/shared_block": first, "b/shared_block": dataclasses.replace(first, block=second)}
    pattern = "a/shared_block, b/shared_block"
    return config(pattern, layers=2, width=WIDTH, feed_forward=None, mixers=mixers, scan=False)


@pytest.fixture(scope="module")
def twice():
    model = Model(pair())
    return model, model.gradient(model.parameters, TOKENS, ONES, WEIGHTS)


def numpy_transformer(weights, use, config, x, embeddings):
    """h W of the module's equations for one document, x and embeddings [T, D], in float64."""
    array = lambda variable: np.asarray(variable[...], np.float64)  # noqa: E731
    kernel = lambda linear: array(linear.kernel)  # noqa: E731

    def rms(x, norm):
        scale = array(norm.scale)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + SETTINGS.norm_epsilon) * scale

    def adapt(adapter):
        return kernel(adapter.down) @ kernel(adapter.up)

    y = rms(np.concatenate([x, embeddings], axis=-1), weights.input_norm)
    heads, size, time = config.attention.heads, config.attention.head_width, len(x)
    attention = weights.attention
    query = y @ (kernel(attention.query) + adapt(use.query_adapter))
    key = y @ (kernel(attention.key) + adapt(use.key_adapter))
    value = y @ (kernel(attention.value) + adapt(use.value_adapter))
    query = query.reshape(time, heads, size)
    key, value = (
        np.repeat(z.reshape(time, -1, size), heads // config.attention.kv_heads, axis=1)
        for z in (key, value)
    )
    angles = np.arange(time)[:, None] * 10_000.0 ** (-np.arange(0, size, 2) / size)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

    def rotate(z):
        return z * cos + np.concatenate([-z[..., size // 2 :], z[..., : size // 2]], -1) * sin

    logits = np.einsum("qhk,shk->hqs", rotate(query), rotate(key)) * (size / 2) ** -0.5
    logits = np.where(np.tril(np.ones((time, time))), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = np.einsum("hqs,shk->qhk", p, value).reshape(time, -1) @ kernel(attention.output)

    y = rms(y, weights.feed_forward_norm)
    part = weights.feed_forward
    both = np.concatenate([kernel(part.gate), kernel(part.up)], axis=-1) + adapt(use.adapter)
    gate, up = np.split(y @ both, 2, axis=-1)
    gate = np.asarray(jax.nn.gelu(jnp.asarray(gate, jnp.float32), approximate=False))
    return ((gate * up) @ kernel(part.down)) @ kernel(use.linear), rms


def test_zambas_equations(twice):
    """Two uses, in NumPy but for the mixers; the second reads the embeddings again."""
    model, (logits, _) = twice
    built = model()
    weights = built.stack.shared["first"]
    embeddings = x = np.asarray(built.embedding[...], np.float64)[np.asarray(TOKENS[0])]
    for block in built.stack.leading:
        added, rms = numpy_transformer(weights, block.use, FIRST, x, embeddings)
        y = jnp.asarray(rms(x + added, block.mixer_norm), jnp.float32)
        x = x + np.asarray(quick_jit(block.mixer.__call__)(y[None])[0][0], np.float64)
    expected = rms(x, built.norm) @ np.asarray(built.embedding[...], np.float64).T
    close(logits[0], expected)


def test_the_gradient_is_the_sum_over_the_uses(twice):
    """Two transformers with the same numbers get the parts of the one transformer's gradient."""
    model, (logits, gradient) = twice
    copies = Model(pair("second"))
    flat = dict(nnx.to_flat_state(model.parameters))
    shared = {path: leaf for path, leaf in flat.items() if "shared" in path}
    assert shared
    for path, leaf in shared.items():
        flat[*(("second" if key == "first" else key) for key in path),] = leaf
    expected, parts = copies.gradient(nnx.from_flat_state(flat), TOKENS, ONES, WEIGHTS)
    close(logits, expected)
    parts = dict(nnx.to_flat_state(parts))
    for path, leaf in nnx.to_flat_state(gradient):
        other = parts.get((*(("second" if key == "first" else key) for key in path),))
        total = parts[path][...]
        if path in shared:
            assert jnp.abs(other[...]).max() > 1e-3 and jnp.abs(total).max() > 1e-3
            total = total + other[...]
        close(leaf[...], total)


def test_scanned_is_unrolled(model, result):
    logits, gradient = result
    unrolled = Model(dataclasses.replace(SETTINGS, scan=False))
    flat = nnx.state(unstack(model()))
    assert not any("periods" in path for path, _ in nnx.to_flat_state(flat))
    expected, other = unrolled.gradient(flat, TOKENS, ONES, WEIGHTS)
    close(logits, expected)
    converted = unstack_paths(dict(nnx.to_flat_state(gradient)), SETTINGS)
    tree_close(converted, dict(nnx.to_flat_state(other)), GRADIENT)
    back = stack(unrolled(flat))
    assert nnx.graphdef(back) == nnx.graphdef(model())
    jax.tree.map(np.testing.assert_array_equal, nnx.state(back), model.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_gradient(model, result, remat):
    other = Model(dataclasses.replace(SETTINGS, remat=remat))
    logits, gradient = other.gradient(model.parameters, TOKENS, ONES, WEIGHTS)
    close(logits, result[0])
    tree_close(gradient, result[1], GRADIENT)


def test_decoding_is_the_full_pass_and_every_use_has_its_keys(model, result):
    cache = model().init_cache(2, TIME)
    leading, (first, second), _ = cache.layers
    assert leading[0].attention.key.shape == (2, TIME, 2, 6)
    assert first.attention.key.shape == (2, 2, TIME, 2, 6)
    assert second.attention.key.shape == (2, 2, 5, 3, 6)
    logits, _, after = model.decode(model.parameters, TOKENS, cache)
    close(logits, result[0])
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    first = after.layers.periods[0].attention.key
    assert (first[0] != first[1]).any()


def test_packed_is_separate(model, result):
    """Outputs and gradients; the row's other document and its padding play no part."""
    ids = jnp.asarray([[1] * 9 + [0] + [2] * 4, [0] * 3 + [5] * 11], jnp.int32)
    weights = jnp.where(ids == 2, WEIGHTS, 0) + jnp.where(ids == 5, WEIGHTS, 0)
    logits, gradient = model.gradient(model.parameters, TOKENS, ids, weights)
    alone, real, weight = (np.zeros((2, TIME), d) for d in (np.int32, np.int32, np.float32))
    for row, (start, length) in enumerate(((10, 4), (3, 11))):
        alone[row, :length] = TOKENS[row, start : start + length]
        weight[row, :length] = weights[row, start : start + length]
        real[row, :length] = 1
    alone, real, weight = map(jnp.asarray, (alone, real, weight))
    expected, separate = model.gradient(model.parameters, alone, real, weight)
    close(logits[0, 10:], expected[0, :4])
    close(logits[1, 3:], expected[1, :11])
    tree_close(gradient, separate, GRADIENT)
    assert jnp.abs(logits[0, 10:] - result[0][0, 10:]).max() > 1e-2


def test_counts(model):
    report = inspect(SETTINGS, contexts=(3, 10))
    total = sum(leaf.size for leaf in jax.tree.leaves(model.parameters))
    # Norms of 2 D and D; attention from 2 D; the gated part, and the plain one with biases.
    first = 3 * 16 + 32 * (24 + 12 + 12) + 24 * 16 + 3 * 16 * 18
    second = 3 * 16 + 32 * 3 * 18 + 18 * 16 + 2 * 16 * 10 + 10 + 16
    assert report.shared_parameters == first + second
    rows = sum(row.parameters for row in report.layers)
    assert report.parameters == total == rows + first + second + 61 * 16 + 16
    assert report.active == total
    for context, size in zip(report.contexts, report.cache_bytes, strict=True):
        cache = jax.eval_shape(lambda c=context: model().init_cache(1, c))
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) == size
    assert "shared blocks" in str([list(column.cells) for column in _layers(report).columns])
    # The products of one use: transformer, W, adapters; each use counts them again.
    transformer = 2 * (32 * 48 + 24 * 16 + 3 * 16 * 18) + 4 * 24 * 7.5
    adapters = 2 * 3 * (3 * 32 + 48) + 2 * 3 * (16 + 36)
    own = MAMBA2.flops_per_token(16, 7.5) + 2 * 16 * 16
    assert FIRST.flops_per_token(16, 7.5) == transformer + adapters + own
    assert report.flops == sum(row.flops for row in report.layers) + report.head_flops


def _layers(report):
    return report.render().renderables[0]


def test_flops_are_the_compilers():
    """Of a wide use, whose products outweigh what is not counted."""
    wide = dataclasses.replace(
        FIRST,
        mixer=Mamba2Config(state_size=64),
        attention=AttentionConfig(kv_heads=4),
        feed_forward=FeedForwardConfig(hidden=1024),
        adapter_rank=64,
    )
    settings = HybridLMConfig(
        pattern="shared_block",
        layers=2,
        width=256,
        mixers={"shared_block": wide},
        feed_forward=None,
        scan=False,
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: HybridLM(settings, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    lowered = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens)).lower(state, tokens)
    counted = settings.flops_per_token(64) * 64
    assert counted == pytest.approx(lowered.compile().cost_analysis()["flops"], rel=0.05)


def test_the_trainer_sees_the_shared_weights():
    definition = ModelDefinition(lambda: HybridLM(SETTINGS, rngs=nnx.Rngs(0)))
    names = [name for name in definition.params if name.startswith("stack.shared.")]
    assert not any(map(is_stacked, names))  # sharded along any axis
    assert {name.split(".")[2] for name in names} == {"first", "second"}
    for name in names:
        decays = name.endswith(".kernel")
        assert definition.decay[name] == definition.muon[name] == decays
    uses = [name for name in definition.params if ".use." in name]
    assert len(uses) == 1 + (3 + 6) + 3 and sum(map(is_stacked, uses)) == len(uses) - 1
    assert all(definition.decay[name] and definition.muon[name] for name in uses)


def test_all_uses_start_without_their_adapters():
    dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    use = SharedUse(FIRST, WIDTH, layer=LayerInfo(), rngs=nnx.Rngs(0), **dtypes)
    for adapter in (use.adapter, use.query_adapter, use.key_adapter, use.value_adapter):
        assert adapter.down.kernel[...].any() and not adapter.up.kernel[...].any()
    assert use.linear.kernel[...].any()


GIN = """
    HybridLM.pattern = '2 mamba2, a/shared_block, 2 mamba2, b/shared_block'
    HybridLM.feed_forward = None
    HybridLM.layers = 6
    a/SharedBlock.block = 'a'
    b/SharedBlock.block = 'b'
    SharedBlock.adapter_rank = 8
    SharedBlock.mixer = @Mamba2()
    Mamba2.state_size = 32
    b/Attention.scale = 0.25
    FeedForward.activation = 'gelu'
    """


def test_gin():
    built = configs.from_text(GIN, filename="t.gin").build(HybridLMConfig)
    a, b = built.mixers["a/shared_block"], built.mixers["b/shared_block"]
    assert a.mixer == b.mixer == built.mixers["mamba2"] == Mamba2Config(state_size=32)
    assert (a.attention.scale, b.attention.scale) == (None, 0.25)
    assert a.feed_forward.activation == "gelu" and a.adapter_rank == 8
    text = configs.resolved(built)
    assert configs.from_text(text, filename="again.gin").build(HybridLMConfig) == built
    with pytest.raises(configs.ConfigError, match=r"share the block 'a', .*\.attention differ"):
        configs.from_text(GIN.replace("block = 'b'", "block = 'a'")).build(HybridLMConfig)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": "a.b"}, r"SharedBlock.block must be an identifier, got 'a\.b'"),
        ({"adapter_rank": 0}, "SharedBlock.adapter_rank must be >= 1, got 0"),
        ({"adapter_rank": None}, "attention_adapters needs SharedBlock.adapter_rank"),
        ({"attention": AttentionConfig(share_kv_as="x")}, "Attention.share_kv_as must be None"),
        ({"attention": AttentionConfig(kv_from="x")}, "Attention.kv_from must be None"),
        ({"mixer": AttentionConfig()}, "SharedBlock.mixer: expected Mamba | Mamba2"),
    ],
)
def test_bad_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message.replace(" | ", r" \| ")):
        dataclasses.replace(FIRST, **settings)


def test_models_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="'b/shared_block' share the block 'first', but their"):
        config(
            "a/shared_block, b/shared_block",
            width=WIDTH,
            mixers={
                "a/shared_block": FIRST,
                "b/shared_block": dataclasses.replace(SECOND, block="first"),
            },
        )
    with pytest.raises(ValueError, match=r"'a/shared_block' cannot have Residual.norm = 'stream'"):
        dataclasses.replace(pair(), residuals={"a/shared_block": ResidualConfig("stream")})
    wide = dataclasses.replace(FIRST, attention=AttentionConfig(head_width=6))
    with pytest.raises(ValueError, match="head_width = 6 does not divide the model width 32"):
        HybridLMConfig(pattern="shared_block", width=WIDTH, mixers={"shared_block": wide})
