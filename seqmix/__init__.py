# SPDX-License-Identifier: Apache-2.0
"""seqmix: hybrid sequence models in JAX.

Importing the package is cheap: a submodule (``seqmix.mixers``, ``seqmix.models``, ...) is imported
when it is first used.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBMODULES = (
    "cli",
    "config",
    "data",
    "inference",
    "interop",
    "layers",
    "mixers",
    "models",
    "parallel",
    "training",
    "typing",
)

__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"seqmix.{name}")
    raise AttributeError(f"module 'seqmix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
