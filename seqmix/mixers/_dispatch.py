# SPDX-License-Identifier: Apache-2.0
"""Which implementation of a mixer runs."""

import functools
from collections.abc import Callable, Collection

from absl import logging

from seqmix.rows import cut_refusal
from seqmix_kernels import family, target


@functools.cache
def _log_once(mixer: str, chosen: str, why: str) -> None:
    logging.info("%s: impl='auto' takes '%s' (%s)", mixer, chosen, why)


def kernel_refusal(name: str, impl: str, rows: int, *args, **options) -> str | None:
    """Why no kernel of a family can take a call, or None.

    Args:
      name: the family, a module under `seqmix_kernels.tpu` or `seqmix_kernels.gpu`.
      impl: what the caller asked for; 'auto' takes no kernels of a module that says UNPROVED.
      rows: B.
      *args, **options: those of the module's `refusal`.
    """
    module = family(name)
    if module is None:
        return f"there is no {name} kernel for backend '{target().platform}'"
    unproved = getattr(module, "UNPROVED", None) if impl == "auto" else None
    return unproved or module.refusal(*args, **options) or cut_refusal(rows)


def choose(
    mixer: str,
    impl: str,
    available: Collection[str],
    *,
    time: int,
    default: str = "chunked",
    refusal: Callable[[], str | None] | None = None,
) -> str:
    """Resolves `impl` to the name of an implementation that can run.

    `auto` takes `recurrent` for one token (the decode step, where a chunk has nothing to gain),
    `pallas` where the kernel does not refuse, and `default` otherwise; each choice is logged once.

    Args:
      mixer: the function's name, for messages.
      impl: what the caller asked for.
      available: the implementations the mixer has, besides 'pallas'.
      time: T.
      default: what `auto` takes for more than one token where there is no kernel.
      refusal: says why the kernel cannot take this call, or None; None for a mixer without kernels.

    Raises:
      ValueError: if `impl` is unknown, or names a form that this mixer or backend does not have.
    """
    if impl in available:
        return impl
    if impl not in ("auto", "pallas"):
        known = sorted({*available, "auto", "pallas"})
        raise ValueError(f"{mixer}: impl must be one of {known}, got {impl!r}")
    if impl == "auto" and time == 1 and "recurrent" in available:
        return "recurrent"
    reason = "the mixer has no kernel" if refusal is None else refusal()
    if reason is None:
        _log_once(mixer, "pallas", f"a kernel for backend '{target().platform}'")
        return "pallas"
    if impl == "auto":
        _log_once(mixer, default, f"on backend '{target().platform}'; no kernel: {reason}")
        return default
    raise ValueError(
        f"{mixer}: impl='pallas' cannot run: {reason}; use one of {sorted(available)} or 'auto'"
    )
