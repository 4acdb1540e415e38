# SPDX-License-Identifier: Apache-2.0
"""Plain text files as a corpus."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, override

from seqmix import config
from seqmix.data.corpora.base import Corpus, Document, Source
from seqmix.data.corpora.files import LocalFile, check_text, file_keys, find_files, read_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileCorpus(Corpus):
    """Base class of the corpora read from local files.

    Attributes:
        files: Paths or glob patterns, relative to the working directory.
        validation_files: Paths or glob patterns of the validation documents. When given, all
            documents of `files` are for training and `validation_fraction` is not used.
    """

    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = type(self).__name__
        if not self.files:
            raise ValueError(f"{kind}.files is empty: name at least one file or glob pattern")

    @override
    def sources(self) -> Sequence[Source]:
        files, validation = self._found()
        if validation is None:
            return [Source(self.read(files))]
        return [Source(self.read(files), "train"), Source(self.read(validation), "validation")]

    @override
    def content_key(self) -> Any:
        files, validation = self._found()
        return {
            "files": file_keys(files),
            "validation_files": None if validation is None else file_keys(validation),
        }

    @abc.abstractmethod
    def read(self, files: Sequence[LocalFile]) -> Iterator[Document]:
        """The documents of the given files, in order."""

    def _found(self) -> tuple[list[LocalFile], list[LocalFile] | None]:
        kind = type(self).__name__
        files = find_files(f"{kind}.files", self.files)
        if not self.validation_files:
            return files, None
        return files, find_files(f"{kind}.validation_files", self.validation_files)


@config.configurable()
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCorpus(FileCorpus):
    """UTF-8 text files, one document a file.

    Attributes:
        separator: Text that separates documents inside a file, such as a blank line or an
            end-of-text mark; it belongs to no document, and pieces that hold only white space
            are not documents. None: the whole file is one document.
    """

    separator: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separator == "":
            raise ValueError("TextCorpus.separator must not be the empty string; use None")

    @override
    def read(self, files: Sequence[LocalFile]) -> Iterator[Document]:
        for file in files:
            text = check_text(read_text(file.path), str(file.path))
            if self.separator is None:
                yield Document(file.name, text)
                continue
            for number, piece in enumerate(text.split(self.separator), 1):
                if piece.strip():
                    yield Document(f"{file.name}:{number}", piece)
