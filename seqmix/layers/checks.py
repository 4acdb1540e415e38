# SPDX-License-Identifier: Apache-2.0
"""Value checks of layer configs, and the pieces that their counts share."""

import math
from typing import Any

import jax.numpy as jnp


def at_least(config: Any, minimum: int, *names: str) -> None:
    """Raises ValueError for an int field below ``minimum``; None means unset and passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ValueError(f"{_gin_name(config)}.{name} must be >= {minimum}, got {value}")


def positive(config: Any, *names: str) -> None:
    """Raises ValueError for a float field that is not finite and above zero; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{_gin_name(config)}.{name} must be positive, got {value}")


def multiple(config: Any, name: str, value: int, of: str, divisor: int) -> None:
    """Raises ValueError unless ``value`` is a positive multiple of ``divisor``."""
    if value < divisor or value % divisor:
        raise ValueError(
            f"{_gin_name(config)}.{name} must be a multiple of {of} = {divisor}, got {value}"
        )


def expanded(config: Any, width: int) -> int:
    """``config.expand`` times the model width.

    Raises:
      ValueError: that is no whole number.
    """
    inner = round(config.expand * width)
    if not math.isclose(inner, config.expand * width):
        raise ValueError(
            f"{_gin_name(config)}.expand = {config.expand} times the model width {width} is no "
            "whole number"
        )
    return inner


def derived_heads(config: Any, width: int) -> int:
    """``config.heads``, or as many heads of ``config.head_width`` as fill the model width."""
    if config.heads is not None:
        return config.heads
    if width % config.head_width:
        raise ValueError(
            f"{_gin_name(config)}.head_width = {config.head_width} does not divide the model width "
            f"{width}; set {_gin_name(config)}.heads or another head_width"
        )
    return width // config.head_width


def grouped_heads(config: Any, width: int) -> tuple[int, int]:
    """Query heads and key-value heads at this model width; ``config.kv_heads`` None: equally many.

    Raises:
      ValueError: the heads do not fill the width or do not group.
    """
    heads = derived_heads(config, width)
    kv_heads = heads if config.kv_heads is None else config.kv_heads
    multiple(config, "heads", heads, "kv_heads", kv_heads)
    return heads, kv_heads


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _gin_name(config: Any) -> str:
    return type(config).__name__.removesuffix("Config")
