# SPDX-License-Identifier: Apache-2.0
"""The families of published models, one file each."""

import importlib

from seqmix.interop.hf.family import Family

# The order in which an export without a named family looks for one.
NAMES = (
    "llama",
    "mamba",
    "mamba2",
    "jamba",
    "bamba",
    "recurrent_gemma",
    "qwen3_next",
    "kimi_linear",
    "minimax",
    "deepseek_v32",
    "olmo_hybrid",
    "falcon_h1",
    "zamba",
    "zamba2",
)


def families() -> dict[str, Family]:
    """All families by name."""
    modules = (importlib.import_module(f"{__name__}.{name}") for name in NAMES)
    return {module.FAMILY.name: module.FAMILY for module in modules}


def get(name: str) -> Family:
    """The family of a ``model_type``.

    Raises:
      ValueError: there is none; lists those that there are.
    """
    known = families()
    if name not in known:
        raise ValueError(f"unknown family {name!r}; there are {', '.join(known)}")
    return known[name]
