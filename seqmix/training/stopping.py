# SPDX-License-Identifier: Apache-2.0
"""Asking a run to stop: SIGTERM, the first SIGINT, or the cluster's notice of preemption."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Whether, and by what, the run was asked to stop."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def reached(self, step: int) -> bool:
        """Whether to stop after `step`; all processes of a run give the same answer."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.reason = "preemption"
        return self.reason is not None


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM and the first SIGINT into a `StopRequest` while the context lasts.

    A second SIGINT acts as usual. With several processes SIGTERM is left to JAX's coordination
    service, which makes all of them stop at one step. Outside the main thread no handler can be
    set, and none is.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {}

    def handle(number, frame):
        del frame
        request.reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, previous[signal.SIGINT])

    for number in (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ():
        previous[number] = signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
