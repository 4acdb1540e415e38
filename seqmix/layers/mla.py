# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (arXiv 2405.04434, 2412.19437): a cache of one latent per token."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary, token_positions
from seqmix.layers.rotary_scaling import RotaryScaling, YarnScaling


@configs.configurable("MLA")
@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Settings of `MLA`; N, P, V and R are the letters of `seqmix.mixers.latent_attention`.

    Attributes:
      heads: heads; default: as many of ``head_width`` as fill the model width.
      head_width: N, channels of a head's queries and keys that come from the latent.
      rotary_width: P, channels of the key that all heads share, and of each head's query for it;
        0 for none.
      value_width: V, value width of a head.
      kv_rank: R, width of the latent that keys and values are computed from.
      query_rank: width of the latent that queries are computed from; default: straight from x.
      rotary: RoPE on the P channels; False for no positions (Kimi Linear), the shared key stays.
      rotary_base: base of RoPE's wavelengths.
      rotary_interleaved: neighbouring channels make a pair (DeepSeek), otherwise the halves do.
      rotary_scaling: how RoPE is stretched for longer contexts; default not at all. YaRN with an
        ``mscale_all_dim`` also multiplies the scale, as DeepSeek does.
      scale: factor of the logits; default (N + P)**-0.5.
      bias: biases on the projections from x to the latents and on the output projection.
      norm_epsilon: epsilon of the norms on the latents.
      impl: implementation of the mixer, see `seqmix.mixers.latent_attention`.
    """

    heads: int | None = None
    head_width: int = 128
    rotary_width: int = 64
    value_width: int = 128
    kv_rank: int = 512
    query_rank: int | None = None
    rotary: bool = True
    rotary_base: float = 10_000.0
    rotary_interleaved: bool = True
    rotary_scaling: RotaryScaling | None = None
    scale: float | None = None
    bias: bool = False
    norm_epsilon: float = 1e-6
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "value_width", "kv_rank", "query_rank")
        checks.at_least(self, 0, "rotary_width")
        checks.positive(self, "rotary_base", "scale", "norm_epsilon")
        if self.rotary and self.rotary_width % 2:
            raise ValueError(f"MLA.rotary_width must be even, got {self.rotary_width}")
        if self.rotates and self.rotary_scaling is not None:
            try:
                self.rotary_scaling.frequencies(self.rotary_width, self.rotary_base)
            except ValueError as error:
                raise ValueError(f"MLA.rotary_scaling: {error}") from None

    @property
    def rotates(self) -> bool:
        """Whether there is anything to rotate."""
        return self.rotary and self.rotary_width > 0

    @property
    def logit_scale(self) -> float:
        """Factor of the logits."""
        scale = (self.head_width + self.rotary_width) ** -0.5 if self.scale is None else self.scale
        if self.rotates and isinstance(self.rotary_scaling, YarnScaling):
            scale *= self.rotary_scaling.logit_factor
        return scale

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2, as training computes it.

        Counts the projections, the logits and the weighted values of expanded heads. Decoding from
        a cache does the same projections, and 4 R + 2 P per head and key.
        """
        heads = checks.derived_heads(self, width)
        key = self.head_width + self.rotary_width
        query = heads * key
        if self.query_rank is None:
            queries = width * query
        else:
            queries = self.query_rank * (width + query)
        latents = width * (self.kv_rank + self.rotary_width)
        ups = self.kv_rank * heads * (self.head_width + self.value_width)
        output = heads * self.value_width * width
        pairs = heads * (key + self.value_width) * context
        return 2.0 * (queries + latents + ups + output + pairs)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of a cache of latents for ``context`` tokens."""
        latents = checks.array_bytes((context, self.kv_rank + self.rotary_width), dtype)
        return latents + checks.array_bytes((), jnp.int32)


class MLAProjections(NamedTuple):
    """What `MLA.project` gives: the arguments of `seqmix.mixers.latent_attention`.

    Attributes:
      query: [B, T, H, N + P], the P channels rotated.
      latent: [B, T, R + P], the normalised latent and then the rotated shared key: what is cached.
      query_latent: [B, T, query_rank], normalised, or None where queries come straight from x.
    """

    query: jax.Array
    latent: jax.Array
    query_latent: jax.Array | None


@register("mla", MLAConfig)
class MLA(nnx.Module):
    """Causal attention whose keys and values are linear in one normalised latent per token.

    With n an RMS norm: c = n(W_c x) [R], p = rope(W_p x) [P] for all heads; head h has the key
    [c K_h | p] and the value c V_h, and the query [a | rope(b)] from W_q x or W_q n(W_d x).

    Other layers may build on its parts: `project`, `key_up`, `value_up`, ``config.logit_scale`` and
    `finish` are all that lies around the mixer.
    """

    def __init__(
        self,
        config: MLAConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads = checks.derived_heads(config, width)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        common = {"rngs": rngs, **dtypes}
        norm = {"epsilon": config.norm_epsilon, **dtypes}
        rank = config.query_rank
        biased = {"bias": config.bias, **common}
        self.query_down = None if rank is None else Linear(width, rank, **biased)
        self.query_norm = None if rank is None else RMSNorm(rank, **norm)
        query = heads * (config.head_width + config.rotary_width)
        self.query = Linear(width if rank is None else rank, query, **common)
        self.latent = Linear(width, config.kv_rank + config.rotary_width, **biased)
        self.latent_norm = RMSNorm(config.kv_rank, **norm)
        self.key = Linear(config.kv_rank, heads * config.head_width, **common)
        self.value = Linear(config.kv_rank, heads * config.value_width, **common)
        self.output = Linear(
            heads * config.value_width, width, scale=layer.residual_scale, **biased
        )
        self.config = config
        self.heads = heads
        self.dtype = jnp.dtype(dtype)

    @property
    def key_up(self) -> jax.Array:
        """[R, H, N] in the compute dtype: the latent's keys by head."""
        return self.key.kernel[...].astype(self.dtype).reshape(self.config.kv_rank, self.heads, -1)

    @property
    def value_up(self) -> jax.Array:
        """[R, H, V] in the compute dtype: the latent's values by head."""
        kernel = self.value.kernel[...].astype(self.dtype)
        return kernel.reshape(self.config.kv_rank, self.heads, -1)

    def project(self, x: jax.Array, positions: jax.Array | None) -> MLAProjections:
        """Queries and latents of new tokens.

        Args:
          x: [B, T, D].
          positions: [B, T] int32; not read where ``config.rotary`` is False.
        """
        config, source, query_latent = self.config, x, None
        if self.query_down is not None:
            source = query_latent = self.query_norm(self.query_down(x))
        query = self.query(source).reshape(*x.shape[:2], self.heads, -1)
        latent, shared = jnp.split(self.latent(x), [config.kv_rank], axis=-1)
        if config.rotates:
            content, turned = jnp.split(query, [config.head_width], axis=-1)
            query = jnp.concatenate([content, self.rotate(turned, positions)], axis=-1)
            shared = self.rotate(shared[:, :, None], positions)[:, :, 0]
        latent = jnp.concatenate([self.latent_norm(latent), shared], axis=-1)
        return MLAProjections(query, latent, query_latent)

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """RoPE on all channels of [B, T, H, P]."""
        return rotary(
            x,
            positions,
            base=self.config.rotary_base,
            interleaved=self.config.rotary_interleaved,
            scaling=self.config.rotary_scaling,
        )

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.LatentCache | None = None,
    ) -> tuple[jax.Array, mixers.LatentCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32 for RoPE; None: counted per document, from the cache's length.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        if positions is None:
            length = None if cache is None else cache.length
            positions = token_positions(x, segment_ids, length)
        parts = self.project(x, positions)
        out, state = mixers.latent_attention(
            parts.query,
            parts.latent,
            self.key_up,
            self.value_up,
            scale=self.config.logit_scale,
            initial_state=cache,
            segment_ids=segment_ids,
            capacity=None if cache is None else cache.latent.shape[1],
            impl=self.config.impl,
        )
        return self.finish(out, segment_ids), None if cache is None else state

    def finish(self, out: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """[B, T, D] from the heads' outputs [B, T, H, V]: the output projection, 0 at padding."""
        y = self.output(out.reshape(*out.shape[:2], -1))
        if segment_ids is not None and self.output.bias is not None:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        return y

    def init_cache(self, batch: int, capacity: int) -> mixers.LatentCache:
        """An empty cache of latents for ``capacity`` tokens."""
        width = self.config.kv_rank + self.config.rotary_width
        return mixers.init_latent_cache(batch, capacity, width, self.dtype)
