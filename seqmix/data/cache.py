# SPDX-License-Identifier: Apache-2.0
"""The cache folder: things built once, atomically, and found again by their fingerprint."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from seqmix.data.errors import DataError


def cache_dir(configured: str | None = None) -> pathlib.Path:
    """The cache folder: the configured one, else `$SEQMIX_CACHE`, else `~/.cache/seqmix`."""
    chosen = configured or os.environ.get("SEQMIX_CACHE") or "~/.cache/seqmix"
    return pathlib.Path(chosen).expanduser()


def fingerprint(value: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a JSON-able mapping, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds an advisory lock while building, so that racing processes do the work once.

    The rename below is what makes a race safe; the lock only saves work. So a platform or file
    system without locks goes on without one. The system frees the lock of a killed process.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with open(path, "a") as handle:
        # A file system without locks (some network mounts): build without one.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_once(folder: pathlib.Path, build: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns `folder`, building it first when it does not exist.

    `build` fills a temporary folder beside it, which is renamed into place when complete: the
    folder is there whole or not at all, whatever is killed when. Of two racing processes one
    builds and both use the result.

    Args:
        folder: The folder wanted; its name holds the fingerprint of what is in it.
        build: Fills the (existing, empty) folder it is given.

    Raises:
        DataError: the cache folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.parent / f".{folder.name}.lock"
        with _locked(lock):
            try:
                if not folder.is_dir():
                    _build(folder, build)
            finally:
                lock.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write the cache folder {folder.parent} ({error}); choose another with "
            "Data.cache_dir or SEQMIX_CACHE"
        ) from error
    return folder


def _build(folder: pathlib.Path, build: Callable[[pathlib.Path], None]) -> None:
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        build(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            # Another process was first; its folder has the same fingerprint, so the same content.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
