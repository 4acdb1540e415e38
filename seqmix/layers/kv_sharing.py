# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one attention layer read by later ones (Hymba, cross-layer attention)."""

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import jax

from seqmix import mixers

# What must be equal for a query of one layer to fit a key of the other.
_KEYS = (
    "head_width",
    "rotary_fraction",
    "rotary_base",
    "rotary_interleaved",
    "rotary_scaling",
    "key_multiplier",
)


class SharedKV(NamedTuple):
    """What a sharing attention layer hands upwards.

    Attributes:
      key: [B, T, Hkv, K] of the new tokens, normalised and rotated.
      value: [B, T, Hkv, V].
      cache: its cache before these tokens, or None.
    """

    key: jax.Array
    value: jax.Array
    cache: mixers.KVCache | None


def name_of(config: Any) -> str | None:
    """Name under which a layer's model keeps what it shares or reads; None for neither."""
    name = config.kv_from or config.share_kv_as
    return None if name is None else f"attention.kv.{name}"


def check_names(config: Any) -> None:
    """Raises ValueError where a config's two names are empty or differ."""
    for field in ("share_kv_as", "kv_from"):
        if getattr(config, field) == "":
            raise ValueError(f"Attention.{field} must be a name or None, got ''")
    if None not in (config.kv_from, config.share_kv_as) and config.kv_from != config.share_kv_as:
        raise ValueError(
            "Attention.kv_from and share_kv_as must be the same name where both are set, got "
            f"{config.kv_from!r} and {config.share_kv_as!r}"
        )


def connect(config: Any, below: MutableMapping[str, Any], width: int) -> None:
    """Checks one layer's sharing against the layers below; see `AttentionConfig.connect`."""
    name = name_of(config)
    if name is None:
        return
    source = below.get(name)
    if config.kv_from is None:
        if source is not None:
            # One name, one shape: it goes through the scan over periods.
            heads, others = (c.head_counts(width)[1] for c in (config, source))
            _equal("share_kv_as", "kv_heads", heads, others)
            for field in ("head_width", "window", "prefix"):
                _equal("share_kv_as", field, getattr(config, field), getattr(source, field))
            values = (c.value_head_width for c in (config, source))
            _equal("share_kv_as", "value_width", *values)
        below[name] = config
        return
    if source is None:
        raise ValueError(
            f"Attention.kv_from = {config.kv_from!r}: no layer below has "
            f"share_kv_as = {config.kv_from!r}"
        )
    heads, kv_heads = config.head_counts(width)[0], source.head_counts(width)[1]
    if heads % kv_heads:
        raise ValueError(
            f"Attention.kv_from: heads must be a multiple of the sharing layer's kv_heads = "
            f"{kv_heads}, got {heads}"
        )
    if config.kv_heads is not None:
        _equal("kv_from", "kv_heads", config.kv_heads, kv_heads)
    for field in _KEYS:
        _equal("kv_from", field, getattr(config, field), getattr(source, field))
    _equal("kv_from", "value_width", config.value_head_width, source.value_head_width)
    if source.window is None:
        return
    if config.window is None or config.window > source.window:
        raise ValueError(
            f"Attention.kv_from: window must be at most the sharing layer's = {source.window}, "
            f"got {config.window}"
        )
    if config.prefix > source.prefix:
        raise ValueError(
            f"Attention.kv_from: prefix must be at most the sharing layer's = {source.prefix}, "
            f"got {config.prefix}"
        )


def _equal(link: str, field: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise ValueError(
            f"Attention.{link}: {field} must be that of the sharing layer below, {expected}, "
            f"got {value}"
        )
