# SPDX-License-Identifier: Apache-2.0
"""Time mixing of RWKV-6 "Finch" (arXiv 2404.05892), as RWKV-LM's x060 computes it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers import rwkv_time_mix as rwkv
from seqmix.layers.linear import Linear, product
from seqmix.layers.parameters import NoDecayParam
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rwkv_time_mix import RWKVCache

_MIXED = ("decay", "key", "value", "receptance", "gate")


@configs.configurable("RWKV6")
@dataclasses.dataclass(frozen=True)
class RWKV6Config:
    """Settings of `RWKV6`.

    Attributes:
      heads: heads; default: as many as fill the model width.
      head_width: key and value width of a head.
      mix_rank: width of each bottleneck that adjusts a mix of tokens.
      decay_rank: width of the bottleneck that adjusts the decays.
      norm_epsilon: epsilon of the norm over each head.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.rwkv6`.
    """

    heads: int | None = None
    head_width: int = 64
    mix_rank: int = 32
    decay_rank: int = 64
    norm_epsilon: float = 64e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "mix_rank", "decay_rank", "chunk_size")
        checks.positive(self, "norm_epsilon")

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the bottlenecks, and for each head the two products of the
        recurrence (write, read out). The chunked form's products inside a chunk come on top of
        that and are not counted.
        """
        inner = checks.derived_heads(self, width) * self.head_width
        mixes = 4 * len(_MIXED) * width * self.mix_rank
        decays = 2 * self.decay_rank * (width + inner)
        return rwkv.flops_per_token(self, width) + mixes + decays

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return rwkv.cache_bytes(self, width, dtype)


@register("rwkv6", RWKV6Config)
class RWKV6(nnx.Module):
    """Linear attention with a data-dependent decay per channel and a bonus for the present token.

    Each projection reads its own, data-dependent mix of the present token and the one before. With
    d = x_{t-1} - x_t: m = tanh((x + d mix_x) W_1) W_2, one part for each c of decay, key, value,
    receptance and gate, and x_c = x + d (mix_c + m_c). Then r, k, v = x_r W_r, x_k W_k, x_v W_v,
    log_decay = -exp(decay + tanh(x_w D_1) D_2), y = W_o (group_norm(o) * silu(x_g W_g)), with o
    from `seqmix.mixers.rwkv6`.

    Decay, bonus and mixes start by channel and depth as in the reference; of each bottleneck the
    first matrix at zero, the second uniform in +-0.01, and neither decays. Channel mixing, the
    other half of an RWKV block, is the model's feed-forward part.
    """

    def __init__(
        self,
        config: RWKV6Config,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, size = checks.derived_heads(config, width), config.head_width
        inner, parts = heads * size, len(_MIXED)
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.receptance = Linear(width, inner, **common)
        self.key = Linear(width, inner, **common)
        self.value = Linear(width, inner, **common)
        self.gate = Linear(width, inner, **common)
        self.output = rwkv.Output(config, width, layer=layer, **common)

        def small(*shape: int) -> NoDecayParam:
            return NoDecayParam(jax.random.uniform(rngs.params(), shape, param_dtype, -0.01, 0.01))

        shares = rwkv.present_shares(width, layer)
        past = {n: 1.0 - share for n, share in shares.items()}
        self.mix_x = NoDecayParam(past["key"].astype(param_dtype))
        self.mix = NoDecayParam(jnp.stack([past[n] for n in _MIXED]).astype(param_dtype))
        self.mix_down = NoDecayParam(jnp.zeros((width, parts * config.mix_rank), param_dtype))
        self.mix_up = small(parts, config.mix_rank, width)
        self.decay_down = NoDecayParam(jnp.zeros((width, config.decay_rank), param_dtype))
        self.decay_up = small(config.decay_rank, inner)
        self.decay = rwkv.decay_parameter(heads, size, layer)
        self.bonus = rwkv.bonus_parameter(heads, size, layer)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.width = width

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: RWKVCache | None = None,
    ) -> tuple[jax.Array, RWKVCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        x = x.astype(self.dtype)
        shift, state = (None, None) if cache is None else cache
        past, shift = mixers.token_shift(x, initial_state=shift, segment_ids=segment_ids)
        mixed = self._mixes(x, past - x)

        heads = (*x.shape[:2], *self.bonus.shape)
        hidden = jnp.tanh(self._product(mixed["decay"], self.decay_down))
        adjusted = self._product(hidden, self.decay_up, jnp.float32).reshape(heads)
        out, state = mixers.rwkv6(
            self.receptance(mixed["receptance"]).reshape(heads),
            self.key(mixed["key"]).reshape(heads),
            self.value(mixed["value"]).reshape(heads),
            -jnp.exp(self.decay[...] + adjusted),
            self.bonus[...],
            initial_state=state,
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        y = self.output(out, self.gate(mixed["gate"]), segment_ids)
        return y, None if cache is None else RWKVCache(shift, state)

    def _mixes(self, x: jax.Array, difference: jax.Array) -> dict[str, jax.Array]:
        """The inputs [B, T, D] of the projections, by name."""
        mix_x, mix = (p[...].astype(self.dtype) for p in (self.mix_x, self.mix))
        hidden = jnp.tanh(self._product(x + difference * mix_x, self.mix_down))
        hidden = hidden.reshape(-1, len(_MIXED), self.config.mix_rank).swapaxes(0, 1)
        adjusted = self._product(hidden, self.mix_up)
        return {
            n: x + difference * (mix[i] + adjusted[i].reshape(x.shape))
            for i, n in enumerate(_MIXED)
        }

    def _product(self, x: jax.Array, matrix: nnx.Variable, out_dtype: Any = None) -> jax.Array:
        return product(x, matrix[...].astype(self.dtype), out_dtype or self.dtype)

    def init_cache(self, batch: int, capacity: int) -> RWKVCache:
        """An empty cache; its size does not depend on ``capacity``."""
        # Not from the parameters: those of a scanned stack have one more axis.
        heads, size = checks.derived_heads(self.config, self.width), self.config.head_width
        return RWKVCache(
            jnp.zeros((batch, 1, self.width), self.dtype),
            jnp.zeros((batch, heads, size, size), jnp.float32),
        )
