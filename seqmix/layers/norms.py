# SPDX-License-Identifier: Apache-2.0
"""RMS norms: plain, and gated in the two orders of the field."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix.layers.parameters import NoDecayParam
from seqmix_kernels import target

GateOrder = Literal["gate_then_norm", "norm_then_gate"]
_ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def in_eights(x: jax.Array) -> jax.Array:
    """Views [B, T, H, K] as [B, T / 8, 8, H, K] where 8 divides T.

    For norms of heads. A TPU has tiles of eight tokens of one head, as projections write and
    kernels read them; left to itself XLA would make tiles of eight heads, and copy at each kernel.
    """
    if x.ndim != 4 or x.shape[1] % 8:
        return x
    return x.reshape(x.shape[0], -1, 8, *x.shape[2:])


def rms_normalise(x: jax.Array, epsilon: float) -> jax.Array:
    """Computes x / sqrt(mean(x^2) + epsilon) over the last axis, in float32 whatever comes in."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def l2_normalise(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Computes x / sqrt(sum(x^2) + epsilon) over the last axis in float32, returns x's dtype.

    The epsilon stands inside the root, as in flash-linear-attention and Qwen3-Next.
    """
    y = in_eights(x).astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return y.astype(x.dtype).reshape(x.shape)


class RMSNorm(nnx.Module):
    """RMS norm over the last axis with a learned scale (arXiv 1910.07467), float32 inside.

    Attributes:
      scale: [width], starts at one; zero-centred norms multiply by 1 + scale, which starts at zero.
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float = 1e-6,
        zero_centred: bool = False,
        dtype: Any,
        param_dtype: Any,
    ):
        initial = jnp.zeros if zero_centred else jnp.ones
        self.scale = NoDecayParam(initial((width,), param_dtype))
        self.zero_centred = zero_centred
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] of any dtype to [..., width] in the compute dtype."""
        scale = self.scale[...].astype(jnp.float32)
        y = rms_normalise(in_eights(x), self.epsilon)
        y = y * (1.0 + scale if self.zero_centred else scale)
        return y.astype(self.dtype).reshape(x.shape)


class GatedRMSNorm(nnx.Module):
    """RMS norm with a gate, float32 inside; f is SiLU unless the sigmoid (KDA) is asked for.

    ``gate_then_norm`` (Mamba-2): norm(x * f(gate)) * scale.
    ``norm_then_gate`` (Gated DeltaNet, RetNet, GLA): norm(x) * scale * f(gate).

    Attributes:
      scale: [width], starts at one.
    """

    def __init__(
        self,
        width: int,
        *,
        order: GateOrder,
        activation: Literal["silu", "sigmoid"] = "silu",
        group_size: int | None = None,
        epsilon: float = 1e-5,
        dtype: Any,
        param_dtype: Any,
    ):
        """Builds the norm.

        Args:
          width: size of the last axis.
          order: which comes first.
          activation: f.
          group_size: the mean square is taken over groups of this many channels; default all.
          epsilon: added to the mean square.
          dtype: dtype of the result.
          param_dtype: dtype of the scale.

        Raises:
          ValueError: ``group_size`` does not divide ``width``, or the order is unknown.
        """
        if order not in ("gate_then_norm", "norm_then_gate"):
            raise ValueError(f"order must be 'gate_then_norm' or 'norm_then_gate', got {order!r}")
        group_size = width if group_size is None else group_size
        if group_size < 1 or width % group_size:
            raise ValueError(f"group_size must divide the width {width}, got {group_size}")
        self.scale = NoDecayParam(jnp.ones((width,), param_dtype))
        self.order = order
        self.activation = activation
        self.group_size = group_size
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalises and gates.

        Args:
          x: [..., width].
          gate: [..., width], before its activation.

        Returns:
          [..., width] in the compute dtype.
        """
        shape, scale = x.shape, self.scale[...].astype(jnp.float32)
        if target().platform == "gpu":
            return self._in_groups(x, gate, scale)
        if x.ndim == 4:  # heads side by side; see `in_eights`
            x, gate = (y.reshape(*shape[:2], -1) for y in (x, gate))
            scale = jnp.tile(scale, shape[2])
        x, gate = x.astype(jnp.float32), _ACTIVATIONS[self.activation](gate.astype(jnp.float32))
        if self.order == "gate_then_norm":
            x = x * gate
        grouped = x.reshape(*x.shape[:-1], -1, self.group_size)
        y = rms_normalise(in_eights(grouped), self.epsilon).reshape(x.shape) * scale
        if self.order == "norm_then_gate":
            y = y * gate
        return y.astype(self.dtype).reshape(shape)

    def _in_groups(self, x: jax.Array, gate: jax.Array, scale: jax.Array) -> jax.Array:
        """The same, in one view throughout: XLA then makes one kernel of it on a GPU.

        Where the gate has another view than the mean square, x comes back from memory in float32.
        """
        shape = x.shape
        x, gate = (y.reshape(*shape[:-1], -1, self.group_size) for y in (x, gate))
        x, gate = x.astype(jnp.float32), _ACTIVATIONS[self.activation](gate.astype(jnp.float32))
        y = rms_normalise(x * gate if self.order == "gate_then_norm" else x, self.epsilon)
        y = y * scale.reshape(-1, self.group_size)
        if self.order == "norm_then_gate":
            y = y * gate
        return y.astype(self.dtype).reshape(shape)


class GroupNorm(nnx.Module):
    """Layer norm over each of several equal groups of channels, with a learned scale and bias.

    Float32 inside. RWKV normalises its heads so (arXiv 1803.08494 for the norm).

    Attributes:
      scale: [width], starts at one.
      bias: [width], starts at zero.
    """

    def __init__(
        self, width: int, groups: int, *, epsilon: float = 1e-5, dtype: Any, param_dtype: Any
    ):
        """Builds the norm.

        Raises:
          ValueError: ``groups`` does not divide ``width``.
        """
        if groups < 1 or width % groups:
            raise ValueError(f"groups must divide the width {width}, got {groups}")
        self.scale = NoDecayParam(jnp.ones((width,), param_dtype))
        self.bias = NoDecayParam(jnp.zeros((width,), param_dtype))
        self.groups = groups
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] of any dtype to [..., width] in the compute dtype."""
        y = in_eights(x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, -1))
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = rms_normalise(y, self.epsilon).reshape(x.shape)
        y = y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(self.dtype)
