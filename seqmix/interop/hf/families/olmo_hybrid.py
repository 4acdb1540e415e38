# SPDX-License-Identifier: Apache-2.0
"""OLMo hybrid: pre-norm Gated DeltaNet layers, and attention whose norms stand after the parts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from seqmix.interop.hf.families import common, parts
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rope import write_rope
from seqmix.interop.hf.rules import Arrays, Path, Rule, block, linear, plain
from seqmix.layers import AttentionConfig, GatedDeltaNetConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig, ResidualConfig

_SCOPE = "post"
_ATTENTION, _PART = f"{_SCOPE}/attention", f"{_SCOPE}/feed_forward"
_ELEMENTS = {
    "linear_attention": "gated_delta_net",
    "full_attention": f"{_ATTENTION} + {_PART}",
}
# The gated norm has it whatever the model's norms have.
_EPSILON = 1e-5
_CONVOLVED = ("query", "key", "value")


def _positions(keys: Keys, head_width: int) -> dict[str, Any]:
    """The rotary fields; there are no positions where ``rope_theta`` is there and null."""
    values = keys.raw("rope_parameters", None)
    if isinstance(values, dict) and values.get("rope_theta", 0) is None:
        return {"rotary_fraction": 0.0}
    return parts.whole_rope(keys, head_width=head_width)


def _to_config(keys: Keys) -> HybridLMConfig:
    width, count = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    heads, epsilon = keys.integer("num_attention_heads"), keys.number("rms_norm_eps", 1e-6)
    head_width = keys.integer("head_dim", width // heads)
    bias = keys.flag("attention_bias", False)
    keys.only("hidden_act", "silu", "swish")  # of the convolutions as well
    types = parts.types(keys, "layer_types", count, tuple(_ELEMENTS))
    if types is None:
        found = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
        if "full_attention" not in found:
            found[-1] = "full_attention"
        types = tuple(found)
    key_heads = keys.integer("linear_num_key_heads", heads)
    key_width = keys.integer("linear_key_head_dim", int(0.75 * width / key_heads))
    part = FeedForwardConfig(hidden=keys.integer("intermediate_size"))
    post = ResidualConfig(norm="post")
    mixers = {
        "gated_delta_net": GatedDeltaNetConfig(
            heads=key_heads,
            value_heads=keys.integer("linear_num_value_heads", heads),
            head_width=key_width,
            value_width=keys.integer("linear_value_head_dim", 2 * key_width),
            convolution=keys.integer("linear_conv_kernel_dim", 4),
            allow_negative_eigenvalues=keys.flag("linear_allow_neg_eigval", True),
            norm_epsilon=_EPSILON,
        ),
        _ATTENTION: AttentionConfig(
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads),
            head_width=head_width,
            qk_norm="full",
            bias=bias,
            output_bias=bias,
            norm_epsilon=epsilon,
            **_positions(keys, head_width),
        ),
        _PART: part,
    }
    scoped = "full_attention" in types
    if not scoped:
        mixers = {"gated_delta_net": mixers["gated_delta_net"]}
    elif "linear_attention" not in types:
        del mixers["gated_delta_net"]
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout([_ELEMENTS[kind] for kind in types]),
        mixers=mixers,
        residuals={_ATTENTION: post, _PART: post} if scoped else {},
        feed_forward=part,
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=epsilon,
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    names = {GatedDeltaNetConfig: "linear_attention", AttentionConfig: "full_attention"}
    types = parts.kinds(config, names, "Gated DeltaNet or attention")
    if len(set(types)) < 2:
        raise ValueError("there must be layers of both kinds, Gated DeltaNet and attention")
    if any(parts.has_experts(config)):
        raise ValueError("every feed-forward part must be dense")
    mixer, attention = parts.pick(config, GatedDeltaNetConfig), parts.pick(config, AttentionConfig)
    heads, kv_heads = attention.head_counts(config.width)
    key_heads, value_heads, key_width, value_width = mixer.sizes(config.width)
    positions = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    if attention.rotary_fraction:
        positions = write_rope(attention)
    return {
        "layer_types": types,
        "intermediate_size": parts.pick(config, FeedForwardConfig).hidden_width(config.width),
        "rms_norm_eps": config.norm_epsilon,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": attention.head_width,
        "attention_bias": attention.bias,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": value_width,
        "linear_conv_kernel_dim": mixer.convolution,
        "linear_allow_neg_eigval": mixer.allow_negative_eigenvalues,
        **positions,
    }


def _cut(paths: list[Path], names: list[str], ours: list[int], theirs: list[int]) -> Rule:
    """Depthwise convolutions whose channels the tensors share out in another way."""

    def recut(arrays: Arrays, sizes: list[int]) -> Arrays:
        return np.split(np.concatenate(arrays), np.cumsum(sizes)[:-1])

    return Rule(
        tuple(paths),
        tuple(names),
        lambda arrays: [part[:, 0].T for part in recut(arrays, ours)],
        lambda arrays: recut([array.T[:, None] for array in arrays], theirs),
    )


def _gated_delta_net(
    path: Path,
    name: str,
    config: GatedDeltaNetConfig,
    width: int,
    held: Mapping[str, tuple[int, ...]],
) -> list[Rule]:
    heads, value_heads, key_width, value_width = config.sizes(width)
    projections = {
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "decay": "a_proj",
        "beta": "b_proj",
        "gate": "g_proj",
        "output": "o_proj",
    }
    rules = [
        rule
        for part, theirs in projections.items()
        for rule in linear((*path, part), f"{name}.{theirs}")
    ]
    names = [f"{name}.{part[0]}_conv1d.weight" for part in _CONVOLVED]
    ours = [heads * key_width, heads * key_width, value_heads * value_width]
    # `transformers` joins the three and writes about a third in each, whatever their widths.
    theirs = [held[name][0] for name in names if len(held.get(name, ())) == 3]
    kernels = [(*path, f"{part}_convolution", "kernel") for part in _CONVOLVED]
    return [
        *rules,
        _cut(kernels, names, ours, theirs if sum(theirs) == sum(ours) else ours),
        plain((*path, "A_log"), f"{name}.A_log"),
        plain((*path, "dt_bias"), f"{name}.dt_bias"),
        plain((*path, "norm", "scale"), f"{name}.o_norm.weight"),
    ]


def _variants(config: HybridLMConfig, held: Mapping[str, tuple[int, ...]]) -> list[Rule]:
    rules = common.ends(config)
    for index, element in enumerate(config.plan().elements):
        name, path = f"model.layers.{index}", block(index, "mixer")
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        if isinstance(mixer, GatedDeltaNetConfig):
            norms = {
                "mixer_norm": "attention_layer_norm",
                "feed_forward_norm": "feedforward_layer_norm",
            }
            rules += _gated_delta_net(path, f"{name}.linear_attn", mixer, config.width, held)
        else:
            # `transformers` writes the first under the name that another norm has elsewhere.
            odd = f"{name}.feedforward_layer_norm.weight" in held
            norms = {
                "mixer_output_norm": "feedforward_layer_norm"
                if odd
                else "post_attention_layernorm",
                "feed_forward_output_norm": "post_feedforward_layernorm",
            }
            rules += common.attention(path, f"{name}.self_attn", mixer)
        rules += [
            plain(block(index, ours, "scale"), f"{name}.{theirs}.weight")
            for ours, theirs in norms.items()
        ]
        rules += common.feed_forward(block(index, "feed_forward"), f"{name}.mlp", part)
    return rules


FAMILY = Family(
    name="olmo_hybrid",
    architectures=("OlmoHybridForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    variants=_variants,
    inert=(
        "linear_a_log_max",
        "linear_a_log_min",
        "linear_dt_init_floor",
        "linear_dt_max",
        "linear_dt_min",
    ),
)
