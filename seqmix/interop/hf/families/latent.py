# SPDX-License-Identifier: Apache-2.0
"""Latent attention as DeepSeek's family and its relatives hold it."""

from collections.abc import Mapping
from typing import Any

from seqmix.interop.hf.families.joint import interleaved_linear
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import resolver
from seqmix.interop.hf.rules import Path, Rule, linear, plain
from seqmix.layers import DSAConfig, MLAConfig
from seqmix.layers.checks import derived_heads
from seqmix.layers.rotary import rotary_width

# The norms on the latents have it whatever the model's norms have.
_EPSILON = 1e-6


@resolver(MLAConfig)
def _mla(config: MLAConfig, width: int) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"heads": derived_heads(config, width), "scale": config.logit_scale}
    if not config.rotates:
        fields |= {"rotary": False, "rotary_base": None, "rotary_interleaved": None}
        fields |= {"rotary_scaling": None}
    return fields


@resolver(DSAConfig)
def _dsa(config: DSAConfig, width: int) -> Mapping[str, Any]:
    del width
    rotated = rotary_width(config.index_width, config.index_rotary_fraction)
    return {"index_rotary_fraction": rotated, "index_loss": None}


def read(keys: Keys, **fields: Any) -> MLAConfig:
    """An `MLA` of a config.json; ``fields`` are those of its positions.

    Raises:
      ValueError: keys and values have other heads than queries.
    """
    heads = keys.integer("num_attention_heads")
    if keys.integer("num_key_value_heads", heads) != heads:
        raise keys.unsupported("num_key_value_heads", f"num_attention_heads = {heads} is expected")
    return MLAConfig(
        heads=heads,
        head_width=keys.integer("qk_nope_head_dim", 128),
        rotary_width=keys.integer("qk_rope_head_dim", 64),
        value_width=keys.integer("v_head_dim", 128),
        kv_rank=keys.integer("kv_lora_rank", 512),
        bias=keys.flag("attention_bias", False),
        norm_epsilon=_EPSILON,
        **fields,
    )


def write(config: MLAConfig, width: int) -> dict[str, Any]:
    """The keys of `read`, and ``q_lora_rank``."""
    heads = derived_heads(config, width)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": config.head_width,
        "qk_rope_head_dim": config.rotary_width,
        "v_head_dim": config.value_width,
        "kv_lora_rank": config.kv_rank,
        "q_lora_rank": config.query_rank,
        "attention_bias": config.bias,
    }


def rules(path: Path, name: str, config: MLAConfig, width: int) -> list[Rule]:
    """An `MLA`: keys and values of a head lie side by side in one projection of the latent."""
    heads, bias = derived_heads(config, width), config.bias
    up = [(*path, "key"), (*path, "value")]
    found = [
        *linear((*path, "latent"), f"{name}.kv_a_proj_with_mqa", bias=bias),
        plain((*path, "latent_norm", "scale"), f"{name}.kv_a_layernorm.weight"),
        *interleaved_linear(
            up, f"{name}.kv_b_proj", heads, [config.head_width, config.value_width]
        ),
        *linear((*path, "output"), f"{name}.o_proj", bias=bias),
    ]
    if config.query_rank is None:
        return [*found, *linear((*path, "query"), f"{name}.q_proj")]
    return [
        *found,
        *linear((*path, "query_down"), f"{name}.q_a_proj", bias=bias),
        plain((*path, "query_norm", "scale"), f"{name}.q_a_layernorm.weight"),
        *linear((*path, "query"), f"{name}.q_b_proj"),
    ]
