# SPDX-License-Identifier: Apache-2.0
"""Channel mixing of RWKV-6 and RWKV-7: a feed-forward part that reads the token before as well.

Source: BlinkDL/RWKV-LM, x060 (arXiv 2404.05892) and x070 (arXiv 2503.14456).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

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


@configs.configurable("RWKVChannelMix")
@dataclasses.dataclass(frozen=True)
class RWKVChannelMixConfig:
    """Settings of `RWKVChannelMix`.

    An RWKV block is two layers of a pattern, since this one has a state as well::

        HybridLM.pattern = "rwkv7 + none, rwkv_channel_mix + none"

    Attributes:
      version: 6 has the receptance gate, 7 has none and starts from other values.
      hidden: hidden width; default: 3.5 times the model width, down to a multiple of 32, for
        version 6 (of narrow models at least 32), 4 times for version 7.
    """

    version: Literal[6, 7] = 7
    hidden: int | None = None

    def __post_init__(self):
        checks.at_least(self, 1, "hidden")

    def hidden_width(self, width: int) -> int:
        """Hidden width at this model width."""
        if self.hidden is not None:
            return self.hidden
        return 4 * width if self.version == 7 else max(32, 7 * width // 64 * 32)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token of the products, multiply-add = 2; the same at every context."""
        receptance = 2 * width * width if self.version == 6 else 0
        return 4 * width * self.hidden_width(width) + receptance

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return checks.array_bytes((1, width), dtype)


class RWKVChannelMixCache(NamedTuple):
    """Decode cache of an `RWKVChannelMix`.

    Attributes:
      shift: [B, 1, D] last token.
    """

    shift: jax.Array


@register("rwkv_channel_mix", RWKVChannelMixConfig)
class RWKVChannelMix(nnx.Module):
    """Squared-ReLU network on a mix of the present token and the one before.

    With x_c = x_t + (x_{t-1} - x_t) mix_c: y = relu(x_key W_key)^2 W_value, in version 6 times
    sigmoid(x_receptance W_receptance).

    The mixes start by channel and depth as in the reference: 1 - (i / D)^r in version 6 and
    1 - (i / D)^(r^4) in version 7, r falling from 1 in the first layer to almost 0 in the last. In
    version 7 W_key starts uniform in +-0.5 / sqrt(D), W_value at zero.
    """

    def __init__(
        self,
        config: RWKVChannelMixConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        hidden, newest = config.hidden_width(width), config.version == 7
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        _, falling = rwkv.depth_ratios(layer)
        channel = jnp.arange(width, dtype=jnp.float32) / width

        def mix() -> NoDecayParam:
            past = 1.0 - channel ** (falling**4 if newest else falling)
            return NoDecayParam(past.astype(param_dtype))

        self.key = Linear(width, hidden, **common)
        self.value = Linear(hidden, width, scale=0.0 if newest else layer.residual_scale, **common)
        self.mix_key = mix()
        if newest:
            bound = 0.5 * width**-0.5
            shape = (width, hidden)
            self.key.kernel = nnx.Param(
                jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound)
            )
        self.receptance = None if newest else Linear(width, width, **common)
        self.mix_receptance = None if newest else mix()
        self.dtype = jnp.dtype(dtype)
        self.width = width

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: RWKVChannelMixCache | None = None,
    ) -> tuple[jax.Array, RWKVChannelMixCache | None]:
        """Mixes the channels of each token and the one before.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        x = x.astype(self.dtype)
        shift = None if cache is None else cache.shift
        past, shift = mixers.token_shift(x, initial_state=shift, segment_ids=segment_ids)

        def mixed(mix: NoDecayParam) -> jax.Array:
            return x + (past - x) * mix[...].astype(self.dtype)

        y = self.value(jnp.square(jax.nn.relu(self.key(mixed(self.mix_key)))))
        if self.receptance is not None:
            gate = self.receptance(mixed(self.mix_receptance), out_dtype=jnp.float32)
            y = y * jax.nn.sigmoid(gate).astype(self.dtype)
        if segment_ids is not None:
            # The token itself may be anything at padding.
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        return y, None if cache is None else RWKVChannelMixCache(shift)

    def init_cache(self, batch: int, capacity: int) -> RWKVChannelMixCache:
        """An empty cache; its size does not depend on ``capacity``."""
        return RWKVChannelMixCache(jnp.zeros((batch, 1, self.width), self.dtype))
