# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import inference
from seqmix.inference import SamplingConfig

# Probabilities 0.4, 0.3, 0.15, 0.1, 0.05 at ids that are not in order.
PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
LOGITS = jnp.log(PROBABILITIES)[None].astype(jnp.float32)
LIKELIEST_FIRST = [1, 3, 4, 0, 2]


def support(logits):
    return set(np.flatnonzero(np.isfinite(np.asarray(logits)[0])).tolist())


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_top_k_keeps_exactly_the_k_likeliest(k):
    assert support(inference.top_k(LOGITS, k)) == set(LIKELIEST_FIRST[:k])


@pytest.mark.parametrize(
    ("p", "count"),
    [(1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.84, 3), (0.86, 4), (1.0, 5)],
)
def test_top_p_keeps_the_fewest_that_reach_p(p, count):
    assert support(inference.top_p(LOGITS, p)) == set(LIKELIEST_FIRST[:count])


@pytest.mark.parametrize(
    ("p", "count"), [(0.0, 5), (0.12, 5), (0.13, 4), (0.3, 3), (0.7, 2), (0.76, 1), (1.0, 1)]
)
def test_min_p_keeps_a_share_of_the_likeliest(p, count):
    assert support(inference.min_p(LOGITS, p)) == set(LIKELIEST_FIRST[:count])


def test_ties_go_to_the_lower_id():
    level = jnp.zeros((1, 4))
    assert support(inference.top_k(level, 2)) == {0, 1}
    assert support(inference.top_p(level, 0.6)) == {0, 1, 2}
    assert support(inference.min_p(level, 1.0)) == {0, 1, 2, 3}
    assert inference.greedy(level).tolist() == [0]


def test_top_p_of_one_keeps_a_long_flat_tail():
    # The running sum rounds to 1 long before the end.
    logits = jnp.concatenate([jnp.full((1, 1), 30.0), jnp.zeros((1, 999))], axis=1)
    assert len(support(inference.top_p(logits, 1.0))) == 1000


def test_filters_apply_in_order_each_to_what_is_left():
    # Of the top 3 (0.47, 0.35, 0.18 renormalised) two reach 0.8; alone, top_p would keep three.
    settings = SamplingConfig(temperature=1.0, top_k=3, top_p=0.8).arrays()
    assert support(inference.filter_logits(LOGITS, settings)) == {1, 3}
    assert support(inference.top_p(LOGITS, 0.8)) == {1, 3, 4}
    # Temperature comes first: at 0.5 the likeliest has 0.55 of the mass.
    settings = SamplingConfig(temperature=0.5, top_p=0.5).arrays()
    assert support(inference.filter_logits(LOGITS, settings)) == {1}
    assert support(inference.top_p(LOGITS, 0.5)) == {1, 3}
    settings = SamplingConfig(temperature=0.5, min_p=0.5).arrays()
    assert support(inference.filter_logits(LOGITS, settings)) == {1, 3}


def draws(settings, count=20_000):
    keys = jax.vmap(lambda i: jax.random.fold_in(inference.row_keys(7, 1)[0], i))
    logits = jnp.broadcast_to(LOGITS, (count, LOGITS.shape[1]))
    tokens = inference.sample(keys(jnp.arange(count)), logits, settings)
    return np.bincount(np.asarray(tokens), minlength=LOGITS.shape[1]) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature):
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    # Five standard deviations of a frequency at most 0.5 over 20,000 draws.
    np.testing.assert_allclose(draws(SamplingConfig(temperature)), expected, atol=0.018)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (SamplingConfig(1.0, top_k=2), 2),
        (SamplingConfig(1.0, top_p=0.8), 3),
        (SamplingConfig(1.0, min_p=0.2), 4),
    ],
)
def test_draws_come_from_exactly_the_support(settings, count):
    frequencies = draws(settings)
    kept = LIKELIEST_FIRST[:count]
    assert set(np.flatnonzero(frequencies).tolist()) == set(kept)
    expected = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    np.testing.assert_allclose(frequencies[kept], expected, atol=0.018)


def test_temperature_zero_is_greedy_whatever_the_filters():
    logits = jax.random.normal(jax.random.key(0), (64, 32))
    keys = inference.row_keys(0, 64)
    for settings in (SamplingConfig(0), SamplingConfig(0, 3, 0.5, 0.1)):
        tokens = inference.sample(keys, logits, settings)
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    assert tokens.dtype == jnp.int32


def test_a_tiny_temperature_neither_overflows_nor_draws():
    logits = jnp.array([[3e38, -3e38, 1e38], [-2e30, -1e30, -5e30]])
    tokens = inference.sample(inference.row_keys(0, 2), logits, SamplingConfig(1e-30, top_p=0.9))
    assert tokens.tolist() == [0, 1]


def test_a_rows_draw_does_not_depend_on_its_neighbours():
    logits = jax.random.normal(jax.random.key(1), (8, 50))
    keys, settings = inference.row_keys(3, 8), SamplingConfig(1.0, top_p=0.9).arrays()
    draw = jax.jit(inference.sample)
    together = draw(keys, logits, settings)
    assert draw(keys, logits.at[1:].multiply(-1), settings)[0] == together[0]
    for row in range(8):
        alone = draw(keys[row : row + 1], logits[row : row + 1], settings)
        assert alone[0] == together[row]


def test_seeds():
    def bits(seed, batch):
        return jax.random.key_data(inference.row_keys(seed, batch)).tolist()

    assert bits(5, 3) == bits(5, 3)
    assert bits(5, 2) == bits(5, 3)[:2]
    assert len({tuple(key) for key in bits(5, 3)}) == 3
    assert bits(5, 3) != bits(6, 3)
    assert bits([6, 5, 6], 3) == [*bits([6, 5], 2), bits([6], 1)[0]]
    assert bits(np.int64(5), 1) == bits(5, 1)
    bits(2**32 - 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be a finite number >= 0, got -0.1"),
        ({"temperature": float("nan")}, r"temperature must be a finite number >= 0, got nan"),
        ({"temperature": float("inf")}, r"temperature must be a finite number"),
        ({"temperature": True}, r"temperature must be a finite number >= 0, got True"),
        ({"temperature": "1"}, r"temperature must be a finite number >= 0, got '1'"),
        ({"top_k": 0}, r"top_k must be an integer >= 1, got 0"),
        ({"top_k": 2.0}, r"top_k must be an integer >= 1, got 2.0"),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be a number in \(0, 1\], got 1.1"),
        ({"min_p": -0.1}, r"min_p must be a number in \[0, 1\], got -0.1"),
        ({"min_p": 1.5}, r"min_p must be a number in \[0, 1\], got 1.5"),
    ],
)
def test_bad_settings_name_option_and_rule(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**options)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, True, "1", [1], [1, -1]])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match="seed must be"):
        inference.row_keys(seed, 2)
