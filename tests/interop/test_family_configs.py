# SPDX-License-Identifier: Apache-2.0
"""What families read of a config.json beside what the fixtures have, and what they refuse."""

import dataclasses
import json
import math

import numpy as np
import pytest

from seqmix.interop.hf import families
from seqmix.interop.hf.families.joint import interleaved
from seqmix.interop.hf.layout import differences
from seqmix.interop.hf.loading import read_config
from seqmix.layers import AttentionConfig, DSAConfig, GatedDeltaNetConfig, MLAConfig
from seqmix.models import HybridLMConfig, MoEConfig, ResidualConfig
from tests.interop.cases import FIXTURES


def values_of(case, **changes):
    values = json.loads((FIXTURES / case / "config.json").read_text())
    return {key: value for key, value in (values | changes).items() if value is not ...}


def test_kimi_linear_as_published():
    """The published files number the layers from 1, in an object of their own."""
    case = "kimi_linear/experts"
    published = values_of(
        case,
        layer_types=...,
        mlp_layer_types=...,
        linear_head_dim=...,
        linear_num_heads=...,
        linear_conv_kernel_dim=...,
        linear_attn_config={
            "full_attn_layers": [3, 5],
            "kda_layers": [1, 2, 4],
            "head_dim": 8,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        first_k_dense_replace=1,
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
    )
    assert differences(read_config(published), read_config(values_of(case))) == []


def test_defaults_for_layers_that_are_not_listed():
    config = read_config(values_of("qwen3_next/dense", layer_types=..., full_attention_interval=2))
    names = [element.name for element in config.plan().elements]
    assert names == ["gated_delta_net", "attention"] * 3 + ["gated_delta_net"]
    config = read_config(values_of("minimax/experts", layer_types=...))
    assert [e.name for e in config.plan().elements] == ["attention", "lightning"] * 2 + [
        "attention"
    ]
    config = read_config(values_of("deepseek_v32/deep", mlp_layer_types=...))
    experts = [isinstance(config.feed_forward_of(e), MoEConfig) for e in config.plan().elements]
    assert experts == [False, False, True, True, True]
    config = read_config(values_of("zamba/deep", layers_block_type=...))
    names = [element.name for element in config.plan().elements]
    assert [i for i, name in enumerate(names) if name == "shared_block"] == [2, 4]


def test_zamba2_cuts_time_steps_off_below_alone():
    config = read_config(values_of("zamba2/biased"))
    assert config.mixers["mamba2"].dt_limit == (0.05, math.inf)
    # `transformers` takes the logarithm of the least one, so that no limit cannot be a zero.
    free = read_config(values_of("zamba2/biased", time_step_min=0.0))
    assert free.mixers["mamba2"].dt_limit is None
    assert 0 < families.get("zamba2").from_config(free)["time_step_min"] < 1e-20


def test_olmo_hybrid_has_no_positions_where_their_base_is_null():
    rope = {"rope_type": "default", "rope_theta": None}
    config = read_config(values_of("olmo_hybrid/biased", rope_parameters=rope))
    assert config.mixers["post/attention"].rotary_fraction == 0
    config = read_config(values_of("olmo_hybrid/biased", rope_parameters=None))
    assert config.mixers["post/attention"].rotary_fraction == 1
    assert config.mixers["post/attention"].rotary_base == 10_000


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3_next/experts", {"hidden_act": "gelu"}, 'hidden_act = "gelu": the convolutions'),
        (
            "qwen3_next/experts",
            {"layer_types": ["full_attention"]},
            "layer_types = .*: 5 layers of",
        ),
        ("kimi_linear/experts", {"mla_use_nope": False}, "mla_use_nope = false: supported: true"),
        ("kimi_linear/experts", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        (
            "kimi_linear/experts",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [1], "kda_layers": []},
            },
            "full_attn_layers and kda_layers must share out 1 to 5",
        ),
        (
            "minimax/experts",
            {"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.5}},
            "rope_parameters = .*: the family rotates whole heads",
        ),
        ("minimax/experts", {"hidden_act": "gelu"}, 'hidden_act = "gelu": lightning'),
        ("deepseek_v32/deep", {"scoring_func": "softmax"}, 'scoring_func = "softmax"'),
        ("deepseek_v32/deep", {"index_head_dim": 2}, "index_head_dim = 2: at least"),
        ("deepseek_v32/deep", {"mlp_bias": True}, "mlp_bias = true"),
        ("olmo_hybrid/grouped", {"hidden_act": "gelu"}, "hidden_act"),
        ("falcon_h1/deep", {"ssm_multipliers": [1.0]}, "ssm_multipliers = .*: 5 numbers"),
        ("falcon_h1/deep", {"mamba_d_head": 5}, "mamba_d_head = 5"),
        ("zamba/heads", {"attention_hidden_size": 32}, "attention_hidden_size = 32"),
        ("zamba/heads", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act"),
        (
            "zamba2/two_blocks",
            {"num_key_value_heads": 1},
            "num_key_value_heads = 1: with use_shared",
        ),
        ("zamba2/two_blocks", {"tie_word_embeddings": False}, "shares no block between layers"),
        ("zamba2/two_blocks", {"layers_block_type": None}, "layers_block_type = null"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_key_and_value(case, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(values_of(case, **changes))


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("qwen3_next", {"pattern": "mamba"}, "layer 0 is 'mamba'"),
        ("qwen3_next", {"pattern": "attention", "feed_forward": None}, "layer 0 .* has none"),
        ("qwen3_next", {"pattern": "attention", "feed_forward": MoEConfig()}, "have a shared one"),
        ("olmo_hybrid", {"pattern": "gated_delta_net"}, "layers of both kinds"),
        ("minimax", {"pattern": "lightning"}, "must have experts"),
        ("deepseek_v32", {"pattern": "dsa"}, "DSA.attention must be @MLA"),
        ("falcon_h1", {"pattern": "parallel_heads"}, "must be @Mamba2"),
        ("zamba", {"pattern": "mamba"}, "there must be a shared block"),
        ("zamba2", {"pattern": "shared_block"}, "adapter_rank is needed"),
    ],
)
def test_models_without_a_form_in_a_family_are_refused(family, config, message):
    with pytest.raises(ValueError, match=message):
        families.get(family).from_config(HybridLMConfig(**config))


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "qwen3_next/biased",
            {"mixers": GatedDeltaNetConfig(heads=1, beta_bias=True)},
            "beta_bias",
        ),
        ("olmo_hybrid/grouped", {"residual": ResidualConfig(alpha=2.0)}, "Residual.alpha"),
        (
            "deepseek_v32/deep",
            {"mixers": DSAConfig(stage="warmup", attention=MLAConfig(heads=2))},
            "stage",
        ),
        ("minimax/experts", {"mixers": AttentionConfig(heads=4, qk_norm=True)}, "qk_norm"),
    ],
)
def test_settings_beside_those_of_a_family_are_differences(case, change, message):
    config = read_config(values_of(case))
    if "mixers" in change:
        new = change["mixers"]
        kept = {k: new if type(v) is type(new) else v for k, v in config.mixers.items()}
        change = {"mixers": kept}
    other = dataclasses.replace(config, **change)
    assert any(message in line for line in differences(other, config))


def test_interleaved_parameters_take_turns():
    rule = interleaved([("a",), ("b",)], "ab", 2, [2, 1])
    tensor = np.arange(18).reshape(6, 3)
    a, b = rule.load([tensor])
    np.testing.assert_array_equal(a.T, tensor[[0, 1, 3, 4]])
    np.testing.assert_array_equal(b.T, tensor[[2, 5]])
    np.testing.assert_array_equal(rule.save([a, b])[0], tensor)
