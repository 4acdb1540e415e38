# SPDX-License-Identifier: Apache-2.0
"""Settings of a hybrid language model."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from flax.core import FrozenDict

from seqmix import config as configs
from seqmix.layers import registry
from seqmix.layers.checks import at_least, positive
from seqmix.models.feed_forward import FeedForwardConfig
from seqmix.models.pattern import Element, Plan, expand, parse

DType = Literal["float32", "bfloat16"]


@configs.configurable("HybridLM")
@dataclasses.dataclass(frozen=True)
class HybridLMConfig:
    """Settings of `HybridLM`.

    Attributes:
      vocabulary: number of token ids.
      width: model width D.
      layers: number of layers.
      pattern: layers of one period, repeated; see `seqmix.models.pattern`.
      leading: pattern of the first layers, once.
      trailing: pattern of the last layers, once.
      mixers: config of each element of the patterns, by its text ('attention',
        'local/attention'). Elements not given take their class's defaults; from gin they are filled
        from the layers' own names and scopes.
      feed_forward: settings of the SwiGLU part of every block; None for blocks without one.
      tied: the head is the transposed embedding.
      embedding_std: standard deviation of embedding and head at initialisation; default
        ``0.4 / sqrt(width)``. The head reads a hidden state of unit mean square, so logits then
        start with standard deviation 0.4, and the loss within 0.1 nat of log(vocabulary).
      norm_epsilon: epsilon of the norms of blocks and output.
      scan: stack the parameters of all periods and scan over them, so that compile time does not
        grow with depth; otherwise every layer is unrolled.
      remat: what the backward pass recomputes, per block: 'none', 'dots' (all but the outputs of
        projections), 'full' (all but the block's input).
      dtype: compute dtype. Norms, softmax, decays and states are float32 in any case.
      param_dtype: dtype of the parameters, except those that are always float32.
      residual_dtype: dtype of the residual stream. float32 keeps small updates of deep models (as
        Mamba does); 'bfloat16' halves what rematerialisation has to keep.
    """

    vocabulary: int = 257
    width: int = 256
    layers: int = 4
    pattern: str = "3 gated_delta_net, attention"
    leading: str = ""
    trailing: str = ""
    mixers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    feed_forward: FeedForwardConfig | None = dataclasses.field(default_factory=FeedForwardConfig)
    tied: bool = True
    embedding_std: float | None = None
    norm_epsilon: float = 1e-6
    scan: bool = True
    remat: Literal["none", "dots", "full"] = "none"
    dtype: DType = "float32"
    param_dtype: DType = "float32"
    residual_dtype: DType = "float32"

    def __post_init__(self):
        at_least(self, 1, "vocabulary", "width", "layers")
        positive(self, "embedding_std", "norm_epsilon")
        elements = _elements(self.leading, self.pattern, self.trailing)
        known = {str(element): registry.get(element.name).config for element in elements}
        for key, value in self.mixers.items():
            if key not in known:
                raise ValueError(
                    f"HybridLM.mixers has {key!r}, which is in no pattern; "
                    f"the patterns have {', '.join(map(repr, known))}"
                )
            if not isinstance(value, known[key]):
                raise ValueError(
                    f"HybridLM.mixers[{key!r}] must be a {known[key].__name__}, "
                    f"got {type(value).__name__}"
                )
        filled = {key: self.mixers.get(key, None) or config() for key, config in known.items()}
        # Frozen, so that the config hashes: modules keep it as a static attribute.
        object.__setattr__(self, "mixers", FrozenDict(filled))
        self.plan()
        for mixer in filled.values():
            mixer.flops_per_token(self.width, 1.0)  # raises where its sizes do not fit the width

    @classmethod
    def gin_children(cls, values: Mapping[str, Any]) -> Iterable[configs.Child]:
        """The configs of the pattern's elements, under their scopes."""
        elements = _elements(*(values[name] for name in ("leading", "pattern", "trailing")))
        return [
            configs.Child(
                field="mixers",
                key=str(element),
                config=registry.get(element.name).config,
                scope=element.scope,
            )
            for element in elements
        ]

    def plan(self) -> Plan:
        """The layers from the bottom up."""
        return expand(self.pattern, self.layers, self.leading, self.trailing)

    def mixer(self, element: Element) -> Any:
        """The config of one element of the patterns."""
        return self.mixers[str(element)]

    def flops_per_token(self, context: float) -> float:
        """Forward FLOPs per token: layers, feed-forward parts and head; a training step takes 3x.

        Counts matrix products and convolutions, multiply-add = 2; not norms, gates, softmax and
        the embedding look-up. Recurrent layers count their recurrence, not the extra products of
        its chunked form.

        Args:
          context: mean number of keys a token sees in full causal attention: (T + 1) / 2 for rows
            of T tokens.
        """
        total = 2.0 * self.width * self.vocabulary
        for element in self.plan().elements:
            total += self.mixer(element).flops_per_token(self.width, context)
            if self.feed_forward is not None:
                total += self.feed_forward.flops_per_token(self.width)
        return total

    def cache_bytes(self, context: int) -> int:
        """Bytes per sequence of the decode cache for ``context`` tokens: states, KV, positions."""
        position = 4
        return position + sum(
            self.mixer(element).cache_bytes(self.width, context, self.dtype)
            for element in self.plan().elements
        )


def _elements(*patterns: str) -> tuple[Element, ...]:
    """The distinct elements of some patterns, in order."""
    found = [element for pattern in patterns if pattern.strip() for element in parse(pattern)]
    return tuple(dict.fromkeys(found))
