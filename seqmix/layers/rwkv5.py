# SPDX-License-Identifier: Apache-2.0
"""Time mixing of RWKV-5 "Eagle" (arXiv 2404.05892), as RWKV-LM's x052 computes it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers import rwkv_time_mix as rwkv
from seqmix.layers.linear import Linear
from seqmix.layers.parameters import NoDecayParam
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rwkv_time_mix import RWKVCache

_MIXED = ("receptance", "key", "value", "gate")


@configs.configurable("RWKV5")
@dataclasses.dataclass(frozen=True)
class RWKV5Config:
    """Settings of `RWKV5`.

    Attributes:
      heads: heads; default: as many as fill the model width.
      head_width: key and value width of a head.
      norm_epsilon: epsilon of the norm over each head. The default is the reference's 1e-5 after
        its division by 8.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.rwkv5`.
    """

    heads: int | None = None
    head_width: int = 64
    norm_epsilon: float = 64e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "chunk_size")
        checks.positive(self, "norm_epsilon")

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, and for each head the two products of the recurrence (write, read
        out). The chunked form's products inside a chunk come on top of that and are not counted.
        """
        return rwkv.flops_per_token(self, width)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return rwkv.cache_bytes(self, width, dtype)


@register("rwkv5", RWKV5Config)
class RWKV5(nnx.Module):
    """Linear attention with one learned decay per channel and a bonus for the present token.

    Each projection reads its own mix of the present token and the one before,
    x_c = mix_c x_t + (1 - mix_c) x_{t-1}: r, k, v = x_r W_r, x_k W_k, x_v W_v,
    y = W_o (group_norm(o) * silu(x_g W_g)), with o from `seqmix.mixers.rwkv5`,
    log_decay = -exp(decay).

    Decay, bonus and mixes start by channel and depth as in the reference. Channel mixing, the other
    half of an RWKV block, is the model's feed-forward part.
    """

    def __init__(
        self,
        config: RWKV5Config,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, size = checks.derived_heads(config, width), config.head_width
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.receptance = Linear(width, heads * size, **common)
        self.key = Linear(width, heads * size, **common)
        self.value = Linear(width, heads * size, **common)
        self.gate = Linear(width, heads * size, **common)
        self.output = rwkv.Output(config, width, layer=layer, **common)

        shares = rwkv.present_shares(width, layer)
        self.mix = NoDecayParam(jnp.stack([shares[n] for n in _MIXED]).astype(param_dtype))
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
        mix = self.mix[...].astype(self.dtype)
        mixed = {n: x * mix[i] + past * (1 - mix[i]) for i, n in enumerate(_MIXED)}

        heads = (*x.shape[:2], *self.bonus.shape)
        out, state = mixers.rwkv5(
            self.receptance(mixed["receptance"]).reshape(heads),
            self.key(mixed["key"]).reshape(heads),
            self.value(mixed["value"]).reshape(heads),
            -jnp.exp(self.decay[...]),
            self.bonus[...],
            initial_state=state,
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        y = self.output(out, self.gate(mixed["gate"]), segment_ids)
        return y, None if cache is None else RWKVCache(shift, state)

    def init_cache(self, batch: int, capacity: int) -> RWKVCache:
        """An empty cache; its size does not depend on ``capacity``."""
        # Not from the parameters: those of a scanned stack have one more axis.
        heads, size = checks.derived_heads(self.config, self.width), self.config.head_width
        return RWKVCache(
            jnp.zeros((batch, 1, self.width), self.dtype),
            jnp.zeros((batch, heads, size, size), jnp.float32),
        )
