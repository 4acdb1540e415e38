# SPDX-License-Identifier: Apache-2.0
"""What S4 and S4D share: parameters of the poles, GELU, gated output, cache."""

import abc
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo


def check_settings(config: Any) -> None:
    """Checks the fields that both layers' configs have."""
    checks.at_least(config, 2, "state_size")
    checks.at_least(config, 1, "chunk_size")
    checks.multiple(config, "state_size", config.state_size, "2 (conjugate pairs)", 2)
    checks.positive(config, "dt_min", "dt_max")
    if config.dt_min > config.dt_max:
        name = type(config).__name__.removesuffix("Config")
        raise ValueError(f"{name}.dt_min must be <= dt_max, got {config.dt_min} > {config.dt_max}")


def state_bytes(config: Any, width: int) -> int:
    """Bytes of one sequence's state."""
    return checks.array_bytes((width, config.state_size), jnp.float32)


def pairs(z: np.ndarray, width: int) -> jax.Array:
    """Complex [M] -> the same float32 pairs [width, M, 2] for every channel."""
    both = np.stack([z.real, z.imag], axis=-1)
    return jnp.tile(jnp.asarray(both, jnp.float32), (width, 1, 1))


class StateSpace(nnx.Module):
    """y = W_a z * sigmoid(W_b z), z = gelu(ssm(x)), with one state space per channel of the model.

    Steps start log-uniform in [dt_min, dt_max], C complex normal of variance 1, D normal. Every
    parameter of the state space is float32 and gets no weight decay; the reference also trains them
    at a learning rate of at most 1e-3.

    Attributes:
      log_dt: [D].
      log_A_real: [D, N/2], logarithm of minus the poles' real parts.
      A_imag: [D, N/2].
      C: [D, N/2, 2].
      D: [D].
    """

    def __init__(
        self,
        config: Any,
        width: int,
        poles: np.ndarray,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        """Builds what the layers share; `poles` is complex [N/2], the same for every channel."""

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, jnp.float32)

        low, high = math.log(config.dt_min), math.log(config.dt_max)
        self.log_dt = Float32Param(
            jax.random.uniform(rngs.params(), (width,), jnp.float32, low, high)
        )
        start = pairs(np.log(-poles.real) + 1j * poles.imag, width)
        self.log_A_real = Float32Param(start[..., 0])
        self.A_imag = Float32Param(start[..., 1])
        self.C = Float32Param(normal(width, len(poles), 2) * math.sqrt(0.5))
        self.D = Float32Param(normal(width))
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.output = Linear(width, width, bias=True, scale=layer.residual_scale, **common)
        self.output_gate = Linear(width, width, bias=True, **common)
        self.dtype = jnp.dtype(dtype)
        self.config = config
        self.width = width

    @abc.abstractmethod
    def mix(self, x: jax.Array, dt: jax.Array, A: jax.Array, **options: Any):
        """The mixer on x [B, T, D] with steps [D] and poles [D, N/2, 2]; (out, state)."""

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: the state [B, D, N/2, 2] float32 from `init_cache` or an earlier call; None: none.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        out, state = self.mix(
            x.astype(self.dtype),
            jnp.exp(self.log_dt[...]),
            jnp.stack([-jnp.exp(self.log_A_real[...]), self.A_imag[...]], axis=-1),
            initial_state=cache,
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        z = jax.nn.gelu(out)
        y = self.output(z) * jax.nn.sigmoid(self.output_gate(z))
        if segment_ids is not None:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> jax.Array:
        """An empty state [B, D, N/2, 2]; its size does not depend on ``capacity``."""
        return jnp.zeros((batch, self.width, self.config.state_size // 2, 2), jnp.float32)
