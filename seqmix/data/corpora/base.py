# SPDX-License-Identifier: Apache-2.0
"""What a corpus is: named documents, split into training and validation by their names."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from seqmix.data.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclasses.dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        name: Where it came from, relative to the corpus and stable from machine to machine
            (`asyncio/tasks.py`, `part-3.jsonl:17`). The split is decided by it.
        text: Its text, not empty.
    """

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    """An iterable of documents, and the split they all belong to (None: split by name)."""

    documents: Iterable[Document]
    split: Split | None = None


def stable_fraction(name: str) -> float:
    """A number in [0, 1) that depends on the name alone: same on every machine and version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus(abc.ABC):
    """Base class of all corpora: a frozen dataclass whose fields say where the documents are.

    Attributes:
        validation_fraction: Share of the documents kept for validation, in [0, 1). A document's
            split depends on its name alone, so adding documents moves none of the others.
        max_documents: Stop after this many documents (train and validation together).
        max_bytes: Stop before the document that would exceed this many bytes of UTF-8.
    """

    validation_fraction: float = 0.05
    max_documents: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"{kind}.validation_fraction must be in [0, 1), got {self.validation_fraction}"
            )
        for field in ("max_documents", "max_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{kind}.{field} must be >= 1 or None, got {value}")

    @abc.abstractmethod
    def sources(self) -> Sequence[Source]:
        """The documents, in an order that depends on the corpus alone.

        Raises:
            DataError: nothing to read; iterating raises it for a file or record that is
                unreadable, empty or not UTF-8, naming it.
        """

    @abc.abstractmethod
    def content_key(self) -> Any:
        """Something JSON-able and cheap that changes when the documents change."""

    @property
    def label(self) -> str:
        """Short name for messages and folder names."""
        return type(self).__name__.removesuffix("Corpus").lower()

    def key(self) -> dict[str, Any]:
        """JSON-able identity of the documents and their split: settings and content."""
        return {
            "kind": type(self).__name__,
            "settings": dataclasses.asdict(self),
            "content": self.content_key(),
        }

    def documents(self) -> Iterator[tuple[Split, Document]]:
        """All documents within the limits, each with its split.

        The limits hold for all documents together; where a corpus names its validation
        documents itself (validation files), for each split.

        Raises:
            DataError: as `sources`; also if there is no document at all.
        """
        found = 0
        for source in self.sources():
            for document in self._limited(source.documents):
                found += 1
                yield source.split or self._split_of(document.name), document
        if not found:
            raise DataError(
                f"the corpus {self.label!r} has no document"
                + (f" within max_bytes={self.max_bytes}" if self.max_bytes else "")
            )

    def _split_of(self, name: str) -> Split:
        return "validation" if stable_fraction(name) < self.validation_fraction else "train"

    def _limited(self, documents: Iterable[Document]) -> Iterator[Document]:
        size = 0
        for count, document in enumerate(documents):
            if self.max_documents is not None and count >= self.max_documents:
                return
            if self.max_bytes is not None:
                size += len(document.text.encode())
                if size > self.max_bytes:
                    return
            yield document
