# SPDX-License-Identifier: Apache-2.0
"""Time mixing of RWKV-7 "Goose" (arXiv 2503.14456), as RWKV-LM's x070 computes it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers import rwkv_time_mix as rwkv
from seqmix.layers.linear import Linear, product
from seqmix.layers.norms import GroupNorm
from seqmix.layers.parameters import Float32Param, NoDecayParam
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rwkv_time_mix import RWKVCache

# Power of the channel position that starts each mix, as in the reference.
_MIX_POWERS = {
    "receptance": 0.2,
    "decay": 0.9,
    "key": 0.7,
    "value": 0.7,
    "rate": 0.9,
    "gate": 0.2,
}


@configs.configurable("RWKV7")
@dataclasses.dataclass(frozen=True)
class RWKV7Config:
    """Settings of `RWKV7`.

    Attributes:
      heads: heads; default: as many as fill the model width.
      head_width: key and value width of a head.
      decay_rank, rate_rank, value_rank, gate_rank: widths of the bottlenecks that give decays,
        in-context learning rates, the share of the first layer's values, and the output gate;
        default: the reference's, a multiple of 32 near 2.5, 2.5, 1.7 and 5 times sqrt(width).
      norm_epsilon: epsilon of the norm over each head.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.rwkv7`.
    """

    heads: int | None = None
    head_width: int = 64
    decay_rank: int | None = None
    rate_rank: int | None = None
    value_rank: int | None = None
    gate_rank: int | None = None
    norm_epsilon: float = 64e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "chunk_size")
        checks.at_least(self, 1, "decay_rank", "rate_rank", "value_rank", "gate_rank")
        checks.positive(self, "norm_epsilon")

    def ranks(self, width: int) -> dict[str, int]:
        """Widths of the bottlenecks by name at this model width."""
        factors = {"decay": 2.5, "rate": 2.5, "value": 1.7, "gate": 5.0}
        return {
            n: getattr(self, f"{n}_rank") or max(32, 32 * round(f * math.sqrt(width) / 32))
            for n, f in factors.items()
        }

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the bottlenecks, and for each head the four products of the
        recurrence (read for the correction, correct, write, read out). The chunked form's products
        inside a chunk come on top of that and are not counted.
        """
        inner = checks.derived_heads(self, width) * self.head_width
        bottlenecks = 2 * sum(self.ranks(width).values()) * (width + inner)
        return 8 * width * inner + bottlenecks + 8 * inner * self.head_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return rwkv.cache_bytes(self, width, dtype)


@register("rwkv7", RWKV7Config)
class RWKV7(nnx.Module):
    """A state that decays by channel and is corrected along a direction of its own.

    Each projection reads x_c = x_t + (x_{t-1} - x_t) mix_c. With bottlenecks f(x) = x A B + bias:
    log_decay = -exp(-1/2) sigmoid(f_w(x_w) through tanh), rate = sigmoid(f_a(x_a)),
    kappa = l2_norm(k * k_k) by head, k = k (1 + (rate - 1) k_a), and v moves by
    sigmoid(f_v(x_v)) towards the values of the model's first RWKV-7 layer, which `shared` brings.
    `seqmix.mixers.rwkv7` runs with a = -kappa, b = kappa * rate; with the sum over each head
    u = sum(r * k * r_k), y = W_o ((group_norm(o) + u v) * (sigmoid(x_g G_1) G_2)).

    Initial values follow the reference by channel and depth; the output projection starts at zero.
    Channel mixing, the other half of an RWKV block, is the model's feed-forward part.
    """

    def __init__(
        self,
        config: RWKV7Config,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, size = checks.derived_heads(config, width), config.head_width
        inner = heads * size
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.receptance = Linear(width, inner, **common)
        self.key = Linear(width, inner, **common)
        self.value = Linear(width, inner, **common)
        self.output = Linear(inner, width, scale=0.0, **common)
        self.norm = GroupNorm(
            inner, heads, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype
        )
        _, falling = rwkv.depth_ratios(layer)
        channel = jnp.arange(width, dtype=jnp.float32) / width
        self.mix = NoDecayParam(
            jnp.stack([1.0 - channel ** (p * falling) for p in _MIX_POWERS.values()]).astype(
                param_dtype
            )
        )
        orthogonal = jax.nn.initializers.orthogonal(0.1)
        for name, rank in config.ranks(width).items():
            down = NoDecayParam(jnp.zeros((width, rank), param_dtype))
            up = NoDecayParam(orthogonal(rngs.params(), (rank, inner), param_dtype))
            setattr(self, f"{name}_down", down)
            setattr(self, f"{name}_up", up)
        for name, value in _biases(heads, size, layer).items():
            setattr(self, name, Float32Param(value))
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.heads, self.width = heads, width
        self.shared_name = f"rwkv7.value.{inner}"

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: RWKVCache | None = None,
        shared: tuple[jax.Array, jax.Array] | None = None,
    ):
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.
          shared: values [B, T, H K] of the lowest RWKV-7 layer and a boolean, whether a layer has
            set them; None: this layer stands alone.

        Returns:
          y [B, T, D] in the compute dtype, the cache after these tokens (None without one), and,
          where `shared` was given, what the layers above get.
        """
        x = x.astype(self.dtype)
        shift, state = (None, None) if cache is None else cache
        past, shift = mixers.token_shift(x, initial_state=shift, segment_ids=segment_ids)
        mix = self.mix[...].astype(self.dtype)
        mixed = {n: x + (past - x) * mix[i] for i, n in enumerate(_MIX_POWERS)}
        split = (*x.shape[:2], self.heads, self.config.head_width)

        receptance = self.receptance(mixed["receptance"]).reshape(split)
        key, value = self.key(mixed["key"]), self.value(mixed["value"])
        decay = self._bottleneck("decay", mixed["decay"], jnp.tanh) + self.decay_bias[...]
        rate = jax.nn.sigmoid(self._bottleneck("rate", mixed["rate"]) + self.rate_bias[...])
        first = value if shared is None else jnp.where(shared[1], shared[0], value)
        share = self._bottleneck("value", mixed["value"]) + self.value_bias[...]
        value = value + (first - value) * jax.nn.sigmoid(share).astype(self.dtype)

        wide = key.astype(jnp.float32)
        kappa = (wide * self.kappa_scale[...]).reshape(split)
        size = jnp.sqrt(jnp.sum(jnp.square(kappa), axis=-1, keepdims=True))
        kappa = kappa / jnp.maximum(size, 1e-12)
        key = (wide * (1.0 + (rate - 1.0) * self.key_rate[...])).astype(self.dtype).reshape(split)
        value = value.reshape(split)
        out, state = mixers.rwkv7(
            receptance,
            key,
            value,
            (-math.exp(-0.5) * jax.nn.sigmoid(decay)).reshape(split),
            -kappa.astype(self.dtype),
            (kappa * rate.reshape(split)).astype(self.dtype),
            initial_state=state,
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        gate = self._bottleneck("gate", mixed["gate"], jax.nn.sigmoid).astype(self.dtype)
        bonus = receptance.astype(jnp.float32) * key * self.bonus[...]
        present = (jnp.sum(bonus, axis=-1, keepdims=True) * value).astype(self.dtype)
        y = self.output((self.norm(out.reshape(gate.shape)) + present.reshape(gate.shape)) * gate)
        if segment_ids is not None:
            # The norm's bias speaks even where nothing came in.
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        cache = None if cache is None else RWKVCache(shift, state)
        return (y, cache) if shared is None else (y, cache, (first, jnp.ones_like(shared[1])))

    def _bottleneck(self, name: str, x: jax.Array, activation: Any = None) -> jax.Array:
        """[B, T, H K] float32."""
        down, up = (getattr(self, f"{name}_{part}")[...] for part in ("down", "up"))
        hidden = product(x, down.astype(self.dtype), self.dtype)
        hidden = hidden if activation is None else activation(hidden)
        return product(hidden, up.astype(self.dtype), jnp.float32)

    def init_shared(self, batch: int, time: int, cache: Any) -> tuple[jax.Array, jax.Array]:
        """What the lowest layer of the class gets as `shared`, whatever its cache."""
        inner = self.heads * self.config.head_width
        return jnp.zeros((batch, time, inner), self.dtype), jnp.zeros((), bool)

    def init_cache(self, batch: int, capacity: int) -> RWKVCache:
        """An empty cache; its size does not depend on ``capacity``."""
        size = self.config.head_width
        return RWKVCache(
            jnp.zeros((batch, 1, self.width), self.dtype),
            jnp.zeros((batch, self.heads, size, size), jnp.float32),
        )


def _biases(heads: int, size: int, layer: LayerInfo) -> dict[str, jax.Array]:
    """Initial biases and channel factors, [H K] (bonus [H, K]) float32, as in the reference."""
    inner = heads * size
    rising, _ = rwkv.depth_ratios(layer)
    position = jnp.arange(inner, dtype=jnp.float32) / max(inner - 1, 1)
    centred = position - 0.5
    half = max((size - 1) / 2, 0.5)
    zigzag = (jnp.arange(inner, dtype=jnp.float32) % size - (size - 1) / 2) / half
    zigzag = zigzag * jnp.abs(zigzag)
    return {
        "decay_bias": -5.5 + 6.0 * position ** (1.0 + rising**0.3) + 2.5 * zigzag,
        "rate_bias": -0.19 + 0.3 * zigzag + 0.4 * centred,
        "value_bias": 0.73 - 0.4 * centred,
        "kappa_scale": 0.71 - 0.1 * centred,
        "key_rate": jnp.full((inner,), 1.02),
        "bonus": jnp.full((heads, size), -0.04),
    }
