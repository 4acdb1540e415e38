# SPDX-License-Identifier: Apache-2.0
"""The baseline: a bigram model over bytes, fitted on the training documents."""

from collections.abc import Iterable

import numpy as np

_END = 256  # before the first byte of a document and after its last
_SYMBOLS = 257


def count_bigrams(documents: Iterable[bytes]) -> np.ndarray:
    """Counts byte pairs inside documents.

    Args:
        documents: The documents' bytes.

    Returns:
        int64 [257, 257]: how often symbol j follows symbol i; symbol 256 stands before the first
        byte of a document and after its last.
    """
    symbols = [np.array([_END], np.int64)]
    for document in documents:
        symbols += [np.frombuffer(document, np.uint8).astype(np.int64), symbols[0]]
    stream = np.concatenate(symbols)
    pairs = stream[:-1] * _SYMBOLS + stream[1:]
    return np.bincount(pairs, minlength=_SYMBOLS**2).reshape(_SYMBOLS, _SYMBOLS)


def bigram_bits_per_byte(train: np.ndarray, validation: np.ndarray, alpha: float = 1.0) -> float:
    """Bits per byte of a bigram model on validation bytes.

    p(j | i) = (n_ij + alpha) / (sum_j n_ij + 257 alpha). alpha = 1 is Laplace's rule: on a
    megabyte or more of text its value hardly matters.

    What is counted is what a language model is scored on: every symbol that follows a byte, the
    end of the document included, and not a document's first byte, which has no context. The
    bits are divided by the bytes among them, so the end of a document costs bits and is no byte.

    Args:
        train: Counts of the training documents, from `count_bigrams`.
        validation: Counts of the validation documents.
        alpha: Added to every count; positive.

    Raises:
        ValueError: alpha not positive, or no byte to score.
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    scored = validation[:_END].astype(np.float64)
    size = scored[:, :_END].sum()
    if not size:
        raise ValueError("no validation document has two bytes or more")
    counts = train[:_END].astype(np.float64) + alpha
    log_probabilities = np.log2(counts) - np.log2(counts.sum(axis=1, keepdims=True))
    return float(-(scored * log_probabilities).sum() / size)
