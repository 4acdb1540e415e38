# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv 2405.21060), as its reference code computes it."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.initialisation import decay_rates, time_step_bias
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GatedRMSNorm
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("Mamba2")
@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """Settings of `Mamba2`.

    Attributes:
      expand: inner width over model width.
      head_width: width P of a head; it divides the inner width.
      state_size: states N per channel.
      groups: groups G that share B and C; they divide the heads.
      convolution: taps of the causal convolution on x, B and C.
      bias: biases on the input projections.
      output_bias: bias on the output projection; default as ``bias``.
      convolution_bias: biases of the convolution.
      norm: the gated norm; without it y * silu(z) is projected out (Falcon-H1).
      norm_before_gate: norm(y) * silu(z) instead of norm(y * silu(z)).
      multipliers: factors of the projections z, x, B, C and dt, before convolution and time-step
        bias (Falcon-H1, arXiv 2507.22448).
      dt_limit: least and greatest time step; default: no clipping.
      dt_min, dt_max, dt_floor: time steps start log-uniform in [dt_min, dt_max], at least dt_floor.
      norm_epsilon: epsilon of the gated norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.ssd`.
    """

    expand: float = 2.0
    head_width: int = 64
    state_size: int = 128
    groups: int = 1
    convolution: int = 4
    bias: bool = False
    output_bias: bool | None = None
    convolution_bias: bool = True
    norm: bool = True
    norm_before_gate: bool = False
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    dt_limit: tuple[float, float] | None = None
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_floor: float = 1e-4
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "head_width", "state_size", "groups", "convolution", "chunk_size")
        checks.positive(self, "expand", "dt_min", "dt_max", "dt_floor", "norm_epsilon")
        if self.dt_min > self.dt_max:
            raise ValueError(f"Mamba2.dt_min must be <= dt_max, got {self.dt_min} > {self.dt_max}")
        if self.dt_limit is not None and not 0 <= self.dt_limit[0] < self.dt_limit[1]:
            raise ValueError(f"Mamba2.dt_limit must be 0 <= low < high, got {self.dt_limit}")
        if not all(math.isfinite(value) for value in self.multipliers):
            raise ValueError(f"Mamba2.multipliers must be finite, got {self.multipliers}")
        if self.norm_before_gate and not self.norm:
            raise ValueError("Mamba2.norm_before_gate needs Mamba2.norm")

    @property
    def has_output_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    def sizes(self, width: int) -> tuple[int, int]:
        """Inner width and heads at this model width.

        Raises:
          ValueError: the inner width is no multiple of the head width, or the heads none of groups.
        """
        inner = round(self.expand * width)
        if not math.isclose(inner, self.expand * width):
            raise ValueError(
                f"Mamba2.expand = {self.expand} times the model width {width} is no whole number"
            )
        checks.multiple(self, "expand * width", inner, "head_width", self.head_width)
        heads = inner // self.head_width
        checks.multiple(self, "heads (expand * width / head_width)", heads, "groups", self.groups)
        return inner, heads

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolution, and for each head the two products of the
        recurrence (write, read out). The chunked form's products inside a chunk come on top of
        that and are not counted, so that utilisation never gains by them.
        """
        inner, heads = self.sizes(width)
        shared = 2 * self.groups * self.state_size
        projections = 2 * width * (3 * inner + shared + heads)
        convolutions = 2 * self.convolution * (inner + shared)
        return projections + convolutions + 4 * inner * self.state_size

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        inner, _ = self.sizes(width)
        channels = inner + 2 * self.groups * self.state_size
        state = checks.array_bytes((inner, self.state_size), jnp.float32)
        return state + checks.array_bytes((self.convolution - 1, channels), dtype)


class Mamba2Cache(NamedTuple):
    """Decode cache of a `Mamba2`.

    Attributes:
      x, B, C: [B, convolution - 1, channels] last inputs of the convolutions.
      state: [B, H, N, P] float32.
    """

    x: jax.Array
    B: jax.Array
    C: jax.Array
    state: jax.Array


@register("mamba2", Mamba2Config)
class Mamba2(nnx.Module):
    """State-space layer with one decay per head.

    x, B, C = silu(conv(u W)), dt = clip(softplus(u W_dt + dt_bias)), A = -exp(A_log),
    y = W_o rms_norm(ssd(x, dt, A, B, C, D) * silu(u W_z)), the mean square over each of the G
    groups of channels. D skips the state with the convolved x, not scaled by dt. The settings
    change norm, biases and factors of the projections.

    The reference's fused input projection [z, x, B, C, dt] and its convolution are kept as separate
    parts: a depthwise convolution splits exactly, and each part shards and trains by itself.
    ``exp(A_log)`` starts uniform in (1, 16), D at one.
    """

    def __init__(
        self,
        config: Mamba2Config,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        inner, heads = config.sizes(width)
        shared = config.groups * config.state_size
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def project(outputs: int) -> Linear:
            return Linear(width, outputs, bias=config.bias, **common)

        self.gate, self.x = project(inner), project(inner)
        self.B, self.C = project(shared), project(shared)
        self.dt = project(heads)
        self.output = Linear(
            inner, width, bias=config.has_output_bias, scale=layer.residual_scale, **common
        )

        def convolution(channels: int) -> ShortConvolution:
            bias = config.convolution_bias
            return ShortConvolution(channels, config.convolution, bias=bias, **common)

        self.x_convolution = convolution(inner)
        self.B_convolution = convolution(shared)
        self.C_convolution = convolution(shared)

        self.A_log = Float32Param(decay_rates(rngs.params(), heads, 1.0, 16.0))
        self.dt_bias = Float32Param(
            time_step_bias(rngs.params(), heads, config.dt_min, config.dt_max, config.dt_floor)
        )
        self.D = Float32Param(jnp.ones((heads,), jnp.float32))
        if config.norm:
            self.norm = GatedRMSNorm(
                inner,
                order="norm_then_gate" if config.norm_before_gate else "gate_then_norm",
                group_size=inner // config.groups,
                epsilon=config.norm_epsilon,
                dtype=dtype,
                param_dtype=param_dtype,
            )
        else:
            self.norm = None
        self.config = config
        self.heads = heads

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Mamba2Cache | None = None,
    ) -> tuple[jax.Array, Mamba2Cache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        config = self.config
        batch, time, _ = x.shape
        before = (None,) * 4 if cache is None else cache

        z_factor, x_factor, B_factor, C_factor, dt_factor = config.multipliers

        def convolve(project, factor, convolution, state, heads):
            y = _scaled(project(x), factor)
            y, state = convolution(y, segment_ids=segment_ids, state=state)
            return jax.nn.silu(y).reshape(batch, time, heads, -1), state

        inputs, x_state = convolve(self.x, x_factor, self.x_convolution, before[0], self.heads)
        B, B_state = convolve(self.B, B_factor, self.B_convolution, before[1], config.groups)
        C, C_state = convolve(self.C, C_factor, self.C_convolution, before[2], config.groups)

        dt = _scaled(self.dt(x, out_dtype=jnp.float32), dt_factor)
        dt = jax.nn.softplus(dt + self.dt_bias[...])
        if config.dt_limit is not None:
            dt = jnp.clip(dt, *config.dt_limit)

        out, state = mixers.ssd(
            inputs,
            dt,
            -jnp.exp(self.A_log[...]),
            B,
            C,
            D=self.D[...],
            initial_state=before[3],
            segment_ids=segment_ids,
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        out, gate = out.reshape(batch, time, -1), _scaled(self.gate(x), z_factor)
        if self.norm is None:
            gate = jax.nn.silu(gate.astype(jnp.float32))
            y = (out.astype(jnp.float32) * gate).astype(out.dtype)
        else:
            y = self.norm(out, gate)
        y = self.output(y)
        if segment_ids is not None and config.has_output_bias:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        if cache is None:
            return y, None
        return y, Mamba2Cache(x_state, B_state, C_state, state)

    def init_cache(self, batch: int, capacity: int) -> Mamba2Cache:
        """An empty cache; its size does not depend on ``capacity``."""
        config = self.config
        return Mamba2Cache(
            self.x_convolution.init_state(batch),
            self.B_convolution.init_state(batch),
            self.C_convolution.init_state(batch),
            jnp.zeros((batch, self.heads, config.state_size, config.head_width), jnp.float32),
        )


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * factor
