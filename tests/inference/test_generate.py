# SPDX-License-Identifier: Apache-2.0
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import inference
from seqmix.inference import decode
from seqmix.inference.generate import prefill
from seqmix.inference.request import check_request
from seqmix.models import HybridLM
from tests.inference.models import CONFIGS, VOCABULARY, full_logits, model, prompts

LENGTHS = (3, 11, 1, 16)
NEW = 16
both = pytest.mark.parametrize("name", list(CONFIGS))


def greedy(name, tokens, new=NEW, **options):
    return inference.generate(model(name), tokens, max_new_tokens=new, temperature=0, **options)


@both
def test_greedy_decoding_is_what_teacher_forcing_gives(name):
    tokens = prompts(LENGTHS)
    new = greedy(name, tokens)
    assert new.shape == (4, NEW)
    assert new.dtype == np.int32
    assert len(set(new.ravel().tolist())) > 8  # a model that repeats itself would prove little
    rows = np.zeros((4, 32), np.int32)
    for row, prompt in enumerate(tokens):
        rows[row, : len(prompt) + NEW] = [*prompt, *new[row]]
    expected = full_logits(name, rows).argmax(-1)
    for row, prompt in enumerate(tokens):
        np.testing.assert_array_equal(expected[row, len(prompt) - 1 :][:NEW], new[row])


@both
def test_decoded_logits_equal_those_of_a_full_pass(name):
    # Token by token through the programs themselves; the window (6) is left far behind.
    tokens = np.asarray(prompts((32,) * 4, seed=1), np.int32)
    request = check_request(model(name), tokens[:, :5], max_new_tokens=27)
    programs, leaves = decode.programs(model(name))
    cache, hidden = prefill(programs, leaves, request)
    real = jnp.ones((4, 1), jnp.int32)
    logits = [model(name).logits(hidden)]
    for time in range(5, 32):
        assert cache.position.tolist() == [time] * 4
        cache, hidden = programs.prefill(leaves, cache, hidden, tokens[:, time : time + 1], real)
        logits.append(model(name).logits(hidden))
    expected = full_logits(name, tokens)[:, 4:]
    error = np.abs(np.stack(logits, axis=1) - expected).max()
    assert error <= 2e-5 * np.abs(expected).max()


def test_a_batch_of_different_lengths_gives_what_each_prompt_gives_alone():
    tokens = prompts(LENGTHS)
    together = greedy("mamba", tokens)
    for row, prompt in enumerate(tokens):
        np.testing.assert_array_equal(greedy("mamba", [prompt])[0], together[row])


def test_the_cache_counts_real_tokens_only():
    request = check_request(model("mamba"), prompts(LENGTHS), max_new_tokens=NEW)
    programs, leaves = decode.programs(model("mamba"))
    cache, _ = prefill(programs, leaves, request)
    assert cache.position.tolist() == list(LENGTHS)


def test_a_prompt_read_in_pieces_gives_the_same():
    tokens = prompts(LENGTHS)
    whole = greedy("mamba", tokens)
    np.testing.assert_array_equal(greedy("mamba", tokens, prefill_chunk=5), whole)


def test_ways_to_give_prompts():
    ragged = prompts(LENGTHS)
    expected = greedy("delta", ragged)
    padded = np.full((4, 16), VOCABULARY - 1)
    for row, prompt in enumerate(ragged):
        padded[row, : len(prompt)] = prompt
    for rows in (padded, jnp.asarray(padded), padded.tolist()):
        got = greedy("delta", rows, prompt_lengths=list(LENGTHS))
        np.testing.assert_array_equal(got, expected)
    arrays = [np.asarray(prompt) for prompt in ragged]
    np.testing.assert_array_equal(greedy("delta", arrays), expected)
    for one in (ragged[1], tuple(ragged[1]), np.asarray(ragged[1]), jnp.asarray(ragged[1])):
        np.testing.assert_array_equal(greedy("delta", one), expected[1:2])


def sampled(tokens, seed, **options):
    return inference.generate(
        model("delta"), tokens, max_new_tokens=NEW, seed=seed, temperature=1.0, **options
    )


def test_seeds_reproduce_and_differ():
    tokens = prompts(LENGTHS)
    first = sampled(tokens, 4)
    np.testing.assert_array_equal(sampled(tokens, 4), first)
    assert (sampled(tokens, 5) != first).any()
    same = sampled([tokens[0]] * 4, 4)
    assert (same[0] != same[1]).any()


def test_a_seed_per_row_draws_alike_alone_and_in_any_batch():
    tokens = prompts(LENGTHS)
    together = sampled(tokens, [7, 8, 9, 10])
    reordered = sampled(tokens[::-1], [10, 9, 8, 7])[::-1]
    np.testing.assert_array_equal(reordered, together)
    for row in range(4):
        alone = sampled([tokens[row]], [7 + row])
        np.testing.assert_array_equal(alone[0], together[row])


def test_more_tokens_begin_with_the_fewer():
    tokens = prompts(LENGTHS)
    np.testing.assert_array_equal(sampled(tokens, 4)[:, :9], sampled9(tokens))


def sampled9(tokens):
    return inference.generate(model("delta"), tokens, max_new_tokens=9, seed=4, temperature=1.0)


def test_a_stop_token_ends_its_row_alone():
    tokens = prompts(LENGTHS)
    free = greedy("delta", tokens)
    stop = int(free[1, 4])
    got = greedy("delta", tokens, stop_tokens=(stop,))
    for row in range(4):
        at = np.flatnonzero(free[row] == stop)
        end = at[0] + 1 if at.size else NEW
        np.testing.assert_array_equal(got[row, :end], free[row, :end])
        assert (got[row, end:] == stop).all()
    assert (got[1, 5:] == stop).all()
    padded = greedy("delta", tokens, stop_tokens=(stop,), pad_token=-1)
    assert (padded[1, 5:] == -1).all()
    assert padded[1, 4] == stop


def test_ends_early_when_all_rows_have_ended():
    tokens = prompts((4,))
    first = int(greedy("delta", tokens)[0, 0])
    steps = list(
        inference.stream(
            model("delta"), tokens, temperature=0, max_new_tokens=NEW, stop_tokens=(first,)
        )
    )
    assert len(steps) == 1
    programs, leaves = decode.programs(model("delta"))
    request = check_request(model("delta"), tokens, max_new_tokens=NEW)
    cache, hidden = prefill(programs, leaves, request)
    choice = decode.Choice(
        keys=inference.row_keys(0, 1),
        sampling=inference.SamplingConfig(0).arrays(),
        stops=np.array([first, -1, -1, -1], np.int32),
        pad=np.int32(0),
        vocabulary=np.int32(VOCABULARY),
    )
    carry = programs.begin(leaves, cache, hidden, choice, NEW)
    carry = programs.advance(leaves, carry, choice, np.zeros(1, bool), np.int32(NEW))
    assert (int(carry.step), carry.length.tolist()) == (1, [1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streaming_gives_the_tokens_of_generate(temperature):
    tokens, options = prompts(LENGTHS), {"temperature": temperature, "top_p": 0.9, "seed": 3}
    expected = inference.generate(model("delta"), tokens, max_new_tokens=11, **options)
    steps = list(inference.stream(model("delta"), tokens, max_new_tokens=11, **options))
    assert [step.shape for step in steps] == [(4,)] * 11
    np.testing.assert_array_equal(np.stack(steps, axis=1), expected)


def test_stream_can_be_left_and_checks_arguments_at_once():
    steps = inference.stream(model("delta"), prompts(LENGTHS), temperature=0, max_new_tokens=NEW)
    first = next(steps)
    steps.close()
    np.testing.assert_array_equal(first, greedy("delta", prompts(LENGTHS))[:, 0])
    with pytest.raises(ValueError, match="top_k must be"):
        inference.stream(model("delta"), [[1]], top_k=0)


def test_another_prompt_of_the_same_bucket_compiles_nothing():
    greedy("delta", prompts(LENGTHS))
    sampled(prompts(LENGTHS), 0, top_p=0.5)
    list(inference.stream(model("delta"), prompts(LENGTHS), temperature=0, max_new_tokens=NEW))
    other = HybridLM(CONFIGS["delta"], rngs=nnx.Rngs(1))
    compiled = []

    def note(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        greedy("delta", prompts((9, 2, 13, 7), seed=5), new=13)
        inference.generate(
            other, prompts(LENGTHS), max_new_tokens=12, temperature=0.3, top_p=0.9, seed=9
        )
        list(inference.stream(other, prompts((2, 9, 2, 2)), temperature=0, max_new_tokens=10))
        assert compiled == []
        jax.jit(lambda x: x * 3)(1.0)
        assert compiled  # the listener does hear compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.slow
def test_other_sizes_keep_to_their_buckets():
    tokens = prompts((3, 17, 1, 16))
    long = greedy("delta", tokens, new=17)
    np.testing.assert_array_equal(long[:, :NEW], greedy("delta", tokens))


def test_logits_that_are_not_finite_raise_instead_of_choosing():
    broken = HybridLM(CONFIGS["delta"], rngs=nnx.Rngs(0))
    broken.embedding[...] = broken.embedding[...].at[5].set(jnp.nan)
    with pytest.raises(FloatingPointError, match=r"prompt 1: .* NaN or infinite at new token 0"):
        inference.generate(
            broken, [*prompts((3,)), [4, 5], *prompts((1, 16))], max_new_tokens=NEW, temperature=0
        )


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ([[1]], {"max_new_tokens": -3}, "max_new_tokens must be an integer >= 1, got -3"),
        ([[1]], {"max_new_tokens": 2.0}, "max_new_tokens must be an integer >= 1, got 2.0"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk must be an integer >= 1, got 0"),
        ([[1], []], {}, "prompt 1 is empty: a prompt must have at least 1 token"),
        ([], {}, "there is no prompt"),
        (np.zeros((2, 0), int), {}, "prompt 0 is empty"),
        (np.zeros((1, 2, 3), int), {}, "must have shape [B, T] or [T], got [1, 2, 3]"),
        (
            [[1, VOCABULARY]],
            {},
            "prompt 0, token 1: id 61 is outside the model's vocabulary [0, 61)",
        ),
        ([[1], [2, -1]], {}, "prompt 1, token 1: id -1 is outside"),
        ([[1.5]], {}, "prompt 0 must hold integers, got float64"),
        ("text", {}, "prompts must be token ids, got text"),
        ([["a"]], {}, "prompt 0 must hold integers"),
        ([[1, 2]], {"prompt_lengths": [3]}, "prompt_lengths[0] must be in [1, 2], got 3"),
        ([[1, 2]], {"prompt_lengths": [0]}, "prompt_lengths[0] must be in [1, 2], got 0"),
        ([[1, 2]], {"prompt_lengths": [1, 1]}, "prompt_lengths must be 1 integers"),
        ([[1]], {"stop_tokens": (61,)}, "stop_tokens[0] must be an id in [0, 61)"),
        ([[1]], {"stop_strings": ("x",)}, "stop_strings need a tokenizer"),
        ([[1]], {"pad_token": 2**31}, "pad_token must be an int32"),
        ([[1]], {"temperature": -1}, "temperature must be a finite number >= 0, got -1"),
        ([[1]], {"seed": -1}, "seed must be an integer in [0, 4294967296), got -1"),
        ([[1]], {"seed": [1, 2]}, "seed must be one integer or one a row: 1, got 2"),
    ],
)
def test_bad_arguments_name_what_came_and_what_was_expected(prompt, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        inference.generate(model("delta"), prompt, **options)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="top_q"):
        inference.generate(model("delta"), [[1]], top_q=0.5)
