# SPDX-License-Identifier: Apache-2.0
"""A recurrent layer run both ways over each document, for inputs that are not causal."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict

from seqmix import config as configs
from seqmix.layers import registry
from seqmix.layers.linear import Linear
from seqmix.layers.registry import LayerInfo, register

NOT_RECURRENT = (
    "attention",
    "bidirectional",
    "bigbird",
    "longformer",
    "mla",
    "parallel_heads",
    "vmamba",
)


@configs.configurable("Bidirectional")
@dataclasses.dataclass(frozen=True)
class BidirectionalConfig:
    """Settings of `Bidirectional`.

    Attributes:
      inner: name of a recurrent layer.
      merge: 'sum' adds the directions, 'concatenate' projects both together to the model width.
      layers: the inner layer's config, by its name; its class's defaults if not given. From gin it
        is filled from the inner layer's own name, in this layer's scope.
    """

    inner: str = "mamba2"
    merge: Literal["sum", "concatenate"] = "sum"
    layers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    causal: ClassVar[bool] = False

    def __post_init__(self):
        config = _inner(self.inner).config
        for name, value in self.layers.items():
            if name != self.inner or not isinstance(value, config):
                raise ValueError(
                    f"Bidirectional.layers must hold a {config.__name__} for {self.inner!r}, "
                    f"got {type(value).__name__} for {name!r}"
                )
        filled = FrozenDict({self.inner: self.layers.get(self.inner) or config()})
        object.__setattr__(self, "layers", filled)

    @classmethod
    def gin_children(cls, values: Mapping[str, Any]) -> Iterable[configs.Child]:
        """The config of the inner layer."""
        return [configs.Child("layers", values["inner"], _inner(values["inner"]).config)]

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token: both directions, and the projection that joins them if any."""
        both = 2 * self.layers[self.inner].flops_per_token(width, context)
        return both + (4 * width * width if self.merge == "concatenate" else 0)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """0: the backward direction reads tokens to come, so there is no cache to decode from."""
        return 0


def _inner(name: str) -> registry.Entry:
    if name in NOT_RECURRENT:
        raise ValueError(f"Bidirectional.inner must be a recurrent layer, got {name!r}")
    return registry.get(name)


def refuse_cache(name: str, cache: Any) -> None:
    """Raises ValueError for a layer that is not causal if there is a cache."""
    if cache is not None:
        raise ValueError(f"{name} is not causal and cannot decode: it takes no cache, got one")


@register("bidirectional", BidirectionalConfig)
class Bidirectional(nnx.Module):
    """y = forward(x) + reverse(backward(reverse(x))), or a projection of the two side by side.

    The row is reversed as it stands: its documents then come in the opposite order, each from its
    end, and the inner layer keeps them apart as it does forwards. The directions share nothing.
    """

    def __init__(
        self,
        config: BidirectionalConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        make, inner = _inner(config.inner).layer, config.layers[config.inner]
        self.forward = make(inner, width, layer=layer, **common)
        self.backward = make(inner, width, layer=layer, **common)
        joined = config.merge == "concatenate"
        self.output = (
            Linear(2 * width, width, scale=layer.residual_scale, **common) if joined else None
        )

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: None = None,
    ) -> tuple[jax.Array, None]:
        """Mixes over each document, both ways.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32 for the forward direction; the backward one counts its own.
          cache: None.

        Returns:
          y [B, T, D] in the compute dtype, and None.

        Raises:
          ValueError: there is a cache.
        """
        refuse_cache("Bidirectional", cache)
        ahead, _ = self.forward(x, segment_ids=segment_ids, positions=positions)
        ids = None if segment_ids is None else segment_ids[:, ::-1]
        back, _ = self.backward(x[:, ::-1], segment_ids=ids)
        back = back[:, ::-1]
        if self.output is None:
            return ahead + back, None
        return self.output(jnp.concatenate([ahead, back], axis=-1)), None

    def init_cache(self, batch: int, capacity: int) -> None:
        """Raises ValueError: the layer is not causal."""
        raise ValueError("Bidirectional is not causal and cannot decode: it has no cache")
