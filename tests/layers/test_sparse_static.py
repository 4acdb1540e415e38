# SPDX-License-Identifier: Apache-2.0
"""Longformer and BigBird layers: their formulas, counts, and the forms that are not causal."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import BigBirdConfig, LongformerConfig
from seqmix.models import HybridLMConfig
from seqmix.training import Experiment
from tests.layers.modules import graph_and_shapes
from tests.layers.test_formulas import TIME, WIDTH, build, check
from tests.mixers import dense_block_sparse as dense
from tests.mixers.sparse import sparing

LONGFORMER = LongformerConfig(
    heads=4, kv_heads=2, head_width=6, window=4, global_tokens=2, rotary_fraction=0.0, bias=True
)
BIGBIRD = BigBirdConfig(
    heads=4,
    kv_heads=2,
    head_width=6,
    block_size=2,
    window_blocks=1,
    random_blocks=1,
    seed=5,
    rotary_fraction=0.0,
    bias=True,
)


def projected(parameters, x, *names):
    """[1, T, heads, K] each."""
    arrays = (x @ parameters[f"{n}.kernel"] + parameters[f"{n}.bias"] for n in names)
    return [a.reshape(1, TIME, -1, 6) for a in arrays]


@pytest.mark.parametrize(
    ("separate", "causal"),
    sparing(itertools.product((True, False), repeat=2), [(True, False)]),
)
def test_longformer(separate, causal):
    config = dataclasses.replace(LONGFORMER, global_projections=separate, causal=causal)
    module, parameters = build(config)
    x = np.random.default_rng(1).normal(size=(TIME, WIDTH))
    local = projected(parameters, x, "query", "key", "value")
    names = ("global_query", "global_key", "global_value")
    rows = projected(parameters, x, *names) if separate else local
    out = dense.longformer(local, rows, None, window=4, tokens=2, causal=causal)
    check(module, out.reshape(TIME, -1) @ parameters["output.kernel"], x)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bigbird(causal):
    module, parameters = build(dataclasses.replace(BIGBIRD, causal=causal))
    x = np.random.default_rng(1).normal(size=(TIME, WIDTH))
    arrays = projected(parameters, x, "query", "key", "value")
    out = dense.bigbird(*arrays, None, block=2, window=1, random=1, seed=5, causal=causal)
    check(module, out.reshape(TIME, -1) @ parameters["output.kernel"], x)


@pytest.mark.parametrize("causal", [True, False])
def test_mean_keys_are_counted(causal):
    for time in (1, 2, 5, 8, 33):
        config = dataclasses.replace(LONGFORMER, window=6, global_tokens=3, causal=causal)
        pairs = 0
        for t in range(time):
            near = range(t - 5, t + 1) if causal else range(t - 3, t + 4)
            seen = {s for s in {*near, *range(3)} if 0 <= s < time and (s <= t or not causal)}
            pairs += len(seen) + (t < 3) * (t + 1 if causal else time)
        assert config.mean_keys((time + 1) / 2) == pytest.approx(pairs / time)

        config = BigBirdConfig(block_size=3, window_blocks=3, random_blocks=2, causal=causal)
        pairs, blocks = 0, -(-time // 3)
        for t in range(time):
            sees = dense.bigbird_blocks(
                t // 3, blocks, window=3, random=2, causal=causal, seed=0, head=0
            )
            pairs += sum(s // 3 in sees and (s <= t or not causal) for s in range(time))
        assert config.mean_keys((time + 1) / 2) == pytest.approx(pairs / time)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("longformer", LongformerConfig(causal=False)),
        ("bigbird", BigBirdConfig(causal=False)),
    ],
)
def test_forms_that_read_later_tokens_neither_decode_nor_train_on_next_tokens(name, config):
    graph, shapes = graph_and_shapes(config, 128)
    layer = nnx.merge(graph, shapes)
    with pytest.raises(ValueError, match="is not causal and cannot decode"):
        layer.init_cache(1, 8)
    cache = graph_and_shapes(dataclasses.replace(config, causal=True), 128)
    cache = jax.eval_shape(lambda: nnx.merge(*cache).init_cache(1, 8))
    with pytest.raises(ValueError, match="is not causal and cannot decode: it takes no cache"):
        jax.eval_shape(lambda x, c: layer(x, cache=c)[0], jnp.zeros((1, 4, 128)), cache)
    assert config.cache_bytes(128, 8, "float32") == 0

    def model(config):
        return HybridLMConfig(pattern=name, layers=1, width=128, mixers={name: config})

    Experiment(model=model(dataclasses.replace(config, causal=True)))
    with pytest.raises(ValueError, match=f"HybridLM.pattern has '{name}', which reads later"):
        Experiment(model=model(config))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LongformerConfig(window=0), "Longformer.window must be >= 1, got 0"),
        (lambda: LongformerConfig(window=5, causal=False), "window must be even .* got 5"),
        (lambda: LongformerConfig(global_tokens=-1), "Longformer.global_tokens must be >= 0"),
        (lambda: LongformerConfig(rotary_fraction=2.0), "Longformer.rotary_fraction: .* got 2.0"),
        (lambda: LongformerConfig(heads=4, kv_heads=3), "Longformer.heads must be a multiple"),
        (lambda: BigBirdConfig(block_size=0), "BigBird.block_size must be >= 1, got 0"),
        (lambda: BigBirdConfig(window_blocks=2, causal=False), "BigBird.window_blocks must be odd"),
        (lambda: BigBirdConfig(seed=-1), "BigBird.seed must be >= 0, got -1"),
        (lambda: BigBirdConfig().flops_per_token(100, 1), "head_width = 64 does not divide"),
    ],
)
def test_bad_settings_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
