# SPDX-License-Identifier: Apache-2.0
"""What a family of published models is to this framework."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.rules import Rule
from seqmix.models import HybridLMConfig

type Shapes = Mapping[str, tuple[int, ...]]
type Constants = Mapping[str, Callable[[], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Family:
    """One ``model_type`` of published configs.

    Attributes:
      name: the ``model_type``.
      architectures: names that ``architectures`` may have; the first is written.
      to_config: config.json to a model. It reads every key that changes what is computed, and what
        this framework cannot compute is a ValueError that names the key and the value (see `Keys`).
        dtype, scan and the settings of initialisation are not its concern.
      from_config: a model to config.json without the keys that all families share, such as
        ``vocab_size`` and ``architectures``. It may take the model's form for granted, and leave
        out what the family cannot express: the result counts only if `to_config` makes the same
        model of it. ValueError where it cannot be written at all.
      rules: where the parameters of a model of `to_config` lie. Every parameter is in one rule.
      inert: keys of config.json that do not change what is computed, beside the common ones.
      ignored: regular expressions of tensors that files may hold and that are no parameters.
      variants: instead of ``rules``, where published files and `transformers` name or shape tensors
        in more than one way: (config, shapes of the file's tensors by name) -> rules. The shapes
        are empty where a model is written that did not come from a file.
      constants: (config, config.json) -> functions by tensor name, for tensors that hold no
        parameter but numbers that follow from the config; each gives them in float32. Files may
        lack them; those that they hold must agree.
    """

    name: str
    architectures: tuple[str, ...]
    to_config: Callable[[Keys], HybridLMConfig]
    from_config: Callable[[HybridLMConfig], dict[str, Any]]
    rules: Callable[[HybridLMConfig], list[Rule]] | None = None
    inert: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    variants: Callable[[HybridLMConfig, Shapes], list[Rule]] | None = None
    constants: Callable[[HybridLMConfig, Mapping[str, Any]], Constants] | None = None

    def rules_of(self, config: HybridLMConfig, shapes: Shapes) -> list[Rule]:
        """The rules for a file with these tensors; {} for one that is to be written."""
        return self.rules(config) if self.variants is None else self.variants(config, shapes)

    def constants_of(self, config: HybridLMConfig, values: Mapping[str, Any]) -> Constants:
        """The constants that a file may hold."""
        return {} if self.constants is None else self.constants(config, values)
