# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels of seqmix, installed as the import package ``seqmix_kernels``.

Only ``seqmix.mixers`` calls them; they know nothing of Flax. A family is one module of that name
under ``tpu`` and ``gpu`` with three functions, of which ``seqmix.mixers`` makes one differentiable
function: ``refusal`` (why it cannot take a call, or None), ``forward`` and ``backward``.
"""

import importlib
import importlib.util
from types import ModuleType

from seqmix_kernels.target import Target, compile_for, target

__all__ = ["Target", "compile_for", "family", "target"]


def family(name: str) -> ModuleType | None:
    """The module of a family's kernels for the present target, None if it has none.

    Imported where it is asked for: Pallas for one chip is of no use on another.
    """
    platform = target().platform
    if platform not in ("tpu", "gpu"):
        return None
    module = f"seqmix_kernels.{platform}.{name}"
    return importlib.import_module(module) if importlib.util.find_spec(module) else None
