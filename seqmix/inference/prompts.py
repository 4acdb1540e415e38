# SPDX-License-Identifier: Apache-2.0
"""Prompts of different lengths as one right-padded batch, in sizes that recur."""

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Prompts(NamedTuple):
    """A batch of prompts.

    Attributes:
      tokens: [B, T] int32, right-padded with 0.
      lengths: [B] int32, tokens of each prompt, all >= 1; T is the longest.
    """

    tokens: np.ndarray
    lengths: np.ndarray


def batch_prompts(prompts: Any, lengths: Any, vocabulary: int) -> Prompts:
    """Checks prompts and pads them to one length.

    Args:
      prompts: integers [B, T], a sequence of B sequences of any lengths, or one prompt [T].
      lengths: [B] tokens of each row of [B, T] prompts, the rest being padding; None: all.
      vocabulary: ids must be in [0, vocabulary).

    Raises:
      ValueError: there is no prompt or an empty one, an id is no integer or outside the
        vocabulary, or the lengths do not fit; names the row.
    """
    rows = [_row(f"prompt {index}", row) for index, row in enumerate(_rows(prompts))]
    if lengths is not None:
        rows = _cut(rows, lengths)
    for index, row in enumerate(rows):
        if not row.size:
            raise ValueError(f"prompt {index} is empty: a prompt must have at least 1 token")
        wrong = np.flatnonzero((row < 0) | (row >= vocabulary))
        if wrong.size:
            raise ValueError(
                f"prompt {index}, token {wrong[0]}: id {row[wrong[0]]} is outside the model's "
                f"vocabulary [0, {vocabulary})"
            )
    sizes = np.array([row.size for row in rows], np.int32)
    tokens = np.zeros((len(rows), sizes.max()), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : row.size] = row
    return Prompts(tokens, sizes)


def begin_with(meta_ids: range, prompts: Prompts) -> Prompts:
    """The prompts after the ids that every document begins with."""
    tokens = np.pad(prompts.tokens, ((0, 0), (len(meta_ids), 0)))
    tokens[:, : len(meta_ids)] = meta_ids
    return Prompts(tokens, prompts.lengths + np.int32(len(meta_ids)))


def bucket(size: int, least: int = 16) -> int:
    """The power of two at or above ``size``, not below ``least``: few shapes, few compilations."""
    return max(least, 1 << (size - 1).bit_length())


def _rows(prompts: Any) -> Sequence[Any]:
    if isinstance(prompts, str | bytes):
        raise ValueError("prompts must be token ids, got text; generate_text takes text")
    if hasattr(prompts, "ndim"):
        prompts = np.asarray(prompts)
        if prompts.ndim not in (1, 2):
            raise ValueError(f"prompts must have shape [B, T] or [T], got {list(prompts.shape)}")
        single = prompts.ndim == 1
    else:
        prompts = list(prompts)
        single = bool(prompts) and all(isinstance(item, numbers.Integral) for item in prompts)
    rows = [prompts] if single else list(prompts)
    if not rows:
        raise ValueError("there is no prompt: prompts must have at least 1 row")
    return rows


def _row(name: str, row: Any) -> np.ndarray:
    array = np.asarray(row)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a sequence of token ids, got shape {list(array.shape)}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, got {array.dtype}")
    return array.astype(np.int64)


def _cut(rows: list[np.ndarray], lengths: Any) -> list[np.ndarray]:
    sizes = np.asarray(lengths)
    if sizes.shape != (len(rows),) or not np.issubdtype(sizes.dtype, np.integer):
        raise ValueError(
            f"prompt_lengths must be {len(rows)} integers, one a prompt, got "
            f"{sizes.dtype} {list(sizes.shape)}"
        )
    for index, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        if not 1 <= size <= row.size:
            raise ValueError(f"prompt_lengths[{index}] must be in [1, {row.size}], got {size}")
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]
