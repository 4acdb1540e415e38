# SPDX-License-Identifier: Apache-2.0
"""Typed configs from gin files.

A config is a frozen dataclass under a gin name::

    @config.configurable("HybridLM")
    @dataclasses.dataclass(frozen=True)
    class HybridLMConfig:
        layers: int = 4

and a run is built from files and overrides::

    source = config.load(["configs/demo.gin"], overrides=["HybridLM.layers=8"])
    experiment = source.build(Experiment)
    print(config.resolved(experiment))

The syntax is gin's, read by gin-config's own parser; the bindings live in the `Source`, not in
gin's global state. A file is checked against the classes when it is built: an unknown name, a wrong
type, a binding that nothing uses or a scope that nothing has is a `ConfigError` with its file and
line.
"""

from seqmix.config.errors import ConfigError, Location
from seqmix.config.registry import Child, configurable, gin_name
from seqmix.config.resolved import resolved
from seqmix.config.source import Source, from_text, load

__all__ = [
    "Child",
    "ConfigError",
    "Location",
    "Source",
    "configurable",
    "from_text",
    "gin_name",
    "load",
    "resolved",
]
