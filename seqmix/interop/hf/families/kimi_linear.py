# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear (arXiv 2510.26692): Kimi delta attention, latent attention without positions."""

from collections.abc import Mapping
from typing import Any

from seqmix.interop.hf.families import common, latent, parts
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import resolver
from seqmix.interop.hf.rules import Path, Rule, block, convolution, linear, plain, reshaped
from seqmix.layers import KDAConfig, MLAConfig
from seqmix.layers.checks import derived_heads
from seqmix.models import FeedForwardConfig, HybridLMConfig, MoEConfig

_NAMES = {"linear_attention": "kda", "full_attention": "mla"}


@resolver(KDAConfig)
def _resolve(config: KDAConfig, width: int) -> Mapping[str, Any]:
    decay, gate = config.ranks()
    return {"heads": derived_heads(config, width), "decay_rank": decay, "gate_rank": gate}


def _types(keys: Keys, linear_keys: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """The kind of each layer; the published files number two lists of layers from 1."""
    found = parts.types(keys, "layer_types", count, tuple(_NAMES))
    if found is not None:
        return found
    full, kda = (linear_keys.get(key) for key in ("full_attn_layers", "kda_layers"))
    if full is None or kda is None:
        return tuple(
            "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)
        )
    if sorted([*full, *kda]) != list(range(1, count + 1)):
        raise keys.unsupported(
            "linear_attn_config", f"full_attn_layers and kda_layers must share out 1 to {count}"
        )
    return tuple("full_attention" if i + 1 in full else "linear_attention" for i in range(count))


def _to_config(keys: Keys) -> HybridLMConfig:
    count, epsilon = keys.integer("num_hidden_layers"), keys.number("rms_norm_eps", 1e-5)
    for key, needed in _ONLY.items():
        keys.only(key, needed)
    keys.only("hidden_act", "silu", "swish")  # of the convolutions as well
    linear_keys = keys.raw("linear_attn_config", {})
    if not isinstance(linear_keys, dict):
        raise keys.unsupported("linear_attn_config", "an object is expected")
    inner = Keys(linear_keys, keys.family)
    mixers = {
        "kda": KDAConfig(
            heads=inner.integer("num_heads", keys.integer("linear_num_heads", 32)),
            head_width=inner.integer("head_dim", keys.integer("linear_head_dim", 128)),
            convolution=inner.integer(
                "short_conv_kernel_size", keys.integer("linear_conv_kernel_dim", 4)
            ),
            norm_epsilon=epsilon,
        ),
        "mla": latent.read(keys, query_rank=keys.integer("q_lora_rank", None), rotary=False),
    }
    types = _types(keys, linear_keys, count)
    first = keys.integer("first_k_dense_replace", 1, least=0)
    mlps = parts.types(keys, "mlp_layer_types", count, ("dense", "sparse"))
    if mlps is None:
        mlps = tuple("dense" if i < first else "sparse" for i in range(count))

    def named(*names: str, default: Any) -> Any:
        return keys.integer(parts.first_of(keys, *names), default)

    experts = MoEConfig(
        experts=named("num_local_experts", "num_experts", default=256),
        top_k=named("num_experts_per_tok", "num_experts_per_token", default=8),
        hidden=keys.integer("moe_intermediate_size", 1024),
        router="sigmoid",
        renormalise=keys.flag(parts.first_of(keys, "norm_topk_prob", "moe_renormalize"), True),
        scale=keys.number("routed_scaling_factor", 2.446),
        selection_bias=True,
        groups=named("n_group", "num_expert_group", default=1),
        top_groups=keys.integer("topk_group", 1),
        shared_experts=named("n_shared_experts", "num_shared_experts", default=1),
    )
    dense = FeedForwardConfig(hidden=keys.integer("intermediate_size", 9216))
    names, sparse = [_NAMES[t] for t in types], [m == "sparse" for m in mlps]
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=keys.integer("hidden_size"),
        **parts.layers(names, mixers, sparse, dense, experts),
        tied=False,  # the family ties nothing, whatever a config says
        norm_epsilon=epsilon,
    )


# What the published configs may say otherwise, and their code does not compute otherwise.
_ONLY: dict[str, Any] = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
}


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    names = {KDAConfig: "linear_attention", MLAConfig: "full_attention"}
    values: dict[str, Any] = {
        "layer_types": parts.kinds(config, names, "KDA or MLA"),
        "mlp_layer_types": ["sparse" if has else "dense" for has in parts.has_experts(config)],
        "rms_norm_eps": config.norm_epsilon,
        "num_attention_heads": 1,
    }
    if (mixer := parts.pick(config, KDAConfig)) is not None:
        values |= {
            "linear_num_heads": derived_heads(mixer, config.width),
            "linear_head_dim": mixer.head_width,
            "linear_conv_kernel_dim": mixer.convolution,
        }
    if (mixer := parts.pick(config, MLAConfig)) is not None:
        values |= latent.write(mixer, config.width)
    if (part := parts.pick(config, FeedForwardConfig)) is not None:
        values["intermediate_size"] = part.hidden_width(config.width)
    if (part := parts.pick(config, MoEConfig)) is not None:
        values |= {
            "num_experts": part.experts,
            "num_experts_per_token": part.top_k,
            "moe_intermediate_size": part.hidden_width(config.width),
            "moe_renormalize": part.renormalise,
            "routed_scaling_factor": part.scale,
            "num_expert_group": part.groups,
            "topk_group": part.top_groups,
            "num_shared_experts": part.shared_experts,
        }
    return values


def _kda(path: Path, name: str, config: KDAConfig, width: int) -> list[Rule]:
    heads = derived_heads(config, width)
    projections = {
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "decay_down": "f_a_proj",
        "decay_up": "f_b_proj",
        "gate_down": "g_a_proj",
        "gate": "g_b_proj",
        "beta": "b_proj",
        "output": "o_proj",
    }
    rules = [
        rule
        for part, theirs in projections.items()
        for rule in linear((*path, part), f"{name}.{theirs}")
    ]
    for part in ("query", "key", "value"):
        convolved = [(*path, f"{part}_convolution")]
        channels = [heads * config.head_width]
        rules += convolution(convolved, f"{name}.{part[0]}_conv1d", channels, bias=False)
    return [
        *rules,
        reshaped((*path, "A_log"), f"{name}.A_log", (heads,), (1, 1, heads, 1)),
        plain((*path, "dt_bias"), f"{name}.dt_bias"),
        plain((*path, "norm", "scale"), f"{name}.o_norm.weight"),
    ]


def _variants(config: HybridLMConfig, held: Mapping[str, tuple[int, ...]]) -> list[Rule]:
    rules = common.ends(config)
    for index, element in enumerate(config.plan().elements):
        name, path = f"model.layers.{index}", block(index, "mixer")
        rules += common.pre_norms(index, name)
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        mix = _kda if isinstance(mixer, KDAConfig) else latent.rules
        rules += mix(path, f"{name}.self_attn", mixer, config.width)
        path, sparse = block(index, "feed_forward"), f"{name}.block_sparse_moe"
        if isinstance(part, MoEConfig):
            rules += parts.mixture(
                path, sparse, part, shared="shared_experts", matrices=("w1", "w3", "w2")
            )
        else:
            # `transformers` writes dense parts under the name of the others.
            odd = f"{sparse}.gate_proj.weight" in held
            rules += common.feed_forward(path, sparse if odd else f"{name}.mlp", part)
    return rules


FAMILY = Family(
    name="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    variants=_variants,
    inert=(
        "head_dim",
        "model_max_length",
        "num_nextn_predict_layers",
        "pretraining_tp",
        "qk_head_dim",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "use_grouped_topk",
    ),
)
