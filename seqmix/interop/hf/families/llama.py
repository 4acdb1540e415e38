# SPDX-License-Identifier: Apache-2.0
"""Llama (arXiv 2302.13971, 2407.21783) and what has its layout."""

from typing import Any

from seqmix.interop.hf.families import common, parts
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rope import write_rope
from seqmix.interop.hf.rules import Rule, block
from seqmix.layers import AttentionConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig


def _to_config(keys: Keys) -> HybridLMConfig:
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_width = keys.integer("head_dim", width // heads)
    bias = keys.flag("attention_bias", False)
    attention = AttentionConfig(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_width=head_width,
        bias=bias,
        output_bias=bias,
        **parts.whole_rope(keys, head_width=head_width),
    )
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout(["attention"] * keys.integer("num_hidden_layers")),
        mixers={"attention": attention},
        feed_forward=FeedForwardConfig(
            hidden=keys.integer("intermediate_size"),
            activation=common.read_activation(keys),
            bias=keys.flag("mlp_bias", False),
        ),
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    first = config.plan().elements[0]
    attention, part = config.mixer(first), config.feed_forward_of(first)
    if not isinstance(attention, AttentionConfig) or not isinstance(part, FeedForwardConfig):
        raise ValueError("every layer must be attention and a dense feed-forward part")
    heads, kv_heads = attention.head_counts(config.width)
    return {
        "intermediate_size": part.hidden_width(config.width),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": attention.head_width,
        "hidden_act": common.write_activation(part.activation),
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": attention.bias,
        "mlp_bias": part.bias,
        **write_rope(attention),
    }


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config)
    for index, element in enumerate(config.plan().elements):
        name = f"model.layers.{index}"
        rules += [
            *common.pre_norms(index, name),
            *common.attention(block(index, "mixer"), f"{name}.self_attn", config.mixer(element)),
            *common.feed_forward(
                block(index, "feed_forward"), f"{name}.mlp", config.feed_forward_of(element)
            ),
        ]
    return rules


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=("pretraining_tp",),
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
