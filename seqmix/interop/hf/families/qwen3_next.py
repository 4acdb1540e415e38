# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: three Gated DeltaNet layers to one of gated attention, experts with a shared one."""

from collections.abc import Mapping
from typing import Any

from seqmix.interop.hf.families import common, parts
from seqmix.interop.hf.families.joint import interleaved_linear
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import resolver
from seqmix.interop.hf.rope import read_rope, write_rope
from seqmix.interop.hf.rules import Path, Rule, block, convolution, linear, plain
from seqmix.layers import AttentionConfig, GatedDeltaNetConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig, MoEConfig

_NAMES = {"linear_attention": "gated_delta_net", "full_attention": "attention"}


@resolver(GatedDeltaNetConfig)
def _resolve(config: GatedDeltaNetConfig, width: int) -> Mapping[str, Any]:
    heads, value_heads, _, value_width = config.sizes(width)
    return {"heads": heads, "value_heads": value_heads, "value_width": value_width}


def _to_config(keys: Keys) -> HybridLMConfig:
    count, epsilon = keys.integer("num_hidden_layers"), keys.number("rms_norm_eps", 1e-6)
    head_width = keys.integer("head_dim", 256)
    bias = keys.flag("attention_bias", False)
    activation = common.read_activation(keys)
    types = parts.types(keys, "layer_types", count, tuple(_NAMES))
    interval = keys.integer("full_attention_interval", 4)
    if types is None:
        types = tuple(
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
        )
    if activation != "silu" and "linear_attention" in types:
        raise keys.unsupported("hidden_act", "the convolutions of linear attention have SiLU")
    mixers = {
        "gated_delta_net": GatedDeltaNetConfig(
            heads=keys.integer("linear_num_key_heads", 16),
            value_heads=keys.integer("linear_num_value_heads", 32),
            head_width=keys.integer("linear_key_head_dim", 128),
            value_width=keys.integer("linear_value_head_dim", 128),
            convolution=keys.integer("linear_conv_kernel_dim", 4),
            norm_epsilon=epsilon,
        ),
        "attention": AttentionConfig(
            heads=keys.integer("num_attention_heads"),
            kv_heads=keys.integer("num_key_value_heads", 2),
            head_width=head_width,
            qk_norm=True,
            zero_centred_norm=True,
            norm_epsilon=epsilon,
            bias=bias,
            output_bias=bias,
            output_gate=True,
            **read_rope(keys, head_width=head_width, fraction=0.25),
        ),
    }
    number = keys.integer("num_experts", 512, least=0)
    step = keys.integer("decoder_sparse_step", 1)
    dense_only = keys.items("mlp_only_layers", ())
    sparse = [number > 0 and i not in dense_only and (i + 1) % step == 0 for i in range(count)]
    experts = MoEConfig(
        experts=max(number, 1),
        top_k=min(keys.integer("num_experts_per_tok", 10), max(number, 1)),
        hidden=keys.integer("moe_intermediate_size", 512),
        activation=activation,
        renormalise=keys.flag("norm_topk_prob", True),
        shared_experts=1,
        shared_hidden=keys.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    dense = FeedForwardConfig(hidden=keys.integer("intermediate_size", 5632), activation=activation)
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=keys.integer("hidden_size"),
        **parts.layers([_NAMES[t] for t in types], mixers, sparse, dense, experts),
        tied=keys.flag("tie_word_embeddings", False),
        norm="zero_centred",
        norm_epsilon=epsilon,
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    names = {GatedDeltaNetConfig: "linear_attention", AttentionConfig: "full_attention"}
    types = parts.kinds(config, names, "Gated DeltaNet or attention")
    sparse = parts.has_experts(config)
    values: dict[str, Any] = {
        "layer_types": types,
        "rms_norm_eps": config.norm_epsilon,
        "mlp_only_layers": [i for i, has in enumerate(sparse) if not has],
        "decoder_sparse_step": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_experts": 0,
    }
    if (mixer := parts.pick(config, GatedDeltaNetConfig)) is not None:
        heads, value_heads, key_width, value_width = mixer.sizes(config.width)
        values |= {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": key_width,
            "linear_value_head_dim": value_width,
            "linear_conv_kernel_dim": mixer.convolution,
        }
    if (mixer := parts.pick(config, AttentionConfig)) is not None:
        heads, kv_heads = mixer.head_counts(config.width)
        values |= {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": mixer.head_width,
            "attention_bias": mixer.bias,
            **write_rope(mixer),
        }
        # Without it, the family's own default would hold.
        values["rope_parameters"]["partial_rotary_factor"] = mixer.rotary_fraction
    if (part := parts.pick(config, FeedForwardConfig)) is not None:
        values["intermediate_size"] = part.hidden_width(config.width)
        values["hidden_act"] = common.write_activation(part.activation)
    if (part := parts.pick(config, MoEConfig)) is not None:
        shared = part.shared_part(config.width)
        if shared is None:
            raise ValueError("the family's experts always have a shared one")
        values |= {
            "num_experts": part.experts,
            "num_experts_per_tok": part.top_k,
            "moe_intermediate_size": part.hidden_width(config.width),
            "shared_expert_intermediate_size": shared.hidden,
            "norm_topk_prob": part.renormalise,
            "hidden_act": common.write_activation(part.activation),
        }
    return values


def _gated_delta_net(path: Path, name: str, config: GatedDeltaNetConfig, width: int) -> list[Rule]:
    """Queries, keys, values and gates of a key head lie together, and so do b and a."""
    heads, value_heads, key_width, value_width = config.sizes(width)
    ratio = value_heads // heads
    joint = [(*path, part) for part in ("query", "key", "value", "gate")]
    sizes = [key_width, key_width, ratio * value_width, ratio * value_width]
    convolutions = [(*path, f"{part}_convolution") for part in ("query", "key", "value")]
    channels = [heads * key_width, heads * key_width, value_heads * value_width]
    return [
        *interleaved_linear(joint, f"{name}.in_proj_qkvz", heads, sizes),
        *interleaved_linear(
            [(*path, "beta"), (*path, "decay")], f"{name}.in_proj_ba", heads, [ratio, ratio]
        ),
        *convolution(convolutions, f"{name}.conv1d", channels, bias=False),
        plain((*path, "A_log"), f"{name}.A_log"),
        plain((*path, "dt_bias"), f"{name}.dt_bias"),
        plain((*path, "norm", "scale"), f"{name}.norm.weight"),
        *linear((*path, "output"), f"{name}.out_proj"),
    ]


def _attention(path: Path, name: str, config: AttentionConfig, width: int) -> list[Rule]:
    """Query and gate of a head lie side by side."""
    heads, _ = config.head_counts(width)
    sizes = [config.head_width] * 2
    query, gate = (*path, "query"), (*path, "gate")
    rules = interleaved_linear([query, gate], f"{name}.q_proj", heads, sizes, bias=config.bias)
    taken = (f"{name}.q_proj.weight", f"{name}.q_proj.bias")
    return rules + [r for r in common.attention(path, name, config) if r.names[0] not in taken]


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config)
    for index, element in enumerate(config.plan().elements):
        name, path = f"model.layers.{index}", block(index, "mixer")
        rules += common.pre_norms(index, name)
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        if isinstance(mixer, GatedDeltaNetConfig):
            rules += _gated_delta_net(path, f"{name}.linear_attn", mixer, config.width)
        else:
            rules += _attention(path, f"{name}.self_attn", mixer, config.width)
        if isinstance(part, MoEConfig):
            rules += parts.mixture(block(index, "feed_forward"), f"{name}.mlp", part)
        else:
            rules += common.feed_forward(block(index, "feed_forward"), f"{name}.mlp", part)
    return rules


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    # A head that predicts the token after next stands beside the model.
    ignored=(r"mtp\..*",),
)
