# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 (arXiv 2512.02556): latent attention to the tokens that an indexer picks."""

from typing import Any

from seqmix.interop.hf.families import common, latent, parts
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.rope import write_rope
from seqmix.interop.hf.rules import Path, Rule, block, linear, plain
from seqmix.layers import AttentionConfig, DSAConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig, MoEConfig

# What the published configs may say otherwise, and their code does not compute otherwise.
_ONLY: dict[str, Any] = {
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _to_config(keys: Keys) -> HybridLMConfig:
    count = keys.integer("num_hidden_layers")
    for key, needed in _ONLY.items():
        keys.only(key, needed)
    parts.types(keys, "layer_types", count, ("indexed_attention",))
    activation = common.read_activation(keys)
    rotated, index_width = keys.integer("qk_rope_head_dim", 64), keys.integer("index_head_dim", 128)
    if rotated > index_width:
        raise keys.unsupported("index_head_dim", f"at least qk_rope_head_dim = {rotated}")
    rope = parts.whole_rope(keys, head_width=rotated)
    del rope["rotary_fraction"]
    attention = latent.read(keys, query_rank=keys.integer("q_lora_rank"), **rope)
    dsa = DSAConfig(
        attention=attention,
        top_k=keys.integer("index_topk", 2048),
        index_heads=keys.integer("index_n_heads", 64),
        index_width=index_width,
        index_rotary_fraction=rotated / index_width,
    )
    first = keys.integer("first_k_dense_replace", 3, least=0)
    mlps = parts.types(keys, "mlp_layer_types", count, ("dense", "sparse"))
    if mlps is None:
        mlps = tuple("dense" if i < first else "sparse" for i in range(count))
    experts = MoEConfig(
        experts=keys.integer(
            parts.first_of(keys, "num_experts", "num_local_experts", "n_routed_experts"), 256
        ),
        top_k=keys.integer("num_experts_per_tok", 8),
        hidden=keys.integer("moe_intermediate_size", 2048),
        activation=activation,
        router="sigmoid",
        renormalise=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 2.5),
        selection_bias=True,
        groups=keys.integer("n_group", 8),
        top_groups=keys.integer("topk_group", 4),
        shared_experts=keys.integer("n_shared_experts", 1),
    )
    dense = FeedForwardConfig(
        hidden=keys.integer("intermediate_size", 18432), activation=activation
    )
    sparse = [kind == "sparse" for kind in mlps]
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=keys.integer("hidden_size"),
        **parts.layers(["dsa"] * count, {"dsa": dsa}, sparse, dense, experts),
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    parts.kinds(config, {DSAConfig: "dsa"}, "sparse attention (DSA)")
    mixer = parts.pick(config, DSAConfig)
    if not mixer.latent or mixer.attention.query_rank is None:
        raise ValueError("DSA.attention must be @MLA() with MLA.query_rank")
    if not mixer.attention.rotates:
        raise ValueError("MLA.rotary must be True and MLA.rotary_width > 0")
    positions = AttentionConfig(
        head_width=mixer.attention.rotary_width,
        rotary_base=mixer.attention.rotary_base,
        rotary_scaling=mixer.attention.rotary_scaling,
    )
    values: dict[str, Any] = {
        "rms_norm_eps": config.norm_epsilon,
        "mlp_layer_types": ["sparse" if has else "dense" for has in parts.has_experts(config)],
        "index_topk": mixer.top_k,
        "index_n_heads": mixer.index_heads,
        "index_head_dim": mixer.index_width,
        **latent.write(mixer.attention, config.width),
        **write_rope(positions),
    }
    if (part := parts.pick(config, FeedForwardConfig)) is not None:
        values["intermediate_size"] = part.hidden_width(config.width)
        values["hidden_act"] = common.write_activation(part.activation)
    if (part := parts.pick(config, MoEConfig)) is not None:
        values |= {
            "n_routed_experts": part.experts,
            "num_experts_per_tok": part.top_k,
            "moe_intermediate_size": part.hidden_width(config.width),
            "hidden_act": common.write_activation(part.activation),
            "norm_topk_prob": part.renormalise,
            "routed_scaling_factor": part.scale,
            "n_group": part.groups,
            "topk_group": part.top_groups,
            "n_shared_experts": part.shared_experts,
        }
    return values


def _indexer(path: Path, name: str) -> list[Rule]:
    return [
        *linear((*path, "query"), f"{name}.wq_b"),
        *linear((*path, "key"), f"{name}.wk"),
        plain((*path, "key_norm", "scale"), f"{name}.k_norm.weight"),
        plain((*path, "key_norm", "bias"), f"{name}.k_norm.bias"),
        *linear((*path, "weights"), f"{name}.weights_proj"),
    ]


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config)
    for index, element in enumerate(config.plan().elements):
        name, path = f"model.layers.{index}", block(index, "mixer")
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        rules += [
            *common.pre_norms(index, name),
            *latent.rules(path, f"{name}.self_attn", mixer.attention, config.width),
            *_indexer((*path, "indexer"), f"{name}.self_attn.indexer"),
        ]
        path = block(index, "feed_forward")
        if isinstance(part, MoEConfig):
            rules += parts.mixture(path, f"{name}.mlp", part, shared="shared_experts")
        else:
            rules += common.feed_forward(path, f"{name}.mlp", part)
    return rules


FAMILY = Family(
    name="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=("ep_size", "head_dim", "num_nextn_predict_layers", "pretraining_tp", "qk_head_dim"),
    # A layer that predicts the token after next stands beside the published model's 61.
    ignored=(r"model\.layers\.61\..*",),
)
