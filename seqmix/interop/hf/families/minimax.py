# SPDX-License-Identifier: Apache-2.0
"""MiniMax-01 (arXiv 2501.08313): lightning attention, attention and experts after its norms."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from seqmix.interop.hf.families import common, parts
from seqmix.interop.hf.families.joint import interleaved_linear
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout, resolver
from seqmix.interop.hf.rope import write_rope
from seqmix.interop.hf.rules import Path, Rule, block, linear, plain
from seqmix.layers import AttentionConfig, LightningConfig
from seqmix.layers.checks import derived_heads
from seqmix.models import HybridLMConfig, MoEConfig, ResidualConfig

_PART = "mlp/moe"
_MIXERS = {"linear_attention": "linear/lightning", "full_attention": "full/attention"}
_FACTORS = {
    "linear/lightning": "linear_attn",
    "full/attention": "full_attn",
    _PART: "mlp",
}
# The norm of lightning attention has it whatever the model's norms have.
_EPSILON = 1e-6
_BLOCK = 256


@resolver(LightningConfig)
def _resolve(config: LightningConfig, width: int) -> Mapping[str, Any]:
    heads = derived_heads(config, width)
    # For powers of two both kinds of slopes are the same.
    return {"heads": heads, "slopes": config.slopes if heads & (heads - 1) else None}


def _to_config(keys: Keys) -> HybridLMConfig:
    width, count = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    heads, epsilon = keys.integer("num_attention_heads"), keys.number("rms_norm_eps", 1e-5)
    head_width = keys.integer("head_dim", width // heads)
    activation = common.read_activation(keys)
    types = parts.types(keys, "layer_types", count, tuple(_MIXERS))
    if types is None:
        types = tuple("full_attention" if (i + 1) % 2 else "linear_attention" for i in range(count))
    if activation != "silu" and "linear_attention" in types:
        raise keys.unsupported("hidden_act", "lightning attention has SiLU")
    known = {
        "linear/lightning": LightningConfig(
            heads=heads, head_width=head_width, slopes="geometric", norm_epsilon=_EPSILON
        ),
        "full/attention": AttentionConfig(
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads),
            head_width=head_width,
            window=keys.integer("sliding_window", None),
            **parts.whole_rope(keys, head_width=head_width, base=1_000_000.0),
        ),
        _PART: MoEConfig(
            experts=keys.integer(parts.first_of(keys, "num_experts", "num_local_experts"), 8),
            top_k=keys.integer("num_experts_per_tok", 2),
            hidden=keys.integer("intermediate_size", 14336),
            activation=activation,
        ),
    }
    residuals = {
        key: ResidualConfig(
            norm="stream",
            alpha=keys.number(f"{name}_alpha_factor", 1.0),
            beta=keys.number(f"{name}_beta_factor", 1.0),
        )
        for key, name in _FACTORS.items()
    }
    used = {_PART, *(_MIXERS[kind] for kind in types)}
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout([f"{_MIXERS[kind]} + {_PART}" for kind in types]),
        mixers={key: value for key, value in known.items() if key in used},
        residuals={key: value for key, value in residuals.items() if key in used},
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=epsilon,
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    names = {LightningConfig: "linear_attention", AttentionConfig: "full_attention"}
    types = parts.kinds(config, names, "lightning attention or attention")
    if not all(parts.has_experts(config)):
        raise ValueError("every feed-forward part must have experts")
    part = parts.pick(config, MoEConfig)
    values: dict[str, Any] = {
        "layer_types": types,
        "rms_norm_eps": config.norm_epsilon,
        "intermediate_size": part.hidden_width(config.width),
        "num_local_experts": part.experts,
        "num_experts_per_tok": part.top_k,
        "hidden_act": common.write_activation(part.activation),
        "sliding_window": None,
        "block_size": _BLOCK,
    }
    for kind, element in zip(types, config.plan().elements, strict=True):
        mixer, mlp = config.residuals_of(element)
        for key, residual in ((_MIXERS[kind], mixer), (_PART, mlp)):
            values[f"{_FACTORS[key]}_alpha_factor"] = residual.alpha
            values[f"{_FACTORS[key]}_beta_factor"] = residual.beta
    if (mixer := parts.pick(config, LightningConfig)) is not None:
        heads = derived_heads(mixer, config.width)
        values |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        values["head_dim"] = mixer.head_width
    if (mixer := parts.pick(config, AttentionConfig)) is not None:
        heads, kv_heads = mixer.head_counts(config.width)
        values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        values |= {"head_dim": mixer.head_width, "sliding_window": mixer.window}
        values |= write_rope(mixer)
    return values


def _lightning(path: Path, name: str, config: LightningConfig, width: int) -> list[Rule]:
    """Query, key and value of a head lie together."""
    heads = derived_heads(config, width)
    joint = [(*path, part) for part in ("query", "key", "value")]
    return [
        *interleaved_linear(joint, f"{name}.qkv_proj", heads, [config.head_width] * 3),
        *linear((*path, "gate"), f"{name}.output_gate"),
        plain((*path, "norm", "scale"), f"{name}.norm.weight"),
        *linear((*path, "output"), f"{name}.out_proj"),
    ]


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config)
    for index, element in enumerate(config.plan().elements):
        name, path = f"model.layers.{index}", block(index, "mixer")
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        rules += common.pre_norms(index, name)
        if isinstance(mixer, LightningConfig):
            rules += _lightning(path, f"{name}.self_attn", mixer, config.width)
        else:
            rules += common.attention(path, f"{name}.self_attn", mixer)
        path, experts = block(index, "feed_forward"), f"{name}.block_sparse_moe"
        rules += parts.mixture(path, experts, part, matrices=("w1", "w3", "w2"))
    return rules


def _decays(heads: int, layer: int, layers: int, size: int, what: str) -> np.ndarray:
    """What the code of `transformers` keeps beside the weights of a lightning layer, float32.

    Args:
      heads, layer, layers: of the model.
      size: tokens of a block.
      what: the slopes of the heads, or the decays of a block's queries, keys or pairs.
    """
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    slopes = (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads) * factor)[:, None, None]
    time = np.arange(1, size + 1)[:, None]
    match what:
        case "slope_rate":
            array = slopes
        case "query_decay":
            array = np.exp(-slopes * time)
        case "key_decay":
            array = np.exp(-slopes * (size - time))
        case _:
            distance = time - time.T
            array = np.where(distance >= 0, np.exp(-slopes * np.maximum(distance, 0)), 0.0)[None]
    return array.astype(np.float32)


def _constants(
    config: HybridLMConfig, keys: Mapping[str, Any]
) -> dict[str, Callable[[], np.ndarray]]:
    """The decays of every lightning layer by their names."""
    found: dict[str, Callable[[], np.ndarray]] = {}
    for index, element in enumerate(config.plan().elements):
        mixer = config.mixer(element)
        if isinstance(mixer, LightningConfig):
            heads, size = derived_heads(mixer, config.width), keys.get("block_size") or _BLOCK
            for what in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
                found[f"model.layers.{index}.self_attn.{what}"] = functools.partial(
                    _decays, heads, index, config.layers, size, what
                )
    return found


FAMILY = Family(
    name="minimax",
    architectures=("MiniMaxForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    constants=_constants,
    inert=("block_size", "router_jitter_noise"),
)
