# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side, multipliers everywhere."""

from typing import Any

from seqmix.interop.hf.families import common, parts, ssm
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys, real
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rope import write_rope
from seqmix.interop.hf.rules import Rule, block
from seqmix.layers import AttentionConfig, Mamba2Config, ParallelHeadsConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig


def _factors(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    values = keys.items(key, (1.0,) * count)
    try:
        factors = tuple(map(real, values))
    except ValueError:
        factors = ()
    if len(factors) != count:
        raise keys.unsupported(key, f"{count} numbers are expected")
    return factors


def _mamba2(keys: Keys, width: int, epsilon: float) -> Mamba2Config:
    heads = keys.integer("mamba_n_heads", 128)
    inner = keys.integer("mamba_d_ssm", int(keys.number("mamba_expand", 2) * width))
    head_width = keys.raw("mamba_d_head", "auto")
    if head_width not in ("auto", inner // heads) or inner % heads:
        raise keys.unsupported(
            "mamba_d_head", f"times mamba_n_heads = {heads} it must be the inner width {inner}"
        )
    norm = keys.flag("mamba_rms_norm", False)
    bias, output_bias = keys.flag("mamba_proj_bias", False), keys.flag("projectors_bias", False)
    return Mamba2Config(
        expand=inner / width,
        head_width=inner // heads,
        state_size=keys.integer("mamba_d_state", 256),
        groups=keys.integer("mamba_n_groups", 1),
        convolution=keys.integer("mamba_d_conv", 4),
        bias=bias,
        output_bias=output_bias,
        convolution_bias=keys.flag("mamba_conv_bias", True),
        norm=norm,
        norm_before_gate=keys.flag("mamba_norm_before_gate", True) and norm,
        multipliers=_factors(keys, "ssm_multipliers", 5),
        dt_limit=ssm.read_dt_limit(keys),
        norm_epsilon=epsilon,
    )


def _to_config(keys: Keys) -> HybridLMConfig:
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_width, epsilon = (
        keys.integer("head_dim", width // heads),
        keys.number("rms_norm_eps", 1e-5),
    )
    keys.only("hidden_act", "silu", "swish")  # of the convolutions as well
    bias = keys.flag("attention_bias", False)
    attention = AttentionConfig(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_width=head_width,
        bias=bias,
        output_bias=bias,
        key_multiplier=keys.number("key_multiplier", 1.0),
        **parts.whole_rope(keys, head_width=head_width),
    )
    heads_config = ParallelHeadsConfig(
        attention=attention,
        ssm=_mamba2(keys, width, epsilon),
        merge="sum",
        attention_in=keys.number("attention_in_multiplier", 1.0),
        attention_out=keys.number("attention_out_multiplier", 1.0),
        ssm_in=keys.number("ssm_in_multiplier", 1.0),
        ssm_out=keys.number("ssm_out_multiplier", 1.0),
    )
    gate, down = _factors(keys, "mlp_multipliers", 2)
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout(["parallel_heads"] * keys.integer("num_hidden_layers")),
        mixers={"parallel_heads": heads_config},
        feed_forward=FeedForwardConfig(
            hidden=keys.integer("intermediate_size"),
            bias=keys.flag("mlp_bias", False),
            gate_multiplier=gate,
            down_multiplier=down,
        ),
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=epsilon,
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        logits_multiplier=keys.number("lm_head_multiplier", 1.0),
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    parts.kinds(config, {ParallelHeadsConfig: ""}, "parallel heads")
    mixer, part = parts.pick(config, ParallelHeadsConfig), parts.pick(config, FeedForwardConfig)
    if part is None or any(parts.has_experts(config)):
        raise ValueError("every feed-forward part must be dense")
    attention, mamba2 = mixer.attention, mixer.ssm
    if not isinstance(mamba2, Mamba2Config):
        raise ValueError("ParallelHeads.ssm must be @Mamba2()")
    heads, kv_heads = attention.head_counts(config.width)
    inner, ssm_heads = mamba2.sizes(config.width)
    return {
        "intermediate_size": part.hidden_width(config.width),
        "mlp_bias": part.bias,
        "mlp_multipliers": [part.gate_multiplier, part.down_multiplier],
        "rms_norm_eps": config.norm_epsilon,
        "embedding_multiplier": config.embedding_multiplier,
        "lm_head_multiplier": config.logits_multiplier,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": attention.head_width,
        "attention_bias": attention.bias,
        "key_multiplier": attention.key_multiplier,
        "attention_in_multiplier": mixer.attention_in,
        "attention_out_multiplier": mixer.attention_out,
        "ssm_in_multiplier": mixer.ssm_in,
        "ssm_out_multiplier": mixer.ssm_out,
        "ssm_multipliers": list(mamba2.multipliers),
        "mamba_d_ssm": inner,
        "mamba_n_heads": ssm_heads,
        "mamba_d_head": mamba2.head_width,
        "mamba_d_state": mamba2.state_size,
        "mamba_n_groups": mamba2.groups,
        "mamba_d_conv": mamba2.convolution,
        "mamba_conv_bias": mamba2.convolution_bias,
        "mamba_proj_bias": mamba2.bias,
        "projectors_bias": mamba2.has_output_bias,
        "mamba_rms_norm": mamba2.norm,
        "mamba_norm_before_gate": mamba2.norm_before_gate,
        **ssm.write_dt_limit(mamba2.dt_limit),
        **write_rope(attention),
    }


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config, norm="model.final_layernorm.weight")
    for index, element in enumerate(config.plan().elements):
        name, path = f"model.layers.{index}", block(index, "mixer")
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        rules += [
            *common.pre_norms(index, name, feed_forward="pre_ff_layernorm"),
            *common.attention((*path, "attention"), f"{name}.self_attn", mixer.attention),
            *ssm.mamba2((*path, "ssm"), f"{name}.mamba", mixer.ssm, config.width),
            *common.feed_forward(block(index, "feed_forward"), f"{name}.feed_forward", part),
        ]
    return rules


FAMILY = Family(
    name="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=("mamba_chunk_size", "mamba_use_mlp"),
)
