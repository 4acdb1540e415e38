# SPDX-License-Identifier: Apache-2.0
"""Text from tokens as they come, cut at stop strings wherever token boundaries fall."""

import codecs
from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """What text generation needs of a tokenizer; `seqmix.data.tokenizers` has more."""

    vocabulary_size: int
    end_of_document: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids; those of a part of a text are a part of its bytes."""


def stop_bytes(stop_strings: str | Sequence[str]) -> tuple[bytes, ...]:
    """Checks stop strings and gives their UTF-8; one string stands for itself.

    Raises:
      ValueError: one is empty or no string.
    """
    if isinstance(stop_strings, str):
        stop_strings = (stop_strings,)
    for index, stop in enumerate(stop_strings):
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"stop_strings[{index}] must be a non-empty string, got {stop!r}")
    return tuple(stop.encode() for stop in stop_strings)


class TextCutter:
    """Turns one row's tokens into bytes and stops at the first stop string.

    Works on bytes, so a stop string is found also where it begins or ends inside a token. Bytes
    that may yet turn out to be the beginning of a stop string are held back.

    Attributes:
      stopped: whether a stop string has come; it and everything after is cut.
    """

    def __init__(self, tokenizer: Decodes, stops: tuple[bytes, ...]):
        self._tokenizer = tokenizer
        self._stops = stops
        self._held = b""
        self.stopped = False

    def feed(self, token: int) -> bytes:
        """Takes a token and gives the bytes that are sure to be kept."""
        if self.stopped:
            return b""
        text = self._held + self._tokenizer.decode_bytes([token])
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = b""
            return text[: min(found)]
        keep = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> bytes:
        """Gives what is still held back, when no more tokens come."""
        held, self._held = self._held, b""
        return held


def cut_text(tokenizer: Decodes, stops: tuple[bytes, ...], tokens: Sequence[int]) -> str:
    """The text of all tokens of a row, cut at the first stop string."""
    cutter = TextCutter(tokenizer, stops)
    parts = [cutter.feed(token) for token in tokens]
    return b"".join([*parts, cutter.finish()]).decode(errors="replace")


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Decodes UTF-8 in pieces; a character comes when its last byte does, others are U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of the text that begins the stop string, which is not in it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
