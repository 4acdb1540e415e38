# SPDX-License-Identifier: Apache-2.0
"""Bamba (IBM, 2024): Mamba-2 and a few attention layers, each with a dense feed-forward part."""

from typing import Any

from seqmix.interop.hf.families import common, ssm
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rope import read_rope, write_rope
from seqmix.interop.hf.rules import Rule, block
from seqmix.layers import AttentionConfig, Mamba2Config
from seqmix.models import FeedForwardConfig, HybridLMConfig

# What the family's config always takes, whatever a file has beside `rope_parameters`.
_ROTARY_FRACTION = 0.5


def _to_config(keys: Keys) -> HybridLMConfig:
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers, epsilon = keys.integer("num_hidden_layers"), keys.number("rms_norm_eps", 1e-5)
    bias = keys.flag("attention_bias", False)
    keys.only("hidden_act", "silu", "swish")  # of the Mamba-2 layers as well
    keys.only("partial_rotary_factor", _ROTARY_FRACTION)
    chosen = keys.items("attn_layer_indices", ())
    if not all(isinstance(index, int) and 0 <= index < layers for index in chosen):
        raise keys.unsupported("attn_layer_indices", f"layers in [0, {layers}) are expected")
    mixers = {
        "mamba2": _mamba2(keys, width, epsilon),
        "attention": AttentionConfig(
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads),
            head_width=width // heads,
            bias=bias,
            output_bias=bias,
            **read_rope(keys, head_width=width // heads, fraction=_ROTARY_FRACTION),
        ),
    }
    elements = ["attention" if i in chosen else "mamba2" for i in range(layers)]
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout(elements),
        mixers={name: mixers[name] for name in dict.fromkeys(elements)},
        feed_forward=FeedForwardConfig(
            hidden=keys.integer("intermediate_size"), bias=keys.flag("mlp_bias", False)
        ),
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=epsilon,
    )


def _mamba2(keys: Keys, width: int, epsilon: float) -> Mamba2Config:
    expand, heads = keys.integer("mamba_expand", 2), keys.integer("mamba_n_heads", 128)
    if expand * width % heads:
        raise keys.unsupported("mamba_n_heads", f"it must divide {expand * width}")
    head_width = expand * width // heads
    if keys.raw("mamba_d_head", "auto") not in ("auto", head_width):
        raise keys.unsupported("mamba_d_head", f"{head_width} is expected")
    return Mamba2Config(
        expand=expand,
        head_width=head_width,
        state_size=keys.integer("mamba_d_state", 256),
        groups=keys.integer("mamba_n_groups", 1),
        convolution=keys.integer("mamba_d_conv", 4),
        bias=keys.flag("mamba_proj_bias", False),
        convolution_bias=keys.flag("mamba_conv_bias", True),
        dt_limit=ssm.read_dt_limit(keys),
        norm_epsilon=epsilon,
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    elements = config.plan().elements
    mixers = [config.mixer(element) for element in elements]
    part = config.feed_forward_of(elements[0])
    attention = [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionConfig)]
    mamba2 = [mixer for mixer in mixers if isinstance(mixer, Mamba2Config)]
    if len(attention) + len(mamba2) < len(mixers) or not mamba2:
        raise ValueError("every layer must be Mamba-2, at least one, or attention")
    if not isinstance(part, FeedForwardConfig):
        raise ValueError("every layer must have a dense feed-forward part")
    mixer = mamba2[0]
    inner, heads = mixer.sizes(config.width)
    values: dict[str, Any] = {
        "intermediate_size": part.hidden_width(config.width),
        "rms_norm_eps": config.norm_epsilon,
        "mlp_bias": part.bias,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "attn_layer_indices": attention,
        "mamba_expand": ssm.whole_expansion(inner, config.width),
        "mamba_n_heads": heads,
        "mamba_d_head": mixer.head_width,
        "mamba_d_state": mixer.state_size,
        "mamba_n_groups": mixer.groups,
        "mamba_d_conv": mixer.convolution,
        "mamba_proj_bias": mixer.bias,
        "mamba_conv_bias": mixer.convolution_bias,
        **ssm.write_dt_limit(mixer.dt_limit),
    }
    if attention:
        first = mixers[attention[0]]
        heads, kv_heads = first.head_counts(config.width)
        values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        values |= {"attention_bias": first.bias, **write_rope(first)}
        # Without it, the family's own default would hold.
        values["rope_parameters"]["partial_rotary_factor"] = first.rotary_fraction
    return values


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config, norm="model.final_layernorm.weight")
    for index, element in enumerate(config.plan().elements):
        name, mixer = f"model.layers.{index}", config.mixer(element)
        rules += common.pre_norms(index, name, feed_forward="pre_ff_layernorm")
        path = block(index, "mixer")
        if isinstance(mixer, Mamba2Config):
            rules += ssm.mamba2(path, f"{name}.mamba", mixer, config.width)
        else:
            rules += common.attention(path, f"{name}.self_attn", mixer)
        part = config.feed_forward_of(element)
        rules += common.feed_forward(block(index, "feed_forward"), f"{name}.feed_forward", part)
    return rules


FAMILY = Family(
    name="bamba",
    architectures=("BambaForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=("mamba_chunk_size", "z_loss_coefficient"),
)
