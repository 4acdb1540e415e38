# SPDX-License-Identifier: Apache-2.0
"""DSA layers against their formulas, over grouped heads and over latents, and what trains what."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import AttentionConfig, DSAConfig, MLAConfig
from tests.layers.modules import graph_and_shapes, quick_jit, random_parameters
from tests.layers.test_formulas import TIME, WIDTH, rms, sigmoid
from tests.layers.test_formulas_attention import BASE, turn
from tests.mixers.dense_dsa import dsa

HEADS, INDEX_HEADS, INDEX_WIDTH, TOP_K = 4, 3, 8, 3
INDEX = {
    "top_k": TOP_K,
    "index_heads": INDEX_HEADS,
    "index_width": INDEX_WIDTH,
    "index_loss": 0.5,
    "norm_epsilon": 0.3,
}
GROUPED = AttentionConfig(
    heads=HEADS, kv_heads=2, head_width=8, rotary_base=BASE, qk_norm=True, output_gate=True
)
LATENT = MLAConfig(
    heads=HEADS, head_width=5, rotary_width=4, value_width=3, kv_rank=7, rotary_base=BASE
)
LOW_RANK = dataclasses.replace(LATENT, query_rank=9, bias=True)


def grouped(p, x):
    """(query, key, value, what finishes the heads' outputs)."""
    q, k, v = ((x @ p[f"{n}.kernel"]).reshape(TIME, -1, 8) for n in ("query", "key", "value"))
    q, k = (turn(rms(z, 1e-6) * p[f"{n}_norm.scale"], 8) for n, z in (("query", q), ("key", k)))
    return q, k, v, x, lambda out: out * sigmoid(x @ p["gate.kernel"])


def latent(p, x):
    """The same of expanded heads, as `MLA` is defined."""
    source = x
    if "query_down.kernel" in p:
        source = x @ p["query_down.kernel"] + p["query_down.bias"]
        source = rms(source, 1e-6) * p["query_norm.scale"]
    q = (source @ p["query.kernel"]).reshape(TIME, HEADS, 9)
    down = x @ p["latent.kernel"] + p.get("latent.bias", 0)
    c = rms(down[:, :7], 1e-6) * p["latent_norm.scale"]
    common = turn(down[:, None, 7:], 4, interleaved=True)
    q = np.concatenate([q[..., :5], turn(q[..., 5:], 4, interleaved=True)], -1)
    k = (c @ p["key.kernel"]).reshape(TIME, HEADS, 5)
    k = np.concatenate([k, np.repeat(common, HEADS, axis=1)], -1)
    return q, k, (c @ p["value.kernel"]).reshape(TIME, HEADS, 3), source, lambda out: out


def index(p, x, source):
    q = (source @ p["indexer.query.kernel"]).reshape(TIME, INDEX_HEADS, INDEX_WIDTH)
    k = x @ p["indexer.key.kernel"]
    k = k - k.mean(-1, keepdims=True)
    k = k / np.sqrt((k**2).mean(-1, keepdims=True) + 0.3)
    k = k * p["indexer.key_norm.scale"] + p["indexer.key_norm.bias"]
    weights = x @ p["indexer.weights.kernel"] / np.sqrt(INDEX_HEADS * INDEX_WIDTH)
    # Half of the channels, in halves of their own, whatever the layout of the attention.
    return turn(q, INDEX_WIDTH // 2), turn(k[:, None], INDEX_WIDTH // 2)[:, 0], weights


@pytest.mark.parametrize(
    ("attention", "parts", "stage"),
    [
        (GROUPED, grouped, "sparse"),
        pytest.param(GROUPED, grouped, "warmup", marks=pytest.mark.slow),
        pytest.param(LATENT, latent, "sparse", marks=pytest.mark.slow),
        (LOW_RANK, latent, "sparse"),
    ],
    ids=["grouped", "warmup", "latent", "low_rank"],
)
def test_dsa(attention, parts, stage):
    config = DSAConfig(attention=attention, stage=stage, **INDEX)
    graph, shapes = graph_and_shapes(config, WIDTH)
    state = random_parameters(shapes)
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))

    @quick_jit
    def run(state, x):
        def loss(state, x):
            return nnx.merge(graph, state)(x, auxiliary=True)[2].loss

        def output(state):
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)[0]))

        y, cache, auxiliary = nnx.merge(graph, state)(x, auxiliary=True)
        assert cache is None
        return y, auxiliary, jax.grad(loss, argnums=(0, 1))(state, x), jax.grad(output)(state)

    y, auxiliary, (of_loss, of_x), of_output = run(state, jnp.asarray(x, jnp.float32)[None])
    flat = {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(state)}
    p = {name: np.asarray(value, np.float64) for name, value in flat.items()}
    q, k, v, source, finish = parts(p, x)
    arrays = (z[None] for z in (q, k, v, *index(p, x, source)))
    out, losses, _ = dsa(*arrays, None, top_k=TOP_K, warmup=stage == "warmup")
    want = finish(out[0].reshape(TIME, -1)) @ p["output.kernel"] + p.get("output.bias", 0)
    np.testing.assert_allclose(y[0], want, rtol=0, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(auxiliary.metrics["dsa.index_loss"], losses.sum(), rtol=1e-5)
    np.testing.assert_allclose(auxiliary.loss, 0.5 * losses.sum(), rtol=1e-5)
    # The indexer learns from its loss, everything else from the output, each from nothing else.
    assert not np.any(of_x)
    for gradients, own in ((of_loss, True), (of_output, False)):
        for path, gradient in nnx.to_flat_state(gradients):
            assert bool(np.any(gradient[...])) == ((path[0] == "indexer") == own), path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DSAConfig(top_k=0), "DSA.top_k must be >= 1, got 0"),
        (lambda: DSAConfig(stage="dense"), "DSA.stage"),
        (lambda: DSAConfig(index_loss=0.0), "DSA.index_loss must be positive, got 0"),
        (lambda: DSAConfig(index_rotary_fraction=0.3), "DSA.index_rotary_fraction: .* 19 chan"),
        (
            lambda: DSAConfig(attention=AttentionConfig(window=4)),
            "DSA.attention needs Attention.window = None, got 4",
        ),
        (lambda: DSAConfig(attention=AttentionConfig(sinks=True)), "Attention.sinks = False"),
        (lambda: DSAConfig(attention=AttentionConfig(value_width=8)), "value_width = None, got 8"),
        (
            lambda: DSAConfig(attention=AttentionConfig(key_multiplier=0.5)),
            "Attention.key_multiplier = 1.0, got 0.5",
        ),
        (lambda: DSAConfig(attention=MLAConfig(impl="dense")), "MLA.impl = 'auto', got 'dense'"),
    ],
)
def test_bad_settings_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
