# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the layout of Hugging Face `transformers`, in and out; safetensors alone.

::

    model = hf.load("checkpoints/llama", dtype=jnp.float32)
    logits = model(tokens)
    hf.save(model, "copy")
"""

from seqmix.interop.hf.family import Family
from seqmix.interop.hf.loading import load
from seqmix.interop.hf.origin import Origin
from seqmix.interop.hf.rules import Rule
from seqmix.interop.hf.runs import export_run, import_run
from seqmix.interop.hf.saving import save

__all__ = ["Family", "Origin", "Rule", "export_run", "import_run", "load", "save"]
