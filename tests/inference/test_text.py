# SPDX-License-Identifier: Apache-2.0
import functools

import numpy as np
import pytest

from seqmix import inference
from tests.inference.models import VOCABULARY, model

LETTERS = "abcdefghijklmnopqrstuvwxyzäöü €"


class Alphabet:
    """Every id is a letter or two; the last is the end of a document, the one before a byte."""

    vocabulary_size = VOCABULARY - 3
    end_of_document = vocabulary_size - 1
    pieces = (*(c.encode() for c in LETTERS), *(c.encode() + b"." for c in LETTERS[:24]))

    def encode(self, text):
        return [LETTERS.index(c) for c in text]

    def decode_bytes(self, ids):
        pieces = (*self.pieces, b"\xe2", b"\x82", b"")
        return b"".join(pieces[i] for i in ids)


TOKENIZER = Alphabet()
PROMPTS = ["a bö", "x", "hello", "zz"]


@functools.cache
def completions(**options):
    return inference.generate_text(
        model("delta"), TOKENIZER, PROMPTS, max_new_tokens=16, temperature=1.5, **options
    )


def test_ids_beyond_the_tokenizer_are_never_chosen():
    assert Alphabet.end_of_document == len(Alphabet.pieces) + 2
    for seed in range(4):
        for completion in completions(seed=seed):
            assert max(completion.tokens) < TOKENIZER.vocabulary_size
    free = inference.generate(model("delta"), [[1]] * 4, max_new_tokens=16, temperature=100.0)
    assert free.max() >= TOKENIZER.vocabulary_size


def test_text_is_that_of_the_tokens():
    for seed in range(4):
        for completion in completions(seed=seed):
            expected = TOKENIZER.decode_bytes(completion.tokens).decode(errors="replace")
            assert completion.text == expected
            ended = completion.tokens[-1] == TOKENIZER.end_of_document
            assert completion.reason == ("stop_token" if ended else "length")
            assert TOKENIZER.end_of_document not in completion.tokens[:-1]


def test_the_end_of_a_document_ends_the_text():
    reasons = {c.reason for seed in range(4) for c in completions(seed=seed)}
    assert reasons == {"stop_token", "length"}


def middle(row=0, seed=1):
    """A part of a row's text longer than a token, whose borders it does not keep to."""
    completion = completions(seed=seed)[row]
    assert completion.reason == "length"
    return completion.text[4:9]


def test_stop_strings_cut_the_text_across_tokens():
    free, stop = completions(seed=1), middle()
    cut = completions(seed=1, stop_strings=("never", stop))
    for before, after in zip(free, cut, strict=True):
        if stop not in before.text:
            assert before == after
            continue
        assert after.text == before.text[: before.text.index(stop)]
        assert after.reason == "stop_string"
        assert after.tokens == before.tokens[: len(after.tokens)]
        # The last token completed the stop string.
        assert stop.encode() in TOKENIZER.decode_bytes(after.tokens)
        assert stop.encode() not in TOKENIZER.decode_bytes(after.tokens[:-1])
    assert {completion.reason for completion in cut} > {"stop_string"}


def test_tokens_after_a_stop_string_are_padding():
    stop = middle()
    prompts = [TOKENIZER.encode(prompt) for prompt in PROMPTS]
    tokens = inference.generate(
        model("delta"),
        prompts,
        max_new_tokens=16,
        temperature=1.5,
        seed=1,
        tokenizer=TOKENIZER,
        stop_tokens=(TOKENIZER.end_of_document,),
        stop_strings=stop,
        pad_token=-1,
    )
    expected = completions(seed=1, stop_strings=(stop,))
    for row, completion in enumerate(expected):
        size = len(completion.tokens)
        assert tuple(tokens[row, :size].tolist()) == completion.tokens
        assert (tokens[row, size:] == -1).all()
    assert tokens.shape == (4, 16)


def test_stream_of_tokens_pads_after_a_stop_string():
    options = {"max_new_tokens": 16, "temperature": 1.5, "seed": 1, "pad_token": -1}
    prompts = [TOKENIZER.encode(prompt) for prompt in PROMPTS]
    options |= {"tokenizer": TOKENIZER, "stop_strings": middle()}
    whole = inference.generate(model("delta"), prompts, **options)
    steps = np.stack(list(inference.stream(model("delta"), prompts, **options)), axis=1)
    np.testing.assert_array_equal(steps, whole[:, : steps.shape[1]])
    assert (whole[:, steps.shape[1] :] == -1).all()
    assert (whole == -1).any()


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_is_the_text(seed):
    options = {"max_new_tokens": 16, "temperature": 1.5, "seed": seed}
    for prompt in PROMPTS[:2]:
        free = inference.generate_text(model("delta"), TOKENIZER, prompt, **options)[0]
        for stops in ((), (free.text[2:5], "ä€")):
            whole = inference.generate_text(
                model("delta"), TOKENIZER, [prompt], stop_strings=stops, **options
            )[0]
            pieces = list(
                inference.stream_text(
                    model("delta"), TOKENIZER, prompt, stop_strings=stops, **options
                )
            )
            assert "".join(pieces) == whole.text
            assert "" not in pieces
            if not stops and len(whole.tokens) > 3:
                assert len(pieces) > 1


def test_errors():
    with pytest.raises(ValueError, match="prompt 1 is empty: a prompt must have at least 1 token"):
        inference.generate_text(model("delta"), TOKENIZER, ["a", ""])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        inference.stream_text(model("delta"), TOKENIZER, "")

    class Larger(Alphabet):
        vocabulary_size = 1000

    with pytest.raises(ValueError, match="tokenizer has 1000 ids, the model's vocabulary only 61"):
        inference.generate_text(model("delta"), Larger(), "a")
