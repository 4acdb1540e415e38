# SPDX-License-Identifier: Apache-2.0
"""Linear projection with this project's initialisation and dtype policy."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix.layers.parameters import NoDecayParam


def product(x: jax.Array, kernel: jax.Array, out_dtype: Any) -> jax.Array:
    """[..., I] x [I, O] -> [..., O], accumulated and returned in ``out_dtype``."""
    out_dtype = jnp.dtype(out_dtype)

    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.matmul(x, kernel, preferred_element_type=out_dtype)

    if x.dtype == kernel.dtype == out_dtype:
        return multiply(x, kernel)
    # XLA's CPU backend refuses some products of bfloat16 into float32; widened operands give the
    # same numbers.
    return jax.lax.platform_dependent(
        x,
        kernel,
        cpu=lambda x, kernel: multiply(x.astype(out_dtype), kernel.astype(out_dtype)),
        default=multiply,
    )


def multiplied(x: jax.Array, factor: float) -> jax.Array:
    """x times a constant of the config, in x's dtype; x itself where it is 1."""
    return x if factor == 1.0 else x * factor


class Linear(nnx.Module):
    """y = x W + b, parameters in ``param_dtype``, product in ``dtype``.

    The kernel starts as a truncated normal of standard deviation ``scale / sqrt(inputs)`` (LeCun):
    inputs of unit variance give outputs of variance ``scale**2``. The bias starts at zero.

    Attributes:
      kernel: [inputs, outputs].
      bias: [outputs] or None.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        scale: float = 1.0,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        initialise = jax.nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
        self.kernel = nnx.Param(initialise(rngs.params(), (inputs, outputs), param_dtype))
        self.bias = NoDecayParam(jnp.zeros((outputs,), param_dtype)) if bias else None
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """Projects the last axis.

        Args:
          x: [..., inputs].
          out_dtype: dtype of the accumulated result; default the compute dtype. Gates ask for
            float32, so that they are not rounded before their nonlinearity.

        Returns:
          [..., outputs].
        """
        out_dtype = self.dtype if out_dtype is None else jnp.dtype(out_dtype)
        y = product(x.astype(self.dtype), self.kernel[...].astype(self.dtype), out_dtype)
        return y if self.bias is None else y + self.bias[...].astype(out_dtype)


class BlockLinear(nnx.Module):
    """y = x W + b with a block-diagonal W: each of ``blocks`` equal parts of x has its own matrix.

    Kernels start as `Linear`'s do, the bias at zero.

    Attributes:
      kernel: [blocks, width / blocks, width / blocks].
      bias: [width].
    """

    def __init__(self, width: int, blocks: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        initialise = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", batch_axis=0
        )
        shape = (blocks, width // blocks, width // blocks)
        self.kernel = nnx.Param(initialise(rngs.params(), shape, param_dtype))
        self.bias = NoDecayParam(jnp.zeros((width,), param_dtype))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """[..., width] to [..., width] in ``out_dtype``, default the compute dtype."""
        out_dtype = self.dtype if out_dtype is None else jnp.dtype(out_dtype)
        blocks = x.astype(self.dtype).reshape(*x.shape[:-1], self.kernel.shape[0], -1)
        blocks = jnp.moveaxis(blocks, -2, 0)
        parts = blocks.reshape(blocks.shape[0], -1, blocks.shape[-1])
        y = product(parts, self.kernel[...].astype(self.dtype), out_dtype)
        y = jnp.moveaxis(y.reshape(blocks.shape), 0, -2).reshape(x.shape)
        return y + self.bias[...].astype(out_dtype)


class HeadLinear(nnx.Module):
    """y = x W_h in each head h, without biases: a block-diagonal projection that keeps the heads.

    Kernels start as `Linear`'s do.

    Attributes:
      kernel: [heads, inputs, outputs].
    """

    def __init__(
        self,
        heads: int,
        inputs: int,
        outputs: int,
        *,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        initialise = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", batch_axis=0
        )
        self.kernel = nnx.Param(initialise(rngs.params(), (heads, inputs, outputs), param_dtype))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """Projects each head.

        Args:
          x: [..., heads * inputs] or [..., heads, inputs].
          out_dtype: dtype of the accumulated result; default the compute dtype.

        Returns:
          [..., heads, outputs].
        """
        out_dtype = self.dtype if out_dtype is None else jnp.dtype(out_dtype)
        heads, inputs, outputs = self.kernel.shape
        before = x.shape[: -2 if x.shape[-2:] == (heads, inputs) else -1]
        rows = jnp.moveaxis(x.astype(self.dtype).reshape(-1, heads, inputs), 1, 0)
        y = product(rows, self.kernel[...].astype(self.dtype), out_dtype)
        return jnp.moveaxis(y, 0, 1).reshape(*before, heads, outputs)
