# SPDX-License-Identifier: Apache-2.0
"""Which implementation of a mixer runs."""

import functools
from collections.abc import Collection

import jax
from absl import logging


@functools.cache
def _log_once(mixer: str, chosen: str, why: str) -> None:
    logging.info("%s: impl='auto' takes '%s' (%s)", mixer, chosen, why)


def choose(
    mixer: str, impl: str, available: Collection[str], *, time: int, default: str = "chunked"
) -> str:
    """Resolves `impl` to the name of an implementation that can run.

    `auto` takes `recurrent` for one token (the decode step, where a chunk has nothing to gain) and
    `default` otherwise; each choice is logged once.

    Args:
      mixer: the function's name, for messages.
      impl: what the caller asked for.
      available: the implementations the mixer has.
      time: T.
      default: what `auto` takes for more than one token.

    Raises:
      ValueError: if `impl` is unknown, or names a form that this mixer or backend does not have.
    """
    if impl == "auto":
        if time == 1 and "recurrent" in available:
            return "recurrent"
        reason = "no Pallas kernel for this family" if default == "chunked" else "the fastest"
        _log_once(mixer, default, f"{reason} on backend '{jax.default_backend()}'")
        return default
    if impl in available:
        return impl
    if impl == "pallas":
        raise ValueError(
            f"{mixer}: impl='pallas' has no kernel for backend '{jax.default_backend()}'; "
            f"use one of {sorted(available)} or 'auto'"
        )
    raise ValueError(f"{mixer}: impl must be one of {sorted({*available, 'auto'})}, got {impl!r}")
