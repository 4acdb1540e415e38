# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to ids and back."""

import os

from seqmix.data.errors import DataError
from seqmix.data.tokenizers.base import CONFIG_FILE, Tokenizer, read_config
from seqmix.data.tokenizers.bpe import train_bpe
from seqmix.data.tokenizers.byte import ByteTokenizer
from seqmix.data.tokenizers.huggingface import HuggingFaceTokenizer

_KINDS = {"byte": ByteTokenizer, "huggingface": HuggingFaceTokenizer}


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Loads a tokenizer that any of the classes here saved.

    Raises:
        DataError: the folder holds no saved tokenizer, or one of an unknown kind.
    """
    kind = read_config(folder)["kind"]
    if kind not in _KINDS:
        raise DataError(
            f"{os.fspath(folder)}/{CONFIG_FILE}: unknown kind {kind!r}; known: {', '.join(_KINDS)}"
        )
    return _KINDS[kind].load(folder)


__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "train_bpe",
]
