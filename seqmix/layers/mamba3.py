# SPDX-License-Identifier: Apache-2.0
"""Mamba-3 (arXiv 2603.15569), single input and single output, as its reference code computes it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.initialisation import time_step_bias
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GatedRMSNorm, RMSNorm
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary_width


@configs.configurable("Mamba3")
@dataclasses.dataclass(frozen=True)
class Mamba3Config:
    """Settings of `Mamba3`.

    Attributes:
      expand: inner width over model width.
      head_width: width P of a head; it divides the inner width.
      state_size: states N per channel.
      groups: groups G that share B and C before their biases; they divide the heads.
      rotary_fraction: share of the states that turn in pairs, more than 0.
      least_rate: decay rates -A are at least this.
      output_norm: RMS norm over each head before the gate.
      dt_min, dt_max, dt_floor: time steps start log-uniform in [dt_min, dt_max], at least dt_floor.
      norm_epsilon: epsilon of the norms.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.mamba3`.
    """

    expand: float = 2.0
    head_width: int = 64
    state_size: int = 128
    groups: int = 1
    rotary_fraction: float = 0.5
    least_rate: float = 1e-4
    output_norm: bool = False
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_floor: float = 1e-4
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "head_width", "state_size", "groups", "chunk_size")
        checks.positive(self, "expand", "least_rate", "dt_min", "dt_max", "dt_floor")
        checks.positive(self, "norm_epsilon", "rotary_fraction")
        if self.dt_min > self.dt_max:
            raise ValueError(f"Mamba3.dt_min must be <= dt_max, got {self.dt_min} > {self.dt_max}")
        try:
            rotary_width(self.state_size, self.rotary_fraction)
        except ValueError as error:
            raise ValueError(f"Mamba3.rotary_fraction: {error}") from None

    def sizes(self, width: int) -> tuple[int, int]:
        """Inner width and heads at this model width.

        Raises:
          ValueError: the inner width is no multiple of the head width, or the heads none of groups.
        """
        inner = checks.expanded(self, width)
        checks.multiple(self, "expand * width", inner, "head_width", self.head_width)
        heads = inner // self.head_width
        checks.multiple(self, "heads (expand * width / head_width)", heads, "groups", self.groups)
        return inner, heads

    def turns(self) -> int:
        """Pairs of states that turn."""
        return rotary_width(self.state_size, self.rotary_fraction) // 2

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections and the two products of the recurrence (write, read out) and a
        token's read of itself, not the extra products of its chunked form.
        """
        inner, heads = self.sizes(width)
        shared = 2 * self.groups * self.state_size
        projections = 2 * width * (3 * inner + shared + 3 * heads + self.turns())
        return projections + 4 * inner * self.state_size + 2 * heads * self.state_size

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        inner, heads = self.sizes(width)
        per_head = self.state_size + self.turns()
        numbers = inner * self.state_size + heads * per_head + inner
        return checks.array_bytes((numbers,), jnp.float32)


@register("mamba3", Mamba3Config)
class Mamba3(nnx.Module):
    """Trapezoidal state-space layer with rotating states and no convolution.

    B, C = rms_norm(u W) + bias of each head, dt = softplus(u W_dt + dt_bias),
    A = -max(heavy_tail(u W_A), least_rate), l = sigmoid(u W_l), rotation = pi tanh(u W_r) dt, and
    y = W_o (o * silu(u W_z)) with o from `seqmix.mixers.mamba3` and D's skip.

    heavy_tail(a) = 1 + a above 0 and 1 / (1 - a) below, as in the reference code since 2026-07
    (softplus before); its fused input projection [z, x, B, C, dt, A, l, r] is kept as separate
    parts. Biases and D start at one.
    """

    def __init__(
        self,
        config: Mamba3Config,
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
        self.gate = Linear(width, inner, **common)
        self.x = Linear(width, inner, **common)
        self.B = Linear(width, shared, **common)
        self.C = Linear(width, shared, **common)
        self.dt = Linear(width, heads, **common)
        self.A = Linear(width, heads, **common)
        self.trapezoid = Linear(width, heads, **common)
        self.rotation = Linear(width, config.turns(), **common)
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)

        norm = {"epsilon": config.norm_epsilon, "param_dtype": param_dtype}
        self.B_norm = RMSNorm(config.state_size, dtype=jnp.float32, **norm)
        self.C_norm = RMSNorm(config.state_size, dtype=jnp.float32, **norm)
        ones = jnp.ones((heads, config.state_size), jnp.float32)
        self.B_bias, self.C_bias = Float32Param(ones), Float32Param(ones)
        self.dt_bias = Float32Param(
            time_step_bias(rngs.params(), heads, config.dt_min, config.dt_max, config.dt_floor)
        )
        self.D = Float32Param(jnp.ones((heads,), jnp.float32))
        gated = {"order": "norm_then_gate", "group_size": config.head_width, "dtype": dtype}
        self.norm = GatedRMSNorm(inner, **gated, **norm) if config.output_norm else None
        self.config = config
        self.heads = heads
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.Mamba3State | None = None,
    ) -> tuple[jax.Array, mixers.Mamba3State | None]:
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

        def shared(project, norm, bias):
            y = norm(project(x).reshape(batch, time, config.groups, config.state_size))
            y = jnp.repeat(y, self.heads // config.groups, axis=2)
            return (y + bias[...]).astype(self.dtype)

        def wide(project):
            return project(x, out_dtype=jnp.float32)

        dt = jax.nn.softplus(wide(self.dt) + self.dt_bias[...])
        rate = wide(self.A)
        # Each branch reads a number that the other's derivative cannot spoil.
        tail = 1 / (1 - jnp.minimum(rate, 0))
        rate = jnp.maximum(jnp.where(rate >= 0, 1 + rate, tail), config.least_rate)
        turn = jnp.pi * jnp.tanh(wide(self.rotation))
        out, state = mixers.mamba3(
            self.x(x).reshape(batch, time, self.heads, config.head_width),
            dt,
            -rate,
            shared(self.B, self.B_norm, self.B_bias),
            shared(self.C, self.C_norm, self.C_bias),
            jax.nn.sigmoid(wide(self.trapezoid)),
            turn[:, :, None] * dt[..., None],
            D=self.D[...],
            initial_state=cache,
            segment_ids=segment_ids,
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        out, gate = out.reshape(batch, time, -1), self.gate(x)
        out = out * jax.nn.silu(gate) if self.norm is None else self.norm(out, gate)
        y = self.output(out)
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> mixers.Mamba3State:
        """An empty cache; its size does not depend on ``capacity``."""
        config, heads = self.config, self.heads

        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((batch, heads, *shape), jnp.float32)

        return mixers.Mamba3State(
            zeros(config.state_size, config.head_width),
            zeros(config.state_size),
            zeros(config.head_width),
            zeros(config.turns()),
        )
