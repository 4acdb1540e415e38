# SPDX-License-Identifier: Apache-2.0
"""Jamba (arXiv 2403.19887): Mamba with inner norms, attention without positions, experts."""

from collections.abc import Sequence
from typing import Any

from seqmix.interop.hf.families import common, ssm
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rules import Rule, block, kernel
from seqmix.layers import AttentionConfig, MambaConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig, MoEConfig


def _to_config(keys: Keys) -> HybridLMConfig:
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers, experts = keys.integer("num_hidden_layers"), keys.integer("num_experts", 16)
    hidden, epsilon = keys.integer("intermediate_size"), keys.number("rms_norm_eps", 1e-6)
    keys.only("hidden_act", "silu", "swish")  # of the Mamba layers as well
    keys.only("mamba_inner_layernorms", True)
    if keys.has("sliding_window"):
        raise keys.unsupported("sliding_window", "attention is to all tokens")
    attention_at = _places(keys, "attn_layer", layers, 8, 4)
    experts_at = _places(keys, "expert_layer", layers, 2, 1)
    if experts == 1:
        experts_at = []
    mixers: dict[str, Any] = {
        "mamba": MambaConfig(
            expand=keys.number("mamba_expand", 2),
            state_size=keys.integer("mamba_d_state", 16),
            convolution=keys.integer("mamba_d_conv", 4),
            dt_rank=ssm.read_dt_rank(keys, "mamba_dt_rank"),
            bias=keys.flag("mamba_proj_bias", False),
            convolution_bias=keys.flag("mamba_conv_bias", True),
            inner_norms=True,
            norm_epsilon=epsilon,
        ),
        "attention": AttentionConfig(
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads),
            head_width=width // heads,
            rotary_fraction=0.0,
        ),
        "moe": MoEConfig(
            experts=experts,
            top_k=keys.integer("num_experts_per_tok", 2),
            hidden=hidden,
            renormalise=False,
        ),
    }
    parts = [
        ("attention" if i in attention_at else "mamba", "moe" if i in experts_at else "")
        for i in range(layers)
    ]
    used = {name for part in parts for name in part}
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout([f"{mixer} + {part}" if part else mixer for mixer, part in parts]),
        mixers={name: mixer for name, mixer in mixers.items() if name in used},
        feed_forward=FeedForwardConfig(hidden=hidden),
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=epsilon,
    )


def _places(keys: Keys, name: str, layers: int, period: int, offset: int) -> list[int]:
    """Layers of one kind, from ``<name>_period`` and ``<name>_offset``."""
    period = keys.integer(f"{name}_period", period)
    offset = keys.integer(f"{name}_offset", offset, least=0)
    return [i for i in range(layers) if i % period == offset]


def _find_places(name: str, places: Sequence[int], layers: int) -> dict[str, int]:
    """The period and offset of layers of one kind.

    Raises:
      ValueError: they do not follow one another at one distance.
    """
    for period in range(1, layers + 2):
        for offset in range(period):
            if [i for i in range(layers) if i % period == offset] == list(places):
                return {f"{name}_period": period, f"{name}_offset": offset}
    raise ValueError(f"{name}_period: the layers {list(places)} are not at one distance")


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    elements = config.plan().elements
    mixers = [config.mixer(element) for element in elements]
    parts = [config.feed_forward_of(element) for element in elements]
    attention = [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionConfig)]
    mamba = [i for i, mixer in enumerate(mixers) if isinstance(mixer, MambaConfig)]
    experts = [i for i, part in enumerate(parts) if isinstance(part, MoEConfig)]
    if len(attention) + len(mamba) < len(mixers) or not mamba or None in parts:
        raise ValueError(
            "every layer must be Mamba, at least one, or attention, with a feed-forward part"
        )
    mixer, part = mixers[mamba[0]], parts[0]
    inner, rank = mixer.sizes(config.width)
    values: dict[str, Any] = {
        "intermediate_size": part.hidden_width(config.width),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": config.norm_epsilon,
        "mamba_expand": ssm.whole_expansion(inner, config.width),
        "mamba_d_state": mixer.state_size,
        "mamba_d_conv": mixer.convolution,
        "mamba_dt_rank": rank,
        "mamba_conv_bias": mixer.convolution_bias,
        "mamba_proj_bias": mixer.bias,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        **_find_places("attn_layer", attention, config.layers),
        **_find_places("expert_layer", experts, config.layers),
    }
    if attention:
        heads, kv_heads = mixers[attention[0]].head_counts(config.width)
        values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if experts:
        part = parts[experts[0]]
        values |= {"num_experts": part.experts, "num_experts_per_tok": part.top_k}
    return values


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config, norm="model.final_layernorm.weight")
    for index, element in enumerate(config.plan().elements):
        name, mixer = f"model.layers.{index}", config.mixer(element)
        rules += common.pre_norms(index, name, feed_forward="pre_ff_layernorm")
        path = block(index, "mixer")
        if isinstance(mixer, MambaConfig):
            rules += ssm.mamba(path, f"{name}.mamba", mixer, config.width)
        else:
            rules += common.attention(path, f"{name}.self_attn", mixer)
        part, path = config.feed_forward_of(element), block(index, "feed_forward")
        name = f"{name}.feed_forward"
        if isinstance(part, MoEConfig):
            rules.append(kernel((*path, "router", "kernel"), f"{name}.router.weight"))
            rules += common.separate_experts(path, name, part)
        else:
            rules += common.feed_forward(path, name, part)
    return rules


FAMILY = Family(
    name="jamba",
    architectures=("JambaForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=("calc_logits_for_entire_prompt", "use_associative_scan", "use_mambapy"),
)
