# SPDX-License-Identifier: Apache-2.0
"""Continuing text: `generate` between a tokenizer's two ends."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Unpack

from flax import nnx

from seqmix.inference.generate import blocks, run
from seqmix.inference.request import Options, Request, check_request
from seqmix.inference.stops import Decodes, TextCutter, cut_text, utf8_decoder


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt.

    Attributes:
      text: the new text, cut before a stop string; bytes that are no UTF-8 are U+FFFD.
      tokens: the new tokens, with the stop token or those of the stop string.
      reason: why it ended: 'stop_token', 'stop_string' or 'length'.
    """

    text: str
    tokens: tuple[int, ...]
    reason: Literal["stop_token", "stop_string", "length"]


def generate_text(
    model: nnx.Module, tokenizer: Decodes, prompts: str | Sequence[str], **options: Unpack[Options]
) -> list[Completion]:
    """Continues texts.

    Args:
      model: a `seqmix.models.HybridLM`.
      tokenizer: see `seqmix.data.tokenizers`.
      prompts: one or more texts, of different lengths as they come. None may be empty: a model
        has learnt to continue documents, not to begin them.
      **options: those of `generate`; ``stop_tokens`` defaults to the tokenizer's end of document.

    Returns:
      One completion per prompt, a list even for one prompt.

    Raises:
      ValueError, TypeError, FloatingPointError: as `generate`.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    request = _request(model, tokenizer, prompts, options)
    result = run(model, request)
    completions = []
    for row, length in enumerate(result.lengths):
        tokens = tuple(result.tokens[row, :length].tolist())
        if result.stopped[row]:
            reason = "stop_string"
        else:
            reason = "stop_token" if tokens[-1] in request.stop_tokens else "length"
        completions.append(Completion(cut_text(tokenizer, request.stops, tokens), tokens, reason))
    return completions


def stream_text(
    model: nnx.Module, tokenizer: Decodes, prompt: str, **options: Unpack[Options]
) -> Iterator[str]:
    """Continues one text and gives it piece by piece.

    Args and errors as `generate_text`, errors about arguments at the call.

    Yields:
      Pieces, not empty, of whole characters, as soon as it is sure that no stop string cuts them.
      Together they are the text of `generate_text`.
    """
    request = _request(model, tokenizer, [prompt], options)

    def pieces():
        cutter, decoder = TextCutter(tokenizer, request.stops), utf8_decoder()
        length = 0
        for block in blocks(model, request, 1):
            if block.lengths[0] > length:
                piece = decoder.decode(cutter.feed(int(block.tokens[0, 0])))
                if piece:
                    yield piece
            length = block.lengths[0]
        piece = decoder.decode(cutter.finish(), final=True)
        if piece:
            yield piece

    return pieces()


def _request(
    model: nnx.Module, tokenizer: Decodes, prompts: Sequence[str], options: Options
) -> Request:
    options = {"stop_tokens": (tokenizer.end_of_document,), **options}
    tokens = []
    for index, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt)
        if not len(ids):
            raise ValueError(f"prompt {index} is empty: a prompt must have at least 1 token")
        tokens.append(ids)
    return check_request(model, tokens, tokenizer=tokenizer, **options)
