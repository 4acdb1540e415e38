# SPDX-License-Identifier: Apache-2.0
"""JSON lines as a corpus."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import override

from seqmix import config
from seqmix.data.corpora.base import Document
from seqmix.data.corpora.files import LocalFile, check_text, is_empty, unreadable
from seqmix.data.corpora.text import FileCorpus
from seqmix.data.errors import DataError


@config.configurable()
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlCorpus(FileCorpus):
    """Files with one JSON object a line, one document a line.

    Attributes:
        field: Name of the field that holds the text.
        skip_empty: Leave out records without text (null, or only white space) and blank lines,
            instead of stopping with an error.
    """

    field: str = "text"
    skip_empty: bool = False

    @override
    def read(self, files: Sequence[LocalFile]) -> Iterator[Document]:
        for file in files:
            empty = True
            for number, line in _lines(file.path):
                empty = False
                where = f"{file.path}:{number}"
                if self.skip_empty and not line.strip():
                    continue
                value = self._field(line, where)
                if self.skip_empty and is_empty(value):
                    continue
                text = check_text(value, f"{where}: field {self.field!r}")
                yield Document(f"{file.name}:{number}", text)
            if empty:
                raise DataError(f"{file.path}: empty file")

    def _field(self, line: bytes, where: str) -> object:
        if not line.strip():
            raise DataError(f"{where}: empty line")
        try:
            record = json.loads(line.rstrip().decode())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: not UTF-8: {error.reason} 0x{line[error.start]:02x} "
                f"at byte {error.start} of the line"
            ) from error
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON: {error.msg} (column {error.pos + 1})") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
        if self.field not in record:
            fields = ", ".join(sorted(record)) or "none"
            raise DataError(f"{where}: no field {self.field!r}; it has: {fields}")
        return record[self.field]


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except OSError as error:
        raise unreadable(path, error) from error
