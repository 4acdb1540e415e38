# SPDX-License-Identifier: Apache-2.0
"""The options of generation, checked before anything runs."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, TypedDict

from flax import nnx

from seqmix.inference.prompts import Prompts, batch_prompts, begin_with
from seqmix.inference.sampling import SamplingConfig, row_keys
from seqmix.inference.stops import Decodes, stop_bytes


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `generate_text` and `stream_text`.

    Attributes:
      max_new_tokens: new tokens per row at most, >= 1; default 64.
      temperature: divides the logits, >= 0; default 0.8; 0 takes the likeliest token.
      top_k: keep the k likeliest tokens; default all. The filters are those of `SamplingConfig`.
      top_p: keep the likeliest tokens until their probabilities sum to top_p; default all.
      min_p: keep tokens of at least min_p times the likeliest one's probability; default all.
      seed: an integer in [0, 2**32), default 0, or one a row. What a row draws depends on its seed
        alone, and on its number where the batch has one seed.
      stop_tokens: ids that end a row.
      stop_strings: texts that end a row; they need ``tokenizer``.
      tokenizer: reads the new tokens for stop strings; ids beyond its vocabulary, which a model may
        have for padding, are never chosen.
      prompt_lengths: [B] tokens of each row of [B, T] prompts, the rest being padding.
      pad_token: fills rows that have ended; by default the first stop token, else 0.
      prefill_chunk: tokens per prompt that are read in one call, default 1024: bounds memory.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | Sequence[int]
    stop_tokens: Sequence[int]
    stop_strings: str | Sequence[str]
    tokenizer: Decodes | None
    prompt_lengths: Any
    pad_token: int | None
    prefill_chunk: int


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked prompts and `Options`.

    Attributes:
      prompts: the batch, after the model's meta tokens if it has any.
      stops: UTF-8 of the stop strings.
      vocabulary: ids at or above it are never chosen.
    """

    prompts: Prompts
    max_new_tokens: int
    sampling: SamplingConfig
    seed: int | Sequence[int]
    stop_tokens: tuple[int, ...]
    stops: tuple[bytes, ...]
    tokenizer: Decodes | None
    pad_token: int
    prefill_chunk: int
    vocabulary: int


def check_request(
    model: nnx.Module,
    prompt_tokens: Any,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_tokens: Sequence[int] = (),
    stop_strings: str | Sequence[str] = (),
    tokenizer: Decodes | None = None,
    prompt_lengths: Any = None,
    pad_token: int | None = None,
    prefill_chunk: int = 1024,
) -> Request:
    """Checks the arguments of `generate`.

    Raises:
      ValueError: names the option and its rule.
    """
    size = model.config.vocabulary
    vocabulary = size if tokenizer is None else tokenizer.vocabulary_size
    if vocabulary > size:
        raise ValueError(f"the tokenizer has {vocabulary} ids, the model's vocabulary only {size}")
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if not _integer(value) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    for index, token in enumerate(stop_tokens):
        if not _integer(token) or not 0 <= token < size:
            raise ValueError(
                f"stop_tokens[{index}] must be an id in [0, {size}), the model's vocabulary, "
                f"got {token!r}"
            )
    stops = stop_bytes(stop_strings)
    if stops and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer, got tokenizer=None")
    if pad_token is None:
        pad_token = stop_tokens[0] if len(stop_tokens) else 0
    elif not _integer(pad_token) or not -(2**31) <= pad_token < 2**31:
        raise ValueError(f"pad_token must be an int32, got {pad_token!r}")
    prompts = batch_prompts(prompt_tokens, prompt_lengths, size)
    prompts = begin_with(model.config.meta_ids, prompts)
    row_keys(seed, len(prompts.lengths))  # raises for bad seeds
    return Request(
        prompts=prompts,
        max_new_tokens=int(max_new_tokens),
        sampling=SamplingConfig(temperature, top_k, top_p, min_p),
        seed=seed,
        stop_tokens=tuple(int(token) for token in stop_tokens),
        stops=stops,
        tokenizer=tokenizer,
        pad_token=int(pad_token),
        prefill_chunk=int(prefill_chunk),
        vocabulary=vocabulary,
    )


def _integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
