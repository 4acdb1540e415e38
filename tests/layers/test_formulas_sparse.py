# SPDX-License-Identifier: Apache-2.0
"""NSA and MoBA layers against their formulas in float64, their counts and their settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import AttentionConfig, MoBAConfig, NSAConfig
from tests.layers.cases_sparse import NSA_SIZES
from tests.layers.modules import graph_and_shapes, quick_jit, random_parameters
from tests.layers.test_formulas import TIME, WIDTH, build, check, rms, sigmoid
from tests.layers.test_formulas_attention import turn
from tests.mixers import dense_routed


def heads_of(x, kernel, count):
    return (x @ kernel).reshape(len(x), count, -1)


@pytest.mark.parametrize("normed", [False, True])
def test_moba(normed):
    config = MoBAConfig(
        heads=4, kv_heads=2, head_width=6, block_size=3, top_k=2, rotary_base=50.0, qk_norm=normed
    )
    module, p = build(config)
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    q, k, v = (
        heads_of(x, p[f"{n}.kernel"], c) for n, c in (("query", 4), ("key", 2), ("value", 2))
    )
    if normed:
        q, k = (rms(z, 1e-6) * p[f"{n}_norm.scale"] for z, n in ((q, "query"), (k, "key")))
    q, k = turn(q, 6), turn(k, 6)
    mixed = dense_routed.moba_attention(q[None], k[None], v[None], None, block_size=3, top_k=2)
    check(module, mixed[0].reshape(TIME, -1) @ p["output.kernel"], x)


@pytest.mark.parametrize("compression", ["mlp", "mean"])
def test_nsa(compression):
    config = NSAConfig(
        heads=4,
        kv_heads=2,
        head_width=4,
        value_width=3,
        compression=compression,
        rotary_base=50.0,
        **NSA_SIZES,
    )
    module, p = build(config)
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    q, k, v = (
        heads_of(x, p[f"{n}.kernel"], c) for n, c in (("query", 4), ("key", 6), ("value", 6))
    )
    q, k = turn(q, 4), turn(k, 4)
    branches = ([z[None, :, i : i + 2] for i in (0, 2, 4)] for z in (k, v))
    gates = sigmoid(x @ p["gate.kernel"]).reshape(1, TIME, 4, 3)
    mlps = (None, None)
    if compression == "mlp":
        parts = ("position", "hidden", "hidden_bias", "output")
        mlps = [[p[f"compress_{n}.{part}"] for part in parts] for n in ("keys", "values")]
    mixed = dense_routed.nsa_attention(
        q[None], *branches, gates, mlps, None, initial_blocks=1, **NSA_SIZES
    )
    check(module, mixed[0].reshape(TIME, -1) @ p["output.kernel"], x)


def test_one_set_of_parameters_serves_moba_full_and_sparse():
    sparse = MoBAConfig(heads=4, kv_heads=2, head_width=6, block_size=3, top_k=2)
    configs = {
        "sparse": sparse,
        "full": dataclasses.replace(sparse, full=True),
        "all": dataclasses.replace(sparse, top_k=9),
        "attention": AttentionConfig(heads=4, kv_heads=2, head_width=6),
    }
    layers = {n: graph_and_shapes(config, WIDTH) for n, config in configs.items()}
    trees = {n: jax.tree.map(jnp.shape, shapes) for n, (_, shapes) in layers.items()}
    assert all(tree == trees["sparse"] for tree in trees.values())
    parameters = random_parameters(layers["sparse"][1])
    x = jax.random.normal(jax.random.key(0), (1, TIME, WIDTH))
    run = quick_jit(lambda: {n: nnx.merge(g, parameters)(x)[0] for n, (g, _) in layers.items()})
    outs = run()
    for name in ("all", "attention"):
        np.testing.assert_allclose(outs[name], outs["full"], rtol=0, atol=1e-5)
    assert np.abs(outs["sparse"] - outs["full"]).max() > 1e-2


def test_counts_are_those_of_the_tokens_seen():
    moba = MoBAConfig(heads=2, head_width=4, block_size=3, top_k=2)
    seen = scored = 0
    for t in range(11):
        scored += t // 3
        seen += t % 3 + 1 + 3 * min(t // 3, 1)
    mixing = (2 * scored + 4 * seen) * 8 / 11
    assert moba.flops_per_token(8, 6) == pytest.approx(2 * 8 * 8 * 4 + mixing)
    full = dataclasses.replace(moba, full=True)
    assert full.flops_per_token(8, 6) == pytest.approx(2 * 8 * 8 * 4 + 4 * 8 * 6)
    nsa = NSAConfig(heads=2, head_width=4, compression="mean", **NSA_SIZES)
    seen = 0
    for t in range(21):
        windows = sum(i + 4 <= t + 1 for i in range(0, 21, 2))
        selected = t + 1 if t < 12 else 8 + t % 4 + 1
        seen += windows + selected + min(t + 1, 5)
    assert nsa.flops_per_token(8, 11) == pytest.approx(2 * 8 * (8 * 8 + 6) + 4 * 8 * seen / 21)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoBAConfig(top_k=0), "MoBA.top_k must be >= 1, got 0"),
        (lambda: MoBAConfig(block_size=0), "MoBA.block_size must be >= 1, got 0"),
        (lambda: MoBAConfig(heads=4, kv_heads=3), "MoBA.heads must be a multiple of kv_heads"),
        (lambda: NSAConfig(block_size=40), "NSA.block_size must be a multiple of stride = 16"),
        (lambda: NSAConfig(compression_block=8), "NSA.compression_block must be a multiple"),
        (lambda: NSAConfig(compression_block=1, stride=1), "NSA.compression_block must be >= 2"),
        (lambda: NSAConfig(selected_blocks=2), "NSA.selected_blocks must be >= 3, got 2"),
        (lambda: NSAConfig(window=0), "NSA.window must be >= 1, got 0"),
        (lambda: NSAConfig(compression="max"), "NSA.compression: expected one of 'mlp', 'mean'"),
        (lambda: NSAConfig(rotary_fraction=2.0), "NSA.rotary_fraction: .* got 2.0"),
        (lambda: NSAConfig().flops_per_token(100, 1), "NSA.head_width = 64 does not divide"),
    ],
)
def test_bad_settings_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
