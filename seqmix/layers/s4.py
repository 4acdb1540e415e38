# SPDX-License-Identifier: Apache-2.0
"""S4 (arXiv 2111.00396): one diagonal-plus-rank-one state space per channel, from HiPPO-LegS."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import state_space
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.mixers import hippo

_B_CLIP = 2.0


@configs.configurable("S4")
@dataclasses.dataclass(frozen=True)
class S4Config:
    """Settings of `S4`.

    Attributes:
      state_size: states N per channel, real numbers; N/2 conjugate pairs.
      dt_min, dt_max: time steps start log-uniform between them.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.s4`.
    """

    state_size: int = 64
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        state_space.check_settings(self)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections and, for each of the N/2 pairs of a channel, the 40 real operations
        of a step of the recurrence: two products with a diagonal (12), two inner products (8), two
        rank-one corrections (8), the bilinear step's half (4), the write (4), the read (4).
        """
        return 4 * width * width + 20 * width * self.state_size

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return state_space.state_bytes(self, width)


@register("s4", S4Config)
class S4(state_space.StateSpace):
    """Diagonal-plus-rank-one state space per channel; see `state_space.StateSpace`.

    Every channel starts as HiPPO-LegS, the imaginary part of B clipped at 2 as in the reference
    code, and has poles, P and B of its own.

    Attributes:
      P, B: [D, N/2, 2].
    """

    def __init__(
        self,
        config: S4Config,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        poles, P, B = hippo.legs_dplr(config.state_size)
        super().__init__(
            config, width, poles, layer=layer, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        B = B.real + 1j * np.clip(B.imag, -_B_CLIP, _B_CLIP)
        self.P = Float32Param(state_space.pairs(P, width))
        self.B = Float32Param(state_space.pairs(B, width))

    def mix(self, x: jax.Array, dt: jax.Array, A: jax.Array, **options: Any):
        """`seqmix.mixers.s4` with this layer's P, B, C and D."""
        P, B, C, D = (p[...] for p in (self.P, self.B, self.C, self.D))
        return mixers.s4(x, dt, A, P, B, C, D, **options)
