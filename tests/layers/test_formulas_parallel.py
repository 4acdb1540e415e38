# SPDX-License-Identifier: Apache-2.0
"""Parallel heads and RWKV's channel mixing against their formulas in float64."""

import numpy as np
import pytest

from seqmix import config as configs
from seqmix.layers import (
    AttentionConfig,
    GLAConfig,
    Mamba2Config,
    MambaConfig,
    ParallelHeadsConfig,
    RWKV7Config,
    RWKVChannelMixConfig,
    VMambaConfig,
)
from seqmix.models import HybridLMConfig
from tests.layers.test_formulas import TIME, WIDTH, build, check, rms, sigmoid
from tests.layers.test_formulas_attention import BASE, softmax_rows, turn
from tests.layers.test_formulas_elementwise import mamba_heads

MAMBA = MambaConfig(expand=2, state_size=5, dt_rank=3, inner_norms=True, norm_epsilon=1e-2)


def of(p, branch):
    return {n.removeprefix(f"{branch}."): v for n, v in p.items() if n.startswith(f"{branch}.")}


def attention_heads(x, p, value_width, window=None, prefix=0):
    q, k, v = (x @ p[f"{n}.kernel"] for n in ("query", "key", "value"))
    q, k = (turn(z.reshape(TIME, -1, 4), 4) for z in (q, k))
    v = v.reshape(TIME, -1, value_width)
    return softmax_rows(q, k, v, 0.5, window, prefix=prefix).reshape(TIME, -1)


def test_falcon_h1_adds_scaled_branches():
    attention = AttentionConfig(heads=6, kv_heads=3, head_width=4, rotary_base=BASE)
    factors = {"attention_in": 0.5, "attention_out": 1.5, "ssm_in": 2.0, "ssm_out": 0.25}
    module, p = build(ParallelHeadsConfig(attention=attention, ssm=MAMBA, **factors))
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    a, s = of(p, "attention"), of(p, "ssm")
    attended = attention_heads(0.5 * x, a, 4) @ a["output.kernel"]
    mixed = mamba_heads(2.0 * x, s, True) @ s["output.kernel"]
    check(module, 1.5 * attended + 0.25 * mixed, x)


def test_hymba_takes_the_mean_of_normed_heads():
    attention = AttentionConfig(
        heads=3, kv_heads=1, head_width=4, value_width=8, window=4, prefix=2, rotary_base=BASE
    )
    module, p = build(
        ParallelHeadsConfig(
            attention=attention, ssm=MAMBA, merge="mean", output_bias=True, norm_epsilon=1e-2
        )
    )
    assert not [n for n in p if n.startswith(("attention.output", "ssm.output"))]
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    heads = attention_heads(x, of(p, "attention"), 8, 4, 2), mamba_heads(x, of(p, "ssm"), True)
    scales = p["attention_norm.scale"], p["ssm_norm.scale"]
    joined = sum(rms(h, 1e-2) * scale for h, scale in zip(heads, scales, strict=True)) / 2
    check(module, joined @ p["output.kernel"] + p["output.bias"], x)


@pytest.mark.parametrize("version", [6, 7])
def test_channel_mix(version):
    module, p = build(RWKVChannelMixConfig(version=version))
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    past = np.concatenate([np.zeros((1, WIDTH)), x[:-1]])
    hidden = (x + (past - x) * p["mix_key"]) @ p["key.kernel"]
    assert hidden.shape[1] == {6: 32, 7: 48}[version]
    y = np.maximum(hidden, 0) ** 2 @ p["value.kernel"]
    if version == 6:
        y = y * sigmoid((x + (past - x) * p["mix_receptance"]) @ p["receptance.kernel"])
    check(module, y, x)


def test_published_hidden_widths():
    # RWKV-6 of 2048 channels, RWKV-7 of 1024.
    assert RWKVChannelMixConfig(version=6).hidden_width(2048) == 7168
    assert RWKVChannelMixConfig(version=6).hidden_width(2560) == 8960
    assert RWKVChannelMixConfig().hidden_width(1024) == 4096


def test_gin_configures_both_branches_in_the_scope_of_the_layer():
    text = """
        HybridLM.pattern = 'local/parallel_heads, parallel_heads'
        ParallelHeads.ssm = @Mamba2()
        Mamba2.state_size = 16
        Attention.kv_heads = 2
        local/Attention.window = 32
        local/Attention.prefix = 4
        """
    mixers = configs.from_text(text, filename="t.gin").build(HybridLMConfig).mixers
    shared = {"ssm": Mamba2Config(state_size=16)}
    assert mixers["parallel_heads"] == ParallelHeadsConfig(AttentionConfig(kv_heads=2), **shared)
    assert mixers["local/parallel_heads"] == ParallelHeadsConfig(
        AttentionConfig(kv_heads=2, window=32, prefix=4), **shared
    )


def test_sums_take_any_layer_that_stands_alone():
    attention = AttentionConfig(heads=2, head_width=4)
    module, p = build(ParallelHeadsConfig(attention=attention, ssm=GLAConfig(heads=2)))
    assert {n.split(".")[0] for n in p} == {"attention", "ssm"}
    assert module(np.ones((1, 3, WIDTH), np.float32))[0].shape == (1, 3, WIDTH)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelHeadsConfig(ssm=RWKV7Config()), "neither shares .* got RWKV7"),
        (lambda: ParallelHeadsConfig(ssm=VMambaConfig()), "must be a causal layer .* got VMamba"),
        (lambda: ParallelHeadsConfig(ssm=3), "must be the config of a layer.* got 3"),
        (lambda: ParallelHeadsConfig(ssm=GLAConfig(), merge="mean"), "@Mamba2.* got GLA"),
        (lambda: ParallelHeadsConfig(ssm_in=-1.0), "ParallelHeads.ssm_in must be positive, got -1"),
        (
            lambda: ParallelHeadsConfig(merge="mean", ssm_out=2.0),
            "ssm_out has no meaning where .*m",
        ),
        (lambda: ParallelHeadsConfig(output_bias=True), "output_bias has no meaning where .*'sum'"),
        (
            lambda: ParallelHeadsConfig(AttentionConfig(output_bias=True), merge="mean"),
            "set ParallelHeads.output_bias instead of Attention.output_bias",
        ),
        (
            lambda: ParallelHeadsConfig(ssm=Mamba2Config(output_bias=True), merge="mean"),
            "set ParallelHeads.output_bias instead of Mamba2.output_bias",
        ),
        (
            lambda: HybridLMConfig(
                pattern="parallel_heads",
                mixers={"parallel_heads": ParallelHeadsConfig(merge="mean")},
            ),
            r"heads \* value_width = 256 and the inner width 512 of Mamba",
        ),
    ],
)
def test_bad_settings_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
