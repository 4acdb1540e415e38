# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (arXiv 2510.26692), in the form of flash-linear-attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.gated_delta_net import GatedDeltaNetCache
from seqmix.layers.initialisation import decay_rates, time_step_bias
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GatedRMSNorm, l2_normalise
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("KDA")
@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """Settings of `KDA`.

    Attributes:
      heads: heads; default: as many as fill the model width.
      head_width: key and value width of a head.
      convolution: taps of the causal convolutions on queries, keys and values.
      decay_rank: width of the bottleneck that gives the decays; default `head_width`.
      gate_rank: width of the bottleneck that gives the output gate; default `head_width`, 0: a
        full-rank gate (Kimi K3).
      min_log_decay: None: log-decay -exp(A) softplus(z) (Kimi Linear); a negative number b: the
        bounded log-decay b sigmoid(exp(A) z) (Kimi K3 uses -5).
      allow_negative_eigenvalues: write strengths between 0 and 2 instead of 0 and 1.
      norm_epsilon: epsilon of the gated norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.kda`.
    """

    heads: int | None = None
    head_width: int = 64
    convolution: int = 4
    decay_rank: int | None = None
    gate_rank: int | None = None
    min_log_decay: float | None = None
    allow_negative_eigenvalues: bool = False
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "convolution", "decay_rank", "chunk_size")
        checks.at_least(self, 0, "gate_rank")
        checks.positive(self, "norm_epsilon")
        if self.min_log_decay is not None and not self.min_log_decay < 0:
            raise ValueError(f"KDA.min_log_decay must be negative, got {self.min_log_decay}")

    def ranks(self) -> tuple[int, int]:
        """Widths of the bottlenecks of the decays and of the gate (0: no bottleneck)."""
        gate = self.head_width if self.gate_rank is None else self.gate_rank
        return self.decay_rank or self.head_width, gate

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolutions, and for each head the three products of the
        recurrence (read for the error, write, read out). The chunked form's products inside a
        chunk come on top of that and are not counted.
        """
        heads = checks.derived_heads(self, width)
        inner = heads * self.head_width
        decay, gate = self.ranks()
        bottlenecks = 2 * decay * (width + inner)
        bottlenecks += 2 * gate * (width + inner) if gate else 2 * width * inner
        projections = 2 * width * (4 * inner + heads)
        convolutions = 2 * self.convolution * 3 * inner
        return projections + bottlenecks + convolutions + 6 * inner * self.head_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads = checks.derived_heads(self, width)
        state = checks.array_bytes((heads, self.head_width, self.head_width), jnp.float32)
        return state + checks.array_bytes(
            (self.convolution - 1, 3 * heads * self.head_width), dtype
        )


@register("kda", KDAConfig)
class KDA(nnx.Module):
    """Delta rule whose state decays by channel.

    q, k = l2_norm(silu(conv(x W))), v = silu(conv(x W_v)), beta = sigmoid(x W_b), z = x F_a F_b +
    dt_bias, log_decay = -exp(A_log) softplus(z) or min_log_decay sigmoid(exp(A_log) z),
    y = W_o (rms_norm(o) * sigmoid(x G_a G_b)), with o from `seqmix.mixers.kda` and the norm over
    each head.

    ``exp(A_log)`` starts uniform in (1, 16), ``softplus(dt_bias)`` log-uniform in [0.001, 0.1]; the
    bounded gate starts with A_log = 0.
    """

    def __init__(
        self,
        config: KDAConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, size = checks.derived_heads(config, width), config.head_width
        inner = heads * size
        decay_rank, gate_rank = config.ranks()
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        self.query = Linear(width, inner, **common)
        self.key = Linear(width, inner, **common)
        self.value = Linear(width, inner, **common)
        self.decay_down = Linear(width, decay_rank, **common)
        self.decay_up = Linear(decay_rank, inner, **common)
        self.gate_down = Linear(width, gate_rank, **common) if gate_rank else None
        self.gate = Linear(gate_rank or width, inner, **common)
        self.beta = Linear(width, heads, **common)
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)

        taps = config.convolution
        self.query_convolution = ShortConvolution(inner, taps, bias=False, **common)
        self.key_convolution = ShortConvolution(inner, taps, bias=False, **common)
        self.value_convolution = ShortConvolution(inner, taps, bias=False, **common)

        if config.min_log_decay is None:
            self.A_log = Float32Param(decay_rates(rngs.params(), heads, 1.0, 16.0))
        else:
            self.A_log = Float32Param(jnp.zeros((heads,), jnp.float32))
        self.dt_bias = Float32Param(time_step_bias(rngs.params(), inner))
        self.norm = GatedRMSNorm(
            size,
            order="norm_then_gate",
            activation="sigmoid",
            epsilon=config.norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.config = config
        self.heads = heads

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: GatedDeltaNetCache | None = None,
    ) -> tuple[jax.Array, GatedDeltaNetCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        split = (*x.shape[:2], self.heads, self.config.head_width)
        before = (None,) * 4 if cache is None else cache

        def convolve(project, convolution, state):
            y, state = convolution(project(x), segment_ids=segment_ids, state=state)
            return jax.nn.silu(y).reshape(split), state

        query, query_state = convolve(self.query, self.query_convolution, before[0])
        key, key_state = convolve(self.key, self.key_convolution, before[1])
        value, value_state = convolve(self.value, self.value_convolution, before[2])
        beta = jax.nn.sigmoid(self.beta(x, out_dtype=jnp.float32))
        if self.config.allow_negative_eigenvalues:
            beta = 2.0 * beta

        out, state = mixers.kda(
            l2_normalise(query),
            l2_normalise(key),
            value,
            self._log_decay(x).reshape(split),
            beta,
            initial_state=before[3],
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        gate = self.gate(x if self.gate_down is None else self.gate_down(x))
        y = self.output(self.norm(out, gate.reshape(split)).reshape(*x.shape[:2], -1))
        if cache is None:
            return y, None
        return y, GatedDeltaNetCache(query_state, key_state, value_state, state)

    def _log_decay(self, x: jax.Array) -> jax.Array:
        """[B, T, H K] float32."""
        z = self.decay_up(self.decay_down(x), out_dtype=jnp.float32) + self.dt_bias[...]
        rate = jnp.repeat(jnp.exp(self.A_log[...]), self.config.head_width)
        if self.config.min_log_decay is None:
            return -rate * jax.nn.softplus(z)
        return self.config.min_log_decay * jax.nn.sigmoid(rate * z)

    def init_cache(self, batch: int, capacity: int) -> GatedDeltaNetCache:
        """An empty cache; its size does not depend on ``capacity``."""
        size = self.config.head_width
        return GatedDeltaNetCache(
            self.query_convolution.init_state(batch),
            self.key_convolution.init_state(batch),
            self.value_convolution.init_state(batch),
            jnp.zeros((batch, self.heads, size, size), jnp.float32),
        )
