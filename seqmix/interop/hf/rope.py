# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of published configs: `rope_parameters`, and the older keys for the same."""

import math
from typing import Any

from seqmix.interop.hf.keys import Keys
from seqmix.layers import AttentionConfig
from seqmix.layers.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
)

_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def read_rope(
    keys: Keys, *, head_width: int, base: float = 10_000.0, fraction: float = 1.0
) -> dict[str, Any]:
    """The fields of `AttentionConfig` for the rotary positions of a config.json.

    Args:
      keys: of the config.json.
      head_width: width of a head.
      base, fraction: defaults of ``rope_theta`` and ``partial_rotary_factor``.

    Returns:
      rotary_base, rotary_fraction and rotary_scaling.

    Raises:
      ValueError: a kind of scaling that this framework does not compute.
    """
    base = keys.number("rope_theta", base)
    fraction = keys.number("partial_rotary_factor", fraction)
    older = keys.raw("rope_scaling", None)
    name = "rope_parameters" if older is None else "rope_scaling"
    values = keys.raw(name, {})
    keys.raw("rope_parameters", None)  # where both are given, the older wins
    if not isinstance(values, dict):
        raise keys.unsupported(name, "an object is expected")
    inner = Keys({k: v for k, v in values.items() if v is not None}, keys.family)
    if nested := [key for key, value in inner.values.items() if isinstance(value, dict)]:
        raise keys.unsupported(name, f"positions of their own for {nested[0]} are not supported")
    kind = inner.raw("rope_type", inner.raw("type", "default"))
    base = inner.number("rope_theta", base)
    fraction = inner.number("partial_rotary_factor", fraction)
    if not 0 < base < math.inf:
        key = name if inner.has("rope_theta") else "rope_theta"
        raise keys.unsupported(key, "rope_theta must be positive and finite")
    rotated = head_width * fraction
    if rotated != int(rotated) or int(rotated) % 2:
        raise keys.unsupported(
            name, f"partial_rotary_factor must give an even number of {head_width} channels"
        )
    scaling = _scaling(keys, inner, name, kind)
    inner.finish()
    return {"rotary_base": base, "rotary_fraction": fraction, "rotary_scaling": scaling}


def _scaling(keys: Keys, inner: Keys, name: str, kind: Any) -> RotaryScaling | None:
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        supported = "default, linear, llama3, yarn"
        raise keys.unsupported(name, f"kinds of scaling that are supported: {supported}")
    if kind == "linear":
        return LinearScaling(factor=inner.number("factor"))
    longest = keys.integer("max_position_embeddings", None)
    # Where a family keeps the trained length beside the object, that one counts.
    trained = inner.integer("original_max_position_embeddings", longest)
    trained = keys.integer("original_max_position_embeddings", trained)
    if trained is None:
        raise keys.unsupported(name, "original_max_position_embeddings is missing")
    if kind == "llama3":
        return Llama3Scaling(
            factor=inner.number("factor"),
            original_max_position_embeddings=trained,
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
        )
    factor = inner.number("factor", None if longest is None else longest / trained)
    readers = {"truncate": inner.flag}
    given = {key: readers.get(key, inner.number)(key) for key in _YARN if inner.has(key)}
    # A zero stands for none of the magnitudes; those of the ramp fall back to their defaults.
    given = {key: value for key, value in given.items() if value or key == "truncate"}
    return YarnScaling(factor=factor, original_max_position_embeddings=trained, **given)


def write_rope(attention: AttentionConfig) -> dict[str, Any]:
    """``rope_parameters`` for the rotary positions of a layer.

    Raises:
      ValueError: scaling that has no name in published configs.
    """
    values: dict[str, Any] = {"rope_theta": attention.rotary_base}
    if attention.rotary_fraction != 1.0:
        values["partial_rotary_factor"] = attention.rotary_fraction
    scaling = attention.rotary_scaling
    match scaling:
        case None:
            values["rope_type"] = "default"
        case LinearScaling():
            values |= {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            names = (
                "factor",
                "original_max_position_embeddings",
                "low_freq_factor",
                "high_freq_factor",
            )
            values |= {"rope_type": "llama3"} | {n: getattr(scaling, n) for n in names}
        case YarnScaling():
            names = ("factor", "original_max_position_embeddings", *_YARN)
            values |= {"rope_type": "yarn"}
            values |= {n: v for n in names if (v := getattr(scaling, n)) is not None}
        case _:
            raise ValueError(
                f"Attention.rotary_scaling = {scaling} has no form in published configs"
            )
    return {"rope_parameters": values}
