# SPDX-License-Identifier: Apache-2.0
"""Python's own standard library as a corpus: text that every machine has."""

import dataclasses
import hashlib
import os
import pathlib
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any, override

from seqmix import config
from seqmix.data.corpora.base import Corpus, Document, Source
from seqmix.data.corpora.files import LocalFile, file_keys, unreadable
from seqmix.data.errors import DataError

# Tests are as large as the library and read differently; the rest is third-party code, or tables
# written by a program.
_SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "_bundled",
        "lib-dynload",
        "encodings",
        "pydoc_data",
    }
)


@config.configurable()
@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibCorpus(Corpus):
    """The `.py` files of the running Python's standard library, one document a file.

    The order is that of a hash of the relative name, so a limit takes a sample of the whole
    library and not the files that begin with "a". Empty files (`__init__.py`) are left out.
    """

    @override
    def sources(self) -> Sequence[Source]:
        return [Source(_documents(self._files()))]

    @override
    def content_key(self) -> Any:
        return file_keys(self._files())

    def _files(self) -> list[LocalFile]:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
            for name in names:
                path = pathlib.Path(folder, name)
                if name.endswith(".py") and path.stat().st_size:
                    files.append(LocalFile(path.relative_to(root).as_posix(), path))
        if not files:
            raise DataError(
                f"the standard library of this Python has no .py files in {root} "
                "(an embedded or zipped Python?)"
            )
        return sorted(files, key=_order)


def _order(file: LocalFile) -> bytes:
    # Not the hash that splits the files: a limit must sample both splits.
    return hashlib.sha256(f"order {file.name}".encode()).digest()


def _documents(files: Sequence[LocalFile]) -> Iterator[Document]:
    for file in files:
        try:
            # Honours a coding comment; newlines become "\n" on every system.
            with tokenize.open(file.path) as handle:
                text = handle.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise unreadable(file.path, error) from error
        if text.strip():
            yield Document(file.name, text)
