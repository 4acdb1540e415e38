# SPDX-License-Identifier: Apache-2.0
"""Module around the causal depthwise convolution of ``seqmix.mixers``."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import mixers
from seqmix.layers.parameters import ConvolutionParam, NoDecayParam


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution over a few tokens, without its activation.

    Packed rows are kept apart, padding is skipped, and the state holds the last ``taps - 1``
    inputs, before convolution and activation. Weights and biases start uniform in
    +-1/sqrt(taps), the default of the reference code's ``Conv1d``.

    Attributes:
      kernel: [taps, channels]; the last tap meets the present token.
      bias: [channels] or None.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        bias: bool,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        bound = taps**-0.5

        def uniform(shape: tuple[int, ...]) -> jax.Array:
            return jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound)

        self.kernel = ConvolutionParam(uniform((taps, channels)))
        self.bias = NoDecayParam(uniform((channels,))) if bias else None
        self.dtype = jnp.dtype(dtype)
        self.taps = taps
        self.channels = channels

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        state: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Convolves over time.

        Args:
          x: [B, T, channels].
          segment_ids: [B, T] int32, 0 = padding; None: one segment.
          state: [B, taps - 1, channels], the inputs before this call; None: zeros.

        Returns:
          y [B, T, channels] and the state after the last real token, both in the compute dtype.
        """
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        y, state = mixers.short_convolution(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            bias,
            segment_ids=segment_ids,
            initial_state=state,
        )
        return y.astype(self.dtype), state.astype(self.dtype)

    def init_state(self, batch: int) -> jax.Array:
        """Zeros [B, taps - 1, channels] in the compute dtype."""
        return jnp.zeros((batch, self.taps - 1, self.channels), self.dtype)
