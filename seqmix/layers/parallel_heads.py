# SPDX-License-Identifier: Apache-2.0
"""Attention and a state-space layer side by side on the same input (Hymba, Falcon-H1)."""

import dataclasses
from collections.abc import MutableMapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix.layers import checks, kv_sharing, registry
from seqmix.layers.attention import Attention, AttentionConfig
from seqmix.layers.kv_sharing import SharedKV
from seqmix.layers.linear import Linear, multiplied
from seqmix.layers.mamba import MambaConfig
from seqmix.layers.mamba2 import Mamba2Config
from seqmix.layers.norms import RMSNorm
from seqmix.layers.registry import LayerInfo, register

_MULTIPLIERS = ("attention_in", "attention_out", "ssm_in", "ssm_out")


@configs.configurable("ParallelHeads")
@dataclasses.dataclass(frozen=True)
class ParallelHeadsConfig:
    """Settings of `ParallelHeads`.

    Both branches are configured by their own names, in this layer's scope::

        HybridLM.pattern = 'local/parallel_heads, parallel_heads'
        ParallelHeads.merge = 'mean'
        ParallelHeads.ssm = @Mamba()
        Attention.value_width = 128
        local/Attention.window = 1024

    Attributes:
      attention: the attention branch. It may share keys and values with that of other layers.
      ssm: the other branch: @Mamba(), @Mamba2() or, where branches are summed, any causal layer
        that hands nothing to other layers and has no losses of its own.
      merge: 'sum' adds the two layers (Falcon-H1); 'mean' takes the mean of their heads' outputs,
        each RMS-normalised over its channels with a learned scale, before one projection that
        replaces both layers' own (Hymba). Both branches must then have equally many channels, and
        ``Mamba.bias`` is that of its input projections alone.
      attention_in, ssm_in: factors of the input of each branch (Falcon-H1).
      attention_out, ssm_out: factors of their results, with 'sum' only: norms undo them.
      output_bias: bias on the joint projection, with 'mean' only.
      norm_epsilon: epsilon of the norms of 'mean'.
    """

    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    ssm: Any = dataclasses.field(default_factory=MambaConfig)
    merge: Literal["sum", "mean"] = "sum"
    attention_in: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    output_bias: bool = False
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        checks.positive(self, *_MULTIPLIERS, "norm_epsilon")
        layer, name = _layer_of(self.ssm), configs.gin_name(type(self.ssm))
        if self.merge == "sum":
            unused = {"output_bias": False}
            shares = hasattr(layer, "init_shared") or hasattr(layer, "auxiliary_names")
            if not isinstance(layer, type) or shares or not getattr(self.ssm, "causal", True):
                raise ValueError(
                    "ParallelHeads.ssm must be a causal layer that neither shares anything with "
                    f"other layers nor has losses of its own, got {name}"
                )
        else:
            unused = {"attention_out": 1.0, "ssm_out": 1.0}
            if not isinstance(self.ssm, MambaConfig | Mamba2Config):
                raise ValueError(
                    "ParallelHeads.ssm must be @Mamba() or @Mamba2() where merge = 'mean', got "
                    f"{name}"
                )
            for branch in (self.attention, self.ssm):
                if getattr(branch, "output_bias", None):
                    raise ValueError(
                        "branches have no projection of their own where ParallelHeads.merge = "
                        "'mean'; set ParallelHeads.output_bias instead of "
                        f"{configs.gin_name(type(branch))}.output_bias"
                    )
        for field, needed in unused.items():
            if getattr(self, field) != needed:
                raise ValueError(
                    f"ParallelHeads.{field} has no meaning where merge = {self.merge!r}, "
                    f"got {getattr(self, field)}"
                )

    def channels(self, width: int) -> int:
        """Channels of the heads of each branch that 'mean' joins.

        Raises:
          ValueError: the two have not equally many.
        """
        attention = self.attention.head_counts(width)[0] * self.attention.value_head_width
        inner = self.ssm.sizes(width)[0]
        if attention != inner:
            raise ValueError(
                "ParallelHeads.merge = 'mean' needs branches of equally many channels, got "
                f"attention's heads * value_width = {attention} and the inner width {inner} of "
                f"{configs.gin_name(type(self.ssm))}"
            )
        return inner

    def connect(self, below: MutableMapping[str, Any], width: int) -> None:
        """Checks what the attention branch reads and adds what it shares; see `AttentionConfig`."""
        kv_sharing.connect(self.attention, below, width)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token of both branches, with one output projection for 'mean'."""
        total = self.attention.flops_per_token(width, context)
        total += self.ssm.flops_per_token(width, context)
        return total if self.merge == "sum" else total - 2 * width * self.channels(width)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of both branches' caches."""
        branches = (self.attention, self.ssm)
        return sum(branch.cache_bytes(width, context, dtype) for branch in branches)


def _layer_of(config: Any) -> Any:
    """The registered layer of a config.

    Raises:
      ValueError: there is none.
    """
    for entry in map(registry.get, registry.names()):
        if entry.config is type(config):
            return entry.layer
    raise ValueError(
        f"ParallelHeads.ssm must be the config of a layer, such as @Mamba2(), got {config!r}"
    )


class ParallelHeadsCache(NamedTuple):
    """Decode cache of a `ParallelHeads`: those of its branches."""

    attention: Any
    ssm: Any


class _NoProjection(nnx.Module):
    """Stands for a branch's output projection, and leaves the heads' outputs as they are."""

    bias = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


@register("parallel_heads", ParallelHeadsConfig)
class ParallelHeads(nnx.Module):
    """Two layers on one input.

    'sum' (Falcon-H1): y = a_out attention(a_in x) + s_out ssm(s_in x).
    'mean' (Hymba, arXiv 2411.13676): y = W_o (norm(A) + norm(S)) / 2, where A are the outputs of
    the attention heads and S those of the state-space heads after their gate (and, with Mamba-2,
    its norm), both before any output projection.
    """

    def __init__(
        self,
        config: ParallelHeadsConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        joint = config.merge == "mean"
        # Two branches are added, so each starts with half the variance.
        branch = layer if joint else dataclasses.replace(layer, branches=2 * layer.branches)
        common = {"layer": branch, "rngs": rngs, **dtypes}
        self.attention = Attention(config.attention, width, **common)
        self.ssm = _layer_of(config.ssm)(config.ssm, width, **common)
        if joint:
            self.attention.output = _NoProjection()
            self.ssm.output = _NoProjection()

        def norm() -> RMSNorm | None:
            if not joint:
                return None
            return RMSNorm(config.channels(width), epsilon=config.norm_epsilon, **dtypes)

        self.attention_norm, self.ssm_norm = norm(), norm()
        self.output = (
            Linear(
                config.channels(width),
                width,
                bias=config.output_bias,
                scale=layer.residual_scale,
                rngs=rngs,
                **dtypes,
            )
            if joint
            else None
        )
        self.config = config
        self.shared_name = self.attention.shared_name

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: ParallelHeadsCache | None = None,
        shared: SharedKV | None = None,
    ):
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32 for the branches; None: each counts them per document.
          cache: what `init_cache` or an earlier call gave; None: no cache.
          shared: keys and values of the layer below that shares them.

        Returns:
          y [B, T, D] in the compute dtype, the cache after these tokens (None without one), and,
          where ``shared`` was given, what the layers above get.
        """
        config = self.config
        common = {"segment_ids": segment_ids, "positions": positions}
        caches = (None, None) if cache is None else cache
        attended, kept, *given = self.attention(
            multiplied(x, config.attention_in), cache=caches[0], shared=shared, **common
        )
        mixed, state = self.ssm(multiplied(x, config.ssm_in), cache=caches[1], **common)
        if self.output is None:
            y = multiplied(attended, config.attention_out) + multiplied(mixed, config.ssm_out)
        else:
            y = self.output((self.attention_norm(attended) + self.ssm_norm(mixed)) / 2)
            if segment_ids is not None and self.output.bias is not None:
                y = jnp.where((segment_ids != 0)[..., None], y, 0)
        return y, None if cache is None else ParallelHeadsCache(kept, state), *given

    def init_shared(
        self, batch: int, time: int, cache: ParallelHeadsCache | None
    ) -> SharedKV | None:
        """What `shared` looks like for this layer's attention; None if it only reads."""
        kept = None if cache is None else cache.attention
        return self.attention.init_shared(batch, time, kept)

    def init_cache(self, batch: int, capacity: int) -> ParallelHeadsCache:
        """Empty caches of both branches for ``capacity`` tokens."""
        return ParallelHeadsCache(
            self.attention.init_cache(batch, capacity), self.ssm.init_cache(batch, capacity)
        )
