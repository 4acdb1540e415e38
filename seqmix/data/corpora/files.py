# SPDX-License-Identifier: Apache-2.0
"""Finding and decoding local files, with errors that name file and place."""

import dataclasses
import glob
import os
import pathlib
from collections.abc import Sequence

from seqmix.data.errors import DataError


@dataclasses.dataclass(frozen=True)
class LocalFile:
    """A file and its name relative to the fixed part of the pattern that found it."""

    name: str
    path: pathlib.Path


def find_files(setting: str, patterns: Sequence[str]) -> list[LocalFile]:
    """The files that match any of the glob patterns, each once, sorted by path.

    Args:
        setting: The setting that holds the patterns, for messages (`TextCorpus.files`).
        patterns: Glob patterns; `**` goes into folders, `~` is the home folder.

    Raises:
        DataError: no pattern, or a pattern that matches no file.
    """
    if not patterns:
        raise DataError(f"{setting} is empty: name at least one file or glob pattern")
    found: dict[pathlib.Path, LocalFile] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        root = _fixed_part(expanded)
        paths = [pathlib.Path(match) for match in glob.glob(expanded, recursive=True)]
        files = [path for path in paths if path.is_file()]
        if not files:
            raise DataError(f"{setting}: no file matches {pattern!r} (looked in {os.getcwd()})")
        for path in files:
            found.setdefault(path, LocalFile(path.relative_to(root).as_posix(), path))
    return sorted(found.values(), key=lambda file: file.path.as_posix())


def _fixed_part(pattern: str) -> pathlib.Path:
    """The folder that holds every match: the leading parts of the pattern without wildcards."""
    parts = pathlib.Path(pattern).parts
    fixed: list[str] = []
    for part in parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return pathlib.Path(*fixed)


def file_keys(files: Sequence[LocalFile]) -> list[tuple[str, int, int]]:
    """Name, size and time of change (ns) of each file: changes when a file does.

    Raises:
        DataError: a file cannot be read.
    """
    keys = []
    for file in files:
        try:
            status = file.path.stat()
        except OSError as error:
            raise unreadable(file.path, error) from error
        keys.append((file.name, status.st_size, status.st_mtime_ns))
    return keys


def unreadable(path: pathlib.Path, error: Exception) -> DataError:
    """The error for a file that cannot be opened or read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(f"{path}: cannot read: {reason}")


def read_text(path: pathlib.Path) -> str:
    """The text of a UTF-8 file (a leading byte order mark is dropped), newlines untouched.

    Raises:
        DataError: unreadable, or not UTF-8 (names the line and the byte).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8: {error.reason} 0x{data[error.start]:02x} "
            f"at byte {error.start}"
        ) from error


def check_text(text: object, where: str) -> str:
    """Returns `text` if it is a non-empty string that UTF-8 can hold.

    Args:
        text: The value found.
        where: File and record, for the message.

    Raises:
        DataError: not a string, lone surrogates, or nothing but white space.
    """
    if not isinstance(text, str):
        raise DataError(f"{where}: expected text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: not valid text: lone surrogate at character {error.start}"
        ) from error
    if not text.strip():
        raise DataError(f"{where}: empty text")
    return text


def is_empty(text: object) -> bool:
    """Whether a record holds no text: missing value, or nothing but white space."""
    return text is None or (isinstance(text, str) and not text.strip())
