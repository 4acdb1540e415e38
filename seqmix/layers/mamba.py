# SPDX-License-Identifier: Apache-2.0
"""Mamba (arXiv 2312.00752), as its reference code computes it; Jamba's with `inner_norms`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.initialisation import time_step_bias
from seqmix.layers.linear import HeadLinear, Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("Mamba")
@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """Settings of `Mamba`.

    Attributes:
      expand: inner width over model width.
      state_size: states N per channel.
      convolution: taps of the causal convolution on x.
      dt_rank: width of the bottleneck that makes the time steps; default: model width / 16, up.
      heads: equal parts of the channels, each with its own dt, B and C made from its channels alone
        (Zamba, arXiv 2405.16712).
      bias: biases on the input and output projections.
      convolution_bias: biases of the convolution.
      inner_norms: RMS norms on that bottleneck, B and C (Jamba, arXiv 2403.19887).
      dt_min, dt_max, dt_floor: time steps start log-uniform in [dt_min, dt_max], at least dt_floor.
      norm_epsilon: epsilon of the inner norms.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.selective_scan`.
    """

    expand: float = 2.0
    state_size: int = 16
    convolution: int = 4
    dt_rank: int | None = None
    heads: int = 1
    bias: bool = False
    convolution_bias: bool = True
    inner_norms: bool = False
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_floor: float = 1e-4
    norm_epsilon: float = 1e-6
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "state_size", "convolution", "dt_rank", "heads", "chunk_size")
        checks.positive(self, "expand", "dt_min", "dt_max", "dt_floor", "norm_epsilon")
        if self.dt_min > self.dt_max:
            raise ValueError(f"Mamba.dt_min must be <= dt_max, got {self.dt_min} > {self.dt_max}")
        if self.inner_norms and self.heads > 1:
            raise ValueError(f"Mamba.inner_norms needs Mamba.heads = 1, got {self.heads}")

    def sizes(self, width: int) -> tuple[int, int]:
        """Inner width and the rank of the time steps at this model width.

        Raises:
          ValueError: the inner width is no whole number, or no multiple of the heads.
        """
        inner = checks.expanded(self, width)
        checks.multiple(self, "expand * width", inner, "heads", self.heads)
        return inner, -(-width // 16) if self.dt_rank is None else self.dt_rank

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolution, and for each of the D N states of the recurrence
        six: the decay's product dt A, decaying, writing (2), reading (2).
        """
        inner, rank = self.sizes(width)
        projections = 2 * inner * (3 * width + 2 * rank + 2 * self.state_size)
        return projections + 2 * self.convolution * inner + 6 * inner * self.state_size

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        inner, _ = self.sizes(width)
        state = checks.array_bytes((inner, self.state_size), jnp.float32)
        return state + checks.array_bytes((self.convolution - 1, inner), dtype)


class MambaCache(NamedTuple):
    """Decode cache of a `Mamba`.

    Attributes:
      x: [B, convolution - 1, inner] last inputs of the convolution.
      state: [B, inner, N] float32.
    """

    x: jax.Array
    state: jax.Array


@register("mamba", MambaConfig)
class Mamba(nnx.Module):
    """State-space layer with one decay per channel and state, chosen by the input.

    x = silu(conv(u W)), dt = softplus(norm(x W_r) W_dt + dt_bias), B = norm(x W_B),
    C = norm(x W_C), A = -exp(A_log), y = W_o (selective_scan(x, dt, A, B, C, D) * silu(u W_z)), the
    norms only with ``inner_norms``. With several ``heads``, W_r, W_dt, W_B and W_C are block
    diagonal, and each head's channels have a B and C of their own.

    The reference's fused projections [x, z] and [dt, B, C] are kept as separate parts.
    ``exp(A_log)`` starts at 1..N in every channel (S4D-Real), D at one, W_dt uniform in
    +-rank**-0.5.
    """

    def __init__(
        self,
        config: MambaConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        inner, rank = config.sizes(width)
        size = config.state_size
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def project(inputs: int, outputs: int) -> Linear | HeadLinear:
            if config.heads == 1:
                return Linear(inputs, outputs, **common)
            return HeadLinear(config.heads, inputs, outputs, **common)

        self.gate = Linear(width, inner, bias=config.bias, **common)
        self.x = Linear(width, inner, bias=config.bias, **common)
        self.x_convolution = ShortConvolution(
            inner, config.convolution, bias=config.convolution_bias, **common
        )
        channels = inner // config.heads
        self.dt_rank = project(channels, rank)
        self.B = project(channels, size)
        self.C = project(channels, size)
        self.dt = project(rank, channels)
        bound = rank**-0.5
        self.dt.kernel = nnx.Param(
            jax.random.uniform(rngs.params(), self.dt.kernel.shape, param_dtype, -bound, bound)
        )
        self.output = Linear(inner, width, bias=config.bias, scale=layer.residual_scale, **common)

        self.dt_bias = Float32Param(
            time_step_bias(rngs.params(), inner, config.dt_min, config.dt_max, config.dt_floor)
        )
        rates = jnp.log(jnp.arange(1, size + 1, dtype=jnp.float32))
        self.A_log = Float32Param(jnp.tile(rates, (inner, 1)))
        self.D = Float32Param(jnp.ones((inner,), jnp.float32))

        def norm(channels: int) -> RMSNorm | None:
            if not config.inner_norms:
                return None
            return RMSNorm(
                channels, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype
            )

        self.dt_norm, self.B_norm, self.C_norm = norm(rank), norm(size), norm(size)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: MambaCache | None = None,
    ) -> tuple[jax.Array, MambaCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        before = (None, None) if cache is None else cache
        inputs, x_state = self.x_convolution(self.x(x), segment_ids=segment_ids, state=before[0])
        inputs = jax.nn.silu(inputs)

        def project(linear, norm):
            y = linear(inputs)
            return y if norm is None else norm(y)

        rank = project(self.dt_rank, self.dt_norm)
        steps = self.dt(rank, out_dtype=jnp.float32).reshape(inputs.shape)
        out, state = self._scan(
            inputs,
            jax.nn.softplus(steps + self.dt_bias[...]),
            project(self.B, self.B_norm),
            project(self.C, self.C_norm),
            before[1],
            segment_ids,
        )
        y = self.output(out * jax.nn.silu(self.gate(x)))
        if segment_ids is not None and self.config.bias:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        return y, None if cache is None else MambaCache(x_state, state)

    def _scan(self, x, dt, B, C, state, segment_ids) -> tuple[jax.Array, jax.Array]:
        """The mixer's outputs and state; B, C [B, T, N], or [B, T, heads, N] for several heads."""
        A, D = -jnp.exp(self.A_log[...]), self.D[...]

        def scan(channels, B, C):
            return mixers.selective_scan(
                x[..., channels],
                dt[..., channels],
                A[channels],
                B,
                C,
                D[channels],
                initial_state=None if state is None else state[:, channels],
                segment_ids=segment_ids,
                chunk_size=self.config.chunk_size,
                impl=self.config.impl,
            )

        heads = self.config.heads
        if heads == 1:
            return scan(slice(None), B, C)
        size = x.shape[-1] // heads
        parts = [
            scan(slice(head * size, (head + 1) * size), B[:, :, head], C[:, :, head])
            for head in range(heads)
        ]
        outs, states = zip(*parts, strict=True)
        return jnp.concatenate(outs, axis=-1), jnp.concatenate(states, axis=1)

    def init_cache(self, batch: int, capacity: int) -> MambaCache:
        """An empty cache; its size does not depend on ``capacity``."""
        shape = (batch, self.x_convolution.channels, self.config.state_size)
        return MambaCache(self.x_convolution.init_state(batch), jnp.zeros(shape, jnp.float32))
