# SPDX-License-Identifier: Apache-2.0
"""RecurrentGemma (arXiv 2404.07839): Griffin's recurrent blocks and attention to a window."""

import math
from typing import Any

import ml_dtypes
import numpy as np

from seqmix.interop.hf.families import common
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rope import read_rope, write_rope
from seqmix.interop.hf.rules import Path, Rule, block, convolution, linear, plain, reshaped
from seqmix.layers import AttentionConfig, RGLRUConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig

_PARTS = {"recurrent": "rg_lru", "attention": "attention"}
_ROTARY_FRACTION = 0.5


def _to_config(keys: Keys) -> HybridLMConfig:
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers, hidden = keys.integer("num_hidden_layers"), keys.integer("intermediate_size")
    if hidden % 2:
        raise keys.unsupported("intermediate_size", "an even number is expected, of two halves")
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    types = keys.items("block_types", ("recurrent", "recurrent", "attention"))
    if not types or not set(types) <= set(_PARTS):
        raise keys.unsupported("block_types", f"a list of {', '.join(_PARTS)} is expected")
    head_width = keys.integer("head_dim", width // heads)
    rope = read_rope(keys, head_width=head_width, fraction=_ROTARY_FRACTION)
    if rope["rotary_scaling"] is not None:
        raise keys.unsupported("rope_parameters", "the family has no scaled positions")
    mixers = {
        "rg_lru": RGLRUConfig(
            expand=keys.integer("lru_width", width) / width,
            heads=heads,
            convolution=keys.integer("conv1d_width", 4),
        ),
        "attention": AttentionConfig(
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads),
            head_width=head_width,
            window=keys.integer("attention_window_size", 2048),
            bias=keys.flag("attention_bias", False),
            output_bias=True,
            **rope,
        ),
    }
    elements = [_PARTS[types[i % len(types)]] for i in range(layers)]
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout(elements),
        mixers={name: mixers[name] for name in dict.fromkeys(elements)},
        feed_forward=FeedForwardConfig(hidden=hidden // 2, activation="gelu_tanh", bias=True),
        tied=keys.flag("tie_word_embeddings", True),
        norm="zero_centred",
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        embedding_multiplier=_multiplier(width),
        logit_softcap=keys.number("logits_soft_cap", 30.0),
    )


def _multiplier(width: int) -> float:
    """sqrt(width) as the family holds it: in bfloat16."""
    return float(np.asarray(math.sqrt(width), ml_dtypes.bfloat16))


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    elements = config.plan().elements
    mixers = [config.mixer(element) for element in elements]
    types = {RGLRUConfig: "recurrent", AttentionConfig: "attention"}
    if not all(type(mixer) in types for mixer in mixers):
        raise ValueError("every layer must be an RG-LRU or attention")
    part = config.feed_forward_of(elements[0])
    if not isinstance(part, FeedForwardConfig):
        raise ValueError("every layer must have a dense feed-forward part")
    recurrent = next((m for m in mixers if isinstance(m, RGLRUConfig)), None)
    attention = next((m for m in mixers if isinstance(m, AttentionConfig)), None)
    values: dict[str, Any] = {
        "intermediate_size": 2 * part.hidden_width(config.width),
        "rms_norm_eps": config.norm_epsilon,
        "logits_soft_cap": config.logit_softcap,
        "block_types": [types[type(mixer)] for mixer in mixers],
    }
    if recurrent is not None:
        values |= {
            "lru_width": recurrent.sizes(config.width),
            "conv1d_width": recurrent.convolution,
            "num_attention_heads": recurrent.heads,
        }
    if attention is not None:
        heads, kv_heads = attention.head_counts(config.width)
        values |= {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": attention.head_width,
            "attention_window_size": attention.window,
            "attention_bias": attention.bias,
            **write_rope(attention),
        }
        # Without it, the family's own default would hold.
        values["rope_parameters"]["partial_rotary_factor"] = attention.rotary_fraction
    return values


def _recurrent(path: Path, name: str, config: RGLRUConfig, width: int) -> list[Rule]:
    inner, heads = config.sizes(width), config.heads
    rules = [
        *linear((*path, "gate"), f"{name}.linear_y", bias=True),
        *linear((*path, "x"), f"{name}.linear_x", bias=True),
        *linear((*path, "output"), f"{name}.linear_out", bias=True),
        *convolution([(*path, "x_convolution")], f"{name}.conv_1d", [inner]),
        plain((*path, "Lambda"), f"{name}.rg_lru.recurrent_param"),
    ]
    for part, theirs in {"input_gate": "input", "recurrence_gate": "recurrent"}.items():
        tensor = f"{name}.rg_lru.{theirs}_gate"
        rules.append(plain((*path, part, "kernel"), f"{tensor}_weight"))
        shapes = (inner,), (heads, inner // heads)
        rules.append(reshaped((*path, part, "bias"), f"{tensor}_bias", *shapes))
    return rules


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config, norm="model.final_norm.weight")
    for index, element in enumerate(config.plan().elements):
        name, mixer = f"model.layers.{index}", config.mixer(element)
        rules += common.pre_norms(
            index, name, mixer="temporal_pre_norm", feed_forward="channel_pre_norm"
        )
        path, temporal = block(index, "mixer"), f"{name}.temporal_block"
        if isinstance(mixer, RGLRUConfig):
            rules += _recurrent(path, temporal, mixer, config.width)
        else:
            rules += common.attention(path, temporal, mixer)
        part = config.feed_forward_of(element)
        rules += common.feed_forward(block(index, "feed_forward"), f"{name}.mlp_block", part)
    return rules


FAMILY = Family(
    name="recurrent_gemma",
    architectures=("RecurrentGemmaForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=("final_w_init_variance_scale", "w_init_variance_scale"),
)
