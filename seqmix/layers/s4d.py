# SPDX-License-Identifier: Apache-2.0
"""S4D (arXiv 2206.11893): one diagonal state space per channel."""

import dataclasses
from typing import Any, Literal

import jax
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import state_space
from seqmix.layers.registry import LayerInfo, register
from seqmix.mixers import hippo


@configs.configurable("S4D")
@dataclasses.dataclass(frozen=True)
class S4DConfig:
    """Settings of `S4D`.

    Attributes:
      state_size: states N per channel, real numbers; N/2 conjugate pairs.
      initialisation: poles at the start, see `seqmix.mixers.hippo.diagonal`.
      dt_min, dt_max: time steps start log-uniform between them.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.s4d`.
    """

    state_size: int = 64
    initialisation: Literal["legs", "lin", "inv", "real"] = "lin"
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        state_space.check_settings(self)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections and, for each of the N/2 pairs of a channel, the 14 real operations
        of a step of the recurrence: a complex product and sum (8), the write (2), the read (4).
        """
        return 4 * width * width + 7 * width * self.state_size

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return state_space.state_bytes(self, width)


@register("s4d", S4DConfig)
class S4D(state_space.StateSpace):
    """Diagonal state space per channel, GELU, gated output; see `state_space.StateSpace`."""

    def __init__(
        self,
        config: S4DConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        poles = hippo.diagonal(config.initialisation, config.state_size)
        super().__init__(
            config, width, poles, layer=layer, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )

    def mix(self, x: jax.Array, dt: jax.Array, A: jax.Array, **options: Any):
        """`seqmix.mixers.s4d` with this layer's C and D."""
        return mixers.s4d(x, dt, A, self.C[...], self.D[...], **options)
