# SPDX-License-Identifier: Apache-2.0
"""The platform that programs are compiled for, which is not always that of this process."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """Where kernels are to run.

    Attributes:
      platform: 'tpu', 'gpu' or 'cpu'.
      interpret: run the kernels' interpreter, on any backend: False, or 'plain' (TPU kernels only:
        fastest, no model of the memories), 'chip' (buffers, copies and semaphores of the chip) or
        'races' (that, and a race is an error).
    """

    platform: str
    interpret: bool | str = False


# Part of the key of jax.jit's cache: what is traced for one target is not run for another.
_CONTEXT = jax.make_user_context(None)
INTERPRETERS = {"tpu": ("plain", "chip", "races"), "gpu": ("chip", "races"), "cpu": ()}


def target() -> Target:
    """The target of programs traced now: that of `compile_for`, or the default backend."""
    return _CONTEXT.value or Target(jax.default_backend())


def compile_for(platform: str, *, interpret: bool | str = False) -> AbstractContextManager[None]:
    """While it is open, programs are traced for `platform`.

    For compiling ahead of time on a machine without the chip, and for tests.

    Args:
      platform: 'tpu', 'gpu' or 'cpu'.
      interpret: as in `Target`.

    Raises:
      ValueError: for an unknown platform, or an interpreter that it does not have.
    """
    if platform not in INTERPRETERS:
        raise ValueError(f"platform must be one of {sorted(INTERPRETERS)}, got {platform!r}")
    if interpret is not False and interpret not in INTERPRETERS[platform]:
        raise ValueError(
            f"interpret must be False or one of {INTERPRETERS[platform]} for platform "
            f"'{platform}', got {interpret!r}"
        )
    return _CONTEXT(Target(platform, interpret))
