# SPDX-License-Identifier: Apache-2.0
"""Windows of keys or values pressed into one each, by their mean or by a small MLP (NSA)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers._numerics import contract, operand_dtype


class NSACompression(NamedTuple):
    """The MLP that presses a window of l tokens of a head into one; X is K or V.

    Attributes:
      position: [Hkv, l, X], added to the window's tokens.
      hidden: [Hkv, l * X, F], reads the tokens one after the other.
      hidden_bias: [Hkv, F].
      output: [Hkv, F, X], reads gelu of the hidden units; a bias of keys would change no softmax.
    """

    position: Float[Array, "Hkv L X"]
    hidden: Float[Array, "Hkv LX F"]
    hidden_bias: Float[Array, "Hkv F"]
    output: Float[Array, "Hkv F X"]


def check_windows(name: str, size: int, stride: int) -> None:
    """Raises ValueError unless windows of `size` tokens, `stride` apart, can be compressed."""
    check.positive(name, "compression_block", size, optional=False)
    check.positive(name, "stride", stride, optional=False)
    if size < 2 or size % stride:
        raise ValueError(
            f"{name}: compression_block must be >= 2 and a multiple of stride = {stride}, "
            f"got {size}"
        )


def windows_within(tokens, size: int, stride: int):
    """How many windows end within the first `tokens` tokens of a document."""
    return jnp.maximum((tokens - size) // stride + 1, 0)


def window_slots(capacity: int, size: int, stride: int) -> int:
    """Slots for the windows of `capacity` tokens, at least 1."""
    return max(1, (capacity - size) // stride + 1)


def check_compression(name: str, label: str, mlp: NSACompression | None, size: int, x) -> None:
    """Raises ValueError unless `mlp` is None or fits windows of `size` tokens of x [B, T, H, X]."""
    if mlp is None:
        return
    if not isinstance(mlp, NSACompression):
        raise ValueError(
            f"{name}: {label} must be an NSACompression or None, got {type(mlp).__name__}"
        )
    heads, width = x.shape[2:]
    units = mlp.hidden.shape[-1] if hasattr(mlp.hidden, "shape") and mlp.hidden.ndim else 0
    for part, axes, expected in (
        ("position", "Hkv l X", (heads, size, width)),
        ("hidden", "Hkv l*X F", (heads, size * width, units)),
        ("hidden_bias", "Hkv F", (heads, units)),
        ("output", "Hkv F X", (heads, units, width)),
    ):
        check.shape(name, f"{label}.{part}", getattr(mlp, part), expected, axes)


def compress(strides: jax.Array, count: int, mlp: NSACompression | None) -> jax.Array:
    """One token for each window of `count` strides in a row.

    Each stride is read once: what its tokens add to the windows it lies in is shifted and summed.

    Args:
      strides: [B, N, d, H, X] tokens.
      count: strides of a window, l / d.
      mlp: None for the mean.

    Returns:
      [B, N, H, X] in the dtype of strides, entry i of strides i .. i + count - 1; anything where
      these are not of one document, or end after N.
    """
    number, size, heads, width = strides.shape[1:]
    low = operand_dtype(strides)
    if mlp is None:
        # Ones are exact in every dtype, the weight is not.
        part = contract("bndhx,d->bnhx", strides, jnp.ones((size,), low), dtype=low)
        parts = [part / (count * size)] * count
    else:
        hidden = mlp.hidden.reshape(heads, count, size, width, -1)
        parts = [
            contract("bndhx,hdxf->bnhf", strides, hidden[:, i], dtype=low) for i in range(count)
        ]
    total = sum(
        jnp.pad(part[:, i:], ((0, 0), (0, min(i, number)), (0, 0), (0, 0)))
        for i, part in enumerate(parts)
    )
    if mlp is None:
        return total.astype(strides.dtype)
    # The positions add the same to every window.
    position = mlp.position.reshape(heads, 1, -1)
    constant = contract("hax,hxf->haf", position, mlp.hidden, dtype=low)[:, 0]
    total = jax.nn.gelu(total + constant + mlp.hidden_bias.astype(total.dtype))
    return contract("bnhf,hfx->bnhx", total, mlp.output, dtype=low).astype(strides.dtype)
