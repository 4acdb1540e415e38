# SPDX-License-Identifier: Apache-2.0
"""Continuing token sequences with a language model."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Unpack

import jax
import numpy as np
from flax import nnx

from seqmix.inference import decode
from seqmix.inference.prompts import bucket
from seqmix.inference.request import Options, Request, check_request
from seqmix.inference.sampling import row_keys
from seqmix.inference.stops import TextCutter

# New tokens between two looks for stop strings: each look waits for the device.
_LOOK = 8


def generate(model: nnx.Module, prompt_tokens: Any, **options: Unpack[Options]) -> np.ndarray:
    """Continues each prompt.

    Without stop strings the whole continuation is one compiled loop, which ends early when every
    row has ended. A row's tokens do not depend on the other rows of the batch.

    Args:
      model: a `seqmix.models.HybridLM`.
      prompt_tokens: ids in [0, vocabulary): [B, T], B sequences of any lengths >= 1, or one
        prompt [T].
      **options: see `seqmix.inference.Options`, such as ``max_new_tokens=64``,
        ``temperature=0.8``, ``top_p=0.95``, ``seed=0``.

    Returns:
      [B, max_new_tokens] int32. A row that ended holds the stop token, or the token that completed
      a stop string, and then only the pad token.

    Raises:
      ValueError: a prompt or an option is not as above.
      TypeError: an unknown option.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    return run(model, check_request(model, prompt_tokens, **options)).tokens


def stream(
    model: nnx.Module, prompt_tokens: Any, **options: Unpack[Options]
) -> Iterator[np.ndarray]:
    """Continues each prompt and gives the tokens as they come.

    Args and errors as `generate`, errors about arguments at the call. The model computes the next
    token while the caller handles this one.

    Yields:
      [B] int32, a new token per row, the pad token for rows that have ended; at most
      ``max_new_tokens`` times, not once all rows have ended. Together they are what `generate`
      returns.
    """
    request = check_request(model, prompt_tokens, **options)

    def columns():
        for block in blocks(model, request, 1):
            yield block.tokens[:, 0]

    return columns()


@dataclasses.dataclass(frozen=True)
class Block:
    """New tokens of some steps.

    Attributes:
      tokens: [B, n] int32, the pad token where a row has ended.
      lengths: [B] tokens of each row so far, pads left out.
      stopped: [B] bool, rows that a stop string ended.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray


def run(model: nnx.Module, request: Request) -> Block:
    """All new tokens, [B, max_new_tokens]."""
    width = _LOOK if request.stops else request.max_new_tokens
    parts = list(blocks(model, request, width))
    tokens = np.concatenate([part.tokens for part in parts], axis=1)
    missing = request.max_new_tokens - tokens.shape[1]
    tokens = np.pad(tokens, ((0, 0), (0, missing)), constant_values=request.pad_token)
    return dataclasses.replace(parts[-1], tokens=tokens)


def blocks(model: nnx.Module, request: Request, width: int) -> Iterator[Block]:
    """Runs the model; yields blocks of ``width`` steps until all rows have ended."""
    programs, leaves = decode.programs(model)
    batch = len(request.prompts.lengths)
    size = bucket(request.max_new_tokens)
    choice = decode.Choice(
        keys=row_keys(request.seed, batch),
        sampling=request.sampling.arrays(),
        stops=_padded(request.stop_tokens),
        pad=np.int32(request.pad_token),
        vocabulary=np.int32(request.vocabulary),
    )
    cache, hidden = prefill(programs, leaves, request)
    carry = programs.begin(leaves, cache, hidden, choice, size)
    rows = _Rows(request)

    def launch(first: int) -> tuple[int, Any]:
        nonlocal carry
        limit = np.int32(min(first + width, request.max_new_tokens))
        carry = programs.advance(leaves, carry, choice, rows.stopped.copy(), limit)
        # A power of two wide, so that few windows are compiled.
        return first, decode.window(carry, np.int32(first), min(bucket(width, 1), size))

    pending = launch(0)
    while pending is not None:
        first, view = pending
        # The device goes on while the host waits for this block and its reader.
        follows = first + width < request.max_new_tokens
        pending = launch(first + width) if follows else None
        tokens, lengths, done, finite = jax.device_get(view)
        tokens = tokens[:, : min(width, request.max_new_tokens - first)]
        block = rows.take(first, tokens, lengths)
        wrong = np.flatnonzero(~finite & ~block.stopped)
        if wrong.size:
            raise FloatingPointError(
                f"prompt {wrong[0]}: the model's logits are NaN or infinite at new token "
                f"{lengths[wrong[0]]}"
            )
        yield block
        if (done | rows.stopped).all():
            return


def prefill(programs: decode.Programs, leaves: list[jax.Array], request: Request) -> Any:
    """Reads the prompts; returns the cache and each row's last hidden state [B, D].

    Pieces have the size of the prompts' bucket, or of ``prefill_chunk`` if that is smaller; the
    cache has the capacity of the bucket of prompt and new tokens together.
    """
    tokens, lengths = request.prompts
    batch, time = tokens.shape
    width = min(bucket(time), request.prefill_chunk)
    cache, hidden = programs.start(leaves, batch, bucket(time + request.max_new_tokens))
    for first in range(0, time, width):
        piece = tokens[:, first : first + width]
        piece = np.pad(piece, ((0, 0), (0, width - piece.shape[1])))
        real = (first + np.arange(width) < lengths[:, None]).astype(np.int32)
        cache, hidden = programs.prefill(leaves, cache, hidden, piece, real)
    return cache, hidden


class _Rows:
    """Looks for stop strings in each row and pads what comes after."""

    def __init__(self, request: Request):
        batch = len(request.prompts.lengths)
        self._pad = request.pad_token
        self._cutters = [TextCutter(request.tokenizer, request.stops) for _ in range(batch)]
        self._looks = bool(request.stops)
        self._lengths = np.zeros(batch, np.int32)
        self.stopped = np.zeros(batch, bool)

    def take(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> Block:
        """A block [B, n] of new tokens from step ``first`` on; ``lengths`` as the device counts."""
        tokens = tokens.copy()
        if not self._looks:
            self._lengths = lengths
            return Block(tokens, lengths, self.stopped)
        for row, cutter in enumerate(self._cutters):
            for column in range(tokens.shape[1]):
                if self.stopped[row] or first + column >= lengths[row]:
                    tokens[row, column:] = self._pad
                    break
                cutter.feed(int(tokens[row, column]))
                self._lengths[row] += 1
                self.stopped[row] = cutter.stopped
        return Block(tokens, self._lengths.copy(), self.stopped.copy())


def _padded(tokens: tuple[int, ...]) -> np.ndarray:
    """Stop tokens filled up with -1 to a power of two, at least 4: few shapes, no id."""
    padded = np.full(bucket(len(tokens) or 1, 4), -1, np.int32)
    padded[: len(tokens)] = tokens
    return padded
