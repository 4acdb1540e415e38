# SPDX-License-Identifier: Apache-2.0
"""What the time mixing of RWKV-5 and RWKV-6 share: decode cache, counts, output, initial values.

Source: BlinkDL/RWKV-LM, RWKV-v5 (arXiv 2404.05892).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GroupNorm
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo


class RWKVCache(NamedTuple):
    """Decode cache of the time mixing of an RWKV layer.

    Attributes:
      shift: [B, 1, D] last token.
      state: [B, H, K, K] float32.
    """

    shift: jax.Array
    state: jax.Array


def cache_bytes(config: Any, width: int, dtype: Any) -> int:
    """Bytes per sequence of an `RWKVCache`."""
    heads, size = checks.derived_heads(config, width), config.head_width
    state = checks.array_bytes((heads, size, size), jnp.float32)
    return state + checks.array_bytes((1, width), dtype)


def flops_per_token(config: Any, width: int) -> int:
    """FLOPs of the five projections and the recurrence (write, read out); multiply-add = 2."""
    inner = checks.derived_heads(config, width) * config.head_width
    return 10 * width * inner + 4 * inner * config.head_width


class Output(nnx.Module):
    """y = W_o (group_norm(o) * silu(gate)), one group a head; 0 at padding."""

    def __init__(
        self, config: Any, width: int, *, layer: LayerInfo, dtype: Any, param_dtype: Any, rngs: Any
    ):
        heads = checks.derived_heads(config, width)
        inner = heads * config.head_width
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.norm = GroupNorm(inner, heads, epsilon=config.norm_epsilon, **dtypes)
        self.output = Linear(inner, width, scale=layer.residual_scale, rngs=rngs, **dtypes)

    def __call__(self, out: jax.Array, gate: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """out [B, T, H, K] and gate [B, T, H K] to [B, T, D]."""
        y = self.output(self.norm(out.reshape(gate.shape)) * jax.nn.silu(gate))
        # The norm's bias speaks even where nothing came in.
        return y if segment_ids is None else jnp.where((segment_ids != 0)[..., None], y, 0)


def depth_ratios(layer: LayerInfo) -> tuple[jax.Array, jax.Array]:
    """From 0 in the first layer to 1 in the last; from 1 in the first to almost 0 in the last."""
    below = jnp.asarray(layer.below, jnp.float32)
    return below / max(layer.count - 1, 1), 1.0 - below / layer.count


def present_shares(width: int, layer: LayerInfo) -> dict[str, jax.Array]:
    """Initial share of the present token, the rest the token before, by projection: [D] each.

    Channels run from all past to all present, the more evenly the deeper the layer.
    """
    rising, falling = depth_ratios(layer)
    channel = jnp.arange(width, dtype=jnp.float32) / width
    slow, fast = channel**falling, channel ** (0.5 * falling)
    return {
        "decay": slow,
        "key": slow,
        "value": slow + 0.3 * rising,
        "receptance": fast,
        "gate": fast,
    }


def decay_parameter(heads: int, size: int, layer: LayerInfo) -> Float32Param:
    """[H, K] w with log-decay -exp(w): from -exp(-6) to -exp(-1) over the channels."""
    rising, _ = depth_ratios(layer)
    position = jnp.arange(heads * size, dtype=jnp.float32) / max(heads * size - 1, 1)
    return Float32Param((-6.0 + 5.0 * position ** (0.7 + 1.3 * rising)).reshape(heads, size))


def bonus_parameter(heads: int, size: int, layer: LayerInfo) -> Float32Param:
    """[H, K] u: falling over the channels, higher in deeper layers, with a small zigzag."""
    rising, _ = depth_ratios(layer)
    channel = jnp.arange(heads * size)
    position = channel.astype(jnp.float32) / max(heads * size - 1, 1)
    zigzag = 0.1 * ((channel + 1) % 3 - 1).astype(jnp.float32)
    return Float32Param((rising * (1.0 - position) + zigzag).reshape(heads, size))
