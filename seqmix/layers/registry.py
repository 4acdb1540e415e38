# SPDX-License-Identifier: Apache-2.0
"""Layers by name, as patterns such as ``'3 gated_delta_net, attention'`` use them."""

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_NAME = re.compile(r"[a-z_][a-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class LayerInfo:
    """Where a layer stands in its model.

    Attributes:
      index: position from the bottom; under a scanned stack, where the layers of one position share
        their code, the position inside the period.
      count: number of layers of the model.
      branches: residual branches of a layer (2 with a feed-forward part, 1 without), on average.
      below: number of layers below, for initial values that depend on depth; while a scanned stack
        is built it is a traced integer, so nothing but arrays may depend on it. Default: `index`.
    """

    index: int = 0
    count: int = 1
    branches: float = 2
    below: Any = None

    def __post_init__(self):
        if self.below is None:
            object.__setattr__(self, "below", self.index)

    @property
    def residual_scale(self) -> float:
        """Factor of the standard deviation of a branch's last projection at initialisation.

        The sum of all branches then has the variance of one (GPT-2's rule).
        """
        return (self.branches * self.count) ** -0.5


class Entry(NamedTuple):
    """A registered layer: its module class and its config class."""

    layer: type
    config: type


_ENTRIES: dict[str, Entry] = {}


def register(name: str, config: type) -> Callable[[type], type]:
    """Class decorator that makes a layer available to patterns.

    The class takes ``(config, width, *, layer, dtype, param_dtype, rngs)``, is called with
    ``(x [B, T, D], *, segment_ids, positions, cache) -> (y [B, T, D], cache)`` and has
    ``init_cache(batch, capacity)``; the config class has ``flops_per_token(width, context)`` and
    ``cache_bytes(width, context, dtype)``.

    The config of a layer that reads later tokens has ``causal = False``, as a class or as one of
    its settings: such layers suit encoders, and training on next tokens refuses them.

    A layer that hands something to later layers of its class (RWKV-7: the values of the first;
    attention: keys, values and cache) has a `shared_name`, not None, and
    `init_shared(batch, time, cache)`, which gives what the lowest such layer gets (None from a
    layer that only reads). It takes ``shared`` in the call and returns it as a third result. Where
    a layer needs another below, its config class has ``connect(below, width)``, which raises
    without it; the model calls it from the bottom up with one dictionary.

    A layer with losses of its own has `auxiliary_names`, the metrics that it logs. Where it is
    called with ``auxiliary=True``, as in training and evaluation, an `Auxiliary` is its last
    result; otherwise it computes none.

    Args:
      name: snake case, as written in patterns.
      config: the layer's config class.

    Raises:
      ValueError: the name is malformed, or taken by another class.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"layer name must be snake case, got {name!r}")

    def add(layer: Any) -> Any:
        taken = _ENTRIES.get(name)
        if taken is not None and taken.layer.__qualname__ != layer.__qualname__:
            raise ValueError(f"layer name {name!r} is taken by {taken.layer.__qualname__}")
        _ENTRIES[name] = Entry(layer, config)
        return layer

    return add


def get(name: str) -> Entry:
    """The layer registered under ``name``.

    Raises:
      ValueError: no such layer; the message names the nearest one and all known.
    """
    if name in _ENTRIES:
        return _ENTRIES[name]
    near = difflib.get_close_matches(name, _ENTRIES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown layer {name!r}; {hint}known: {', '.join(names())}")


def names() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_ENTRIES))
