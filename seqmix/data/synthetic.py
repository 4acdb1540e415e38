# SPDX-License-Identifier: Apache-2.0
"""Synthetic tasks of recall: pure functions from a seed to tokens, labels and a label mask."""

from typing import NamedTuple

import numpy as np


class Task(NamedTuple):
    """Examples of a task.

    Attributes:
        tokens: int32 [B, T], what the model reads.
        labels: int32 [B, T], the answer wanted at each position; 0 where there is none.
        mask: bool [B, T], where there is one.
    """

    tokens: np.ndarray
    labels: np.ndarray
    mask: np.ndarray


def multi_query_recall(
    seed: int,
    examples: int,
    length: int,
    pairs: int,
    *,
    vocabulary_size: int = 8192,
    power: float = 0.01,
    random_fill: bool = False,
) -> Task:
    """Multi-query associative recall (MQAR).

    An example begins with `pairs` keys, each followed by its value. Every key then comes once
    more, and the answer there is its value. The queries stand at even distances from the end of
    the pairs, the i-th such place (from 1) being drawn with weight power * i**(power - 1), without
    replacement: for a small power mostly early ones.

    Args:
        seed: Of the examples.
        examples: B.
        length: T, at least 4 * pairs.
        pairs: Keys in an example.
        vocabulary_size: Token 0 fills, the rest of the lower half are keys, the upper half values.
        power: Exponent of the weights of places, in (0, 1].
        random_fill: Fill with random tokens instead of 0.

    Raises:
        ValueError: too short, or too few tokens in the vocabulary.

    Source: S. Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models"
    (2023), and its data generator.
    """
    half = vocabulary_size // 2
    places = (length - 2 * pairs) // 2
    if pairs < 1 or places < pairs:
        raise ValueError(f"length must be >= 4 * pairs = {4 * pairs}, got {length}")
    if half - 1 < pairs:
        raise ValueError(
            f"vocabulary_size must be >= 2 * (pairs + 1) = {2 * (pairs + 1)}, got {vocabulary_size}"
        )
    if not 0 < power <= 1:
        raise ValueError(f"power must be in (0, 1], got {power}")
    rng = np.random.default_rng(seed)
    keys = 1 + _distinct(rng, examples, half - 1, pairs)
    values = half + _distinct(rng, examples, vocabulary_size - half, pairs)
    # The smallest of exponential variables of these rates are a weighted draw without replacement.
    weights = power * np.arange(1, places + 1) ** (power - 1)
    times = rng.exponential(size=(examples, places)) / weights
    queries = 2 * pairs + 2 * np.argsort(times, axis=1)[:, :pairs]

    row = np.arange(examples)[:, None]
    tokens = np.zeros((examples, length), np.int32)
    if random_fill:
        tokens[:] = rng.integers(vocabulary_size, size=tokens.shape)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    tokens[row, queries] = keys
    labels = np.zeros_like(tokens)
    labels[row, queries] = values
    mask = np.zeros(tokens.shape, bool)
    mask[row, queries] = True
    return Task(tokens, labels, mask)


NEEDLE_MARK = 1
QUESTION_MARK = 2


def needle(
    seed: int,
    examples: int,
    length: int,
    *,
    needles: int = 1,
    depth: float | None = None,
    vocabulary_size: int = 256,
) -> Task:
    """A needle in a haystack: find the value of one key in a long random text.

    The text is random tokens of the upper half of the vocabulary. Somewhere in it stand `needles`
    times the mark 1, a key and a value; it ends with the mark 2 and one of the keys, and the
    answer at the last position is that key's value. Keys (all different) and values are from the
    lower half.

    Args:
        seed: Of the examples.
        examples: B.
        length: T, at least 3 * needles + 2.
        needles: Keys in an example; all but one are distractors.
        depth: Where the asked needle stands: 0 at the beginning, 1 at the end; None: anywhere.
        vocabulary_size: Number of tokens, 0 being unused.

    Raises:
        ValueError: too short, too few tokens in the vocabulary, or depth outside [0, 1].
    """
    half = vocabulary_size // 2
    slots = (length - 2) // 3
    if needles < 1 or slots < needles:
        raise ValueError(f"length must be >= 3 * needles + 2 = {3 * needles + 2}, got {length}")
    if half - 3 < needles:
        raise ValueError(
            f"vocabulary_size must be >= 2 * (needles + 3) = {2 * (needles + 3)}, "
            f"got {vocabulary_size}"
        )
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth must be in [0, 1], got {depth}")
    rng = np.random.default_rng(seed)
    keys = 3 + _distinct(rng, examples, half - 3, needles)
    values = rng.integers(3, half, size=(examples, needles))
    slot = _distinct(rng, examples, slots, needles)
    if depth is not None:  # the asked needle, the first, changes places with what stands there
        wanted = round(depth * (slots - 1))
        slot = np.where(slot == wanted, slot[:, :1], slot)
        slot[:, 0] = wanted

    row = np.arange(examples)[:, None]
    tokens = rng.integers(half, vocabulary_size, size=(examples, length)).astype(np.int32)
    tokens[row, 3 * slot] = NEEDLE_MARK
    tokens[row, 3 * slot + 1] = keys
    tokens[row, 3 * slot + 2] = values
    tokens[:, -2] = QUESTION_MARK
    tokens[:, -1] = keys[:, 0]
    labels = np.zeros_like(tokens)
    labels[:, -1] = values[:, 0]
    mask = np.zeros(tokens.shape, bool)
    mask[:, -1] = True
    return Task(tokens, labels, mask)


def _distinct(rng: np.random.Generator, rows: int, bound: int, count: int) -> np.ndarray:
    """Different random integers below `bound` in each row, in random order: int64 [rows, count]."""
    return np.argsort(rng.random((rows, bound)), axis=1)[:, :count]
