# SPDX-License-Identifier: Apache-2.0
"""JAX's persistent compilation cache, on by default."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> Path | None:
    """Keeps compiled programs under `$SEQMIX_CACHE/xla`, else `~/.cache/seqmix/xla`.

    A cache directory that is set already (`JAX_COMPILATION_CACHE_DIR`, or by the caller) stays.

    Returns:
      The directory, None if it cannot be made (a read-only home directory is no reason not to
      train).
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    root = os.environ.get("SEQMIX_CACHE") or Path.home() / ".cache" / "seqmix"
    folder = Path(root) / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX's default of one second leaves out much of a small model's start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder
