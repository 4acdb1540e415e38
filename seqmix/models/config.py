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
from seqmix.models.logits import LogitScaling
from seqmix.models.moe import MoEConfig
from seqmix.models.pattern import Element, Plan, expand, parse
from seqmix.models.residual import NormName, ResidualConfig
from seqmix.models.shared_block import SharedBlockConfig

DType = Literal["float32", "bfloat16"]

# Feed-forward parts by their name in patterns; 'none' is a layer without one.
FEED_FORWARDS: dict[str, type] = {"feed_forward": FeedForwardConfig, "moe": MoEConfig}
_NONE = "none"
# Mixers that are more than a layer of `seqmix.layers`, by their name in patterns.
_COMPOUND: dict[str, type] = {"shared_block": SharedBlockConfig}


@configs.configurable("HybridLM")
@dataclasses.dataclass(frozen=True)
class HybridLMConfig:
    """Settings of `HybridLM`.

    Attributes:
      vocabulary: number of token ids.
      meta_tokens: learned vectors that every document begins with (Hymba), the ids from
        ``vocabulary`` on. They are ordinary tokens to all layers, at the first positions; the head
        never predicts them. ``Attention.prefix`` keeps them in sight of windows.
      width: model width D.
      layers: number of layers.
      pattern: layers of one period, repeated; see `seqmix.models.pattern`.
      leading: pattern of the first layers, once.
      trailing: pattern of the last layers, once.
      mixers: config of each mixer and feed-forward part that the patterns name, by its text
        ('attention', 'local/attention', 'moe'). Those not given take their class's defaults; from
        gin they are filled from the layers' own names and scopes.
      feed_forward: feed-forward part of the layers whose pattern names none, @FeedForward() or
        @MoE(); None for layers without one.
      residual: how mixers and feed-forward parts without a scope join the residual stream.
      residuals: the same for each part with a scope, by its text ('post/attention'); those not
        given are as ``residual``. From gin they are filled from ``<scope>/Residual``, so that the
        parts of one scope join alike.
      norm: kind of the norms of blocks, embedding and output: 'rms', 'zero_centred' (RMS, times
        1 + scale: Gemma, Qwen3-Next) or 'layer' (layer norm with a bias: RWKV).
      embedding_multiplier: factor of the embeddings where they enter the stream (Gemma: the root of
        the width); the head does not see it.
      embedding_norm: a norm on the embeddings, after the multiplier (RWKV).
      logits_multiplier: factor of the logits (Falcon-H1).
      logit_softcap: c in c tanh(logits / c), after the multiplier (Gemma 2); default none.
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
    meta_tokens: int = 0
    width: int = 256
    layers: int = 4
    pattern: str = "3 gated_delta_net, attention"
    leading: str = ""
    trailing: str = ""
    mixers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    feed_forward: FeedForwardConfig | MoEConfig | None = dataclasses.field(
        default_factory=FeedForwardConfig
    )
    residual: ResidualConfig = dataclasses.field(default_factory=ResidualConfig)
    residuals: Mapping[str, ResidualConfig] = dataclasses.field(default_factory=dict)
    norm: NormName = "rms"
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    logits_multiplier: float = 1.0
    logit_softcap: float | None = None
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
        at_least(self, 0, "meta_tokens")
        positive(self, "embedding_std", "norm_epsilon")
        positive(self, "embedding_multiplier", "logits_multiplier", "logit_softcap")
        parts = _parts(self.leading, self.pattern, self.trailing)
        known = {part.key: _config_of(part) for part in parts}
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
        for key, config in FEED_FORWARDS.items():
            # By the name that it has in gin, this is the same part.
            if key in known and key not in self.mixers and type(self.feed_forward) is config:
                filled[key] = self.feed_forward
        # Frozen, so that the config hashes: modules keep it as a static attribute.
        object.__setattr__(self, "mixers", FrozenDict(filled))
        object.__setattr__(self, "residuals", FrozenDict(self._residuals(parts)))
        self.plan()
        for mixer in filled.values():
            if type(mixer) not in FEED_FORWARDS.values():
                mixer.flops_per_token(self.width, 1.0)  # raises where its sizes do not fit
        self._connect()
        self.shared_blocks()

    def _residuals(self, parts: Iterable[Element]) -> dict[str, ResidualConfig]:
        """``residuals``, completed.

        Raises:
          ValueError: a key is no part with a scope, or the parts of a scope differ.
        """
        scopes = {part.key: part.scope for part in parts if part.scope}
        for key in self.residuals:
            if key not in scopes:
                raise ValueError(
                    f"HybridLM.residuals has {key!r}, which is no part with a scope of the "
                    f"patterns: {', '.join(map(repr, scopes)) or 'they have none'}; parts without "
                    "one take HybridLM.residual"
                )
        filled = {key: self.residuals.get(key, self.residual) for key in scopes}
        by_scope: dict[str, str] = {}
        for key, scope in scopes.items():
            other = by_scope.setdefault(scope, key)
            if filled[key] != filled[other]:
                raise ValueError(
                    f"HybridLM.residuals: {other!r} and {key!r} have one scope and must be equal, "
                    f"got {filled[other]} and {filled[key]}"
                )
        return filled

    def _connect(self) -> None:
        """Raises where a layer reads what no layer below it shares."""
        below: dict[str, Any] = {}
        for index, element in enumerate(self.plan().elements):
            connect = getattr(self.mixer(element), "connect", None)
            if connect is None:
                continue
            try:
                connect(below, self.width)
            except ValueError as error:
                raise ValueError(
                    f"HybridLM.pattern, layer {index} ('{element}'): {error}"
                ) from None

    @classmethod
    def gin_children(cls, values: Mapping[str, Any]) -> Iterable[configs.Child]:
        """The configs of the pattern's elements and their residuals, under their scopes."""
        parts = _parts(*(values[name] for name in ("leading", "pattern", "trailing")))
        return [
            configs.Child(field="mixers", key=part.key, config=_config_of(part), scope=part.scope)
            for part in parts
        ] + [
            configs.Child("residuals", key=part.key, config=ResidualConfig, scope=part.scope)
            for part in parts
            if part.scope
        ]

    @property
    def meta_ids(self) -> range:
        """Ids that every document begins with."""
        return range(self.vocabulary, self.vocabulary + self.meta_tokens)

    def plan(self) -> Plan:
        """The layers from the bottom up."""
        return expand(self.pattern, self.layers, self.leading, self.trailing)

    def mixer(self, element: Element) -> Any:
        """The config of the mixer of one element of the patterns, None for a layer without one."""
        return None if element.name in FEED_FORWARDS else self.mixers[element.key]

    def feed_forward_of(self, element: Element) -> FeedForwardConfig | MoEConfig | None:
        """The config of the feed-forward part of one element, None for a layer without one."""
        part = element if element.name in FEED_FORWARDS else element.feed_forward
        if part is None:
            return self.feed_forward
        return None if part.name == _NONE else self.mixers[part.key]

    def shared_blocks(self) -> dict[str, SharedBlockConfig]:
        """A config of each shared transformer by its name, those of the lowest layer that uses it.

        Raises:
          ValueError: two uses of one name differ in the shared weights, or a use stands in a
            residual of the kind 'stream'.
        """
        found: dict[str, tuple[Element, SharedBlockConfig]] = {}
        for element in dict.fromkeys(self.plan().elements):
            config = self.mixer(element)
            if not isinstance(config, SharedBlockConfig):
                continue
            if self.residuals_of(element)[0].norm == "stream":
                raise ValueError(
                    f"HybridLM.pattern: '{element.key}' cannot have Residual.norm = 'stream': what "
                    "its mixer reads is not the stream"
                )
            first, other = found.setdefault(config.block, (element, config))
            for field in ("attention", "feed_forward"):
                if getattr(config, field) != getattr(other, field):
                    raise ValueError(
                        f"HybridLM.pattern: '{first.key}' and '{element.key}' share the block "
                        f"{config.block!r}, but their SharedBlock.{field} differ"
                    )
        return {name: config for name, (_, config) in found.items()}

    def residuals_of(self, element: Element) -> tuple[ResidualConfig, ResidualConfig]:
        """How mixer and feed-forward part of one element join the residual stream."""
        part = element if element.name in FEED_FORWARDS else element.feed_forward
        keys = element.key, None if part is None else part.key
        return tuple(self.residuals.get(key, self.residual) for key in keys)

    @property
    def logit_scaling(self) -> LogitScaling:
        """What makes logits of the head's products."""
        return LogitScaling(self.logits_multiplier, self.logit_softcap)

    @property
    def branches(self) -> int:
        """Residual branches of all layers: mixers and feed-forward parts."""
        parts = [(self.mixer(e), self.feed_forward_of(e)) for e in self.plan().elements]
        return sum(part is not None for pair in parts for part in pair)

    @property
    def inactive_parameters(self) -> int:
        """Parameters that a token does not use: those of experts that it does not go to."""
        parts = map(self.feed_forward_of, self.plan().elements)
        return sum(part.inactive_parameters(self.width) for part in parts if part is not None)

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
        return total + sum(self.layer_flops(e, context) for e in self.plan().elements)

    def layer_flops(self, element: Element, context: float) -> float:
        """Forward FLOPs per token of one layer; see `flops_per_token`."""
        mixer, part = self.mixer(element), self.feed_forward_of(element)
        total = 0.0 if mixer is None else mixer.flops_per_token(self.width, context)
        return total if part is None else total + part.flops_per_token(self.width)

    def cache_bytes(self, context: int) -> int:
        """Bytes per sequence of the decode cache for ``context`` tokens: states, KV, positions."""
        position = 4
        return position + sum(self.layer_cache_bytes(e, context) for e in self.plan().elements)

    def layer_cache_bytes(self, element: Element, context: int) -> int:
        """Bytes per sequence of the decode cache of one layer."""
        mixer = self.mixer(element)
        return 0 if mixer is None else mixer.cache_bytes(self.width, context, self.dtype)


def _parts(*patterns: str) -> tuple[Element, ...]:
    """The distinct mixers and feed-forward parts that some patterns name, in order.

    Raises:
      ValueError: what is right of a '+' is no feed-forward part, or what is left of it is one.
    """
    elements = [element for pattern in patterns if pattern.strip() for element in parse(pattern)]
    found: list[Element] = []
    for element in elements:
        found.append(dataclasses.replace(element, feed_forward=None))
        part = element.feed_forward
        if part is None:
            continue
        if element.name in FEED_FORWARDS:
            raise ValueError(f"'{element}': only a mixer takes a feed-forward part, after a '+'")
        if part.name not in FEED_FORWARDS and str(part) != _NONE:
            known = ", ".join((*FEED_FORWARDS, _NONE))
            raise ValueError(f"unknown feed-forward part '{part}' in '{element}'; known: {known}")
        if part.name != _NONE:
            found.append(part)
    return tuple(dict.fromkeys(found))


def _config_of(part: Element) -> type:
    """The config class of a mixer or a feed-forward part."""
    known = FEED_FORWARDS | _COMPOUND
    return known.get(part.name) or registry.get(part.name).config
