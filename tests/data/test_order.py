# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from seqmix.data.order import derived_seed, mixed, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_each_epoch_is_a_permutation(size):
    epochs = shuffled(np.arange(3 * size), size, seed=7).reshape(3, size)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    if size >= 64:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], shuffled(np.arange(size), size, seed=8))


def test_any_place_is_computed_alone():
    places = np.array([5, 99_999, 0, 123_456_789_012])
    together = shuffled(places, 1000, 3)
    alone = [shuffled(np.array([place]), 1000, 3)[0] for place in places]
    assert together.tolist() == alone


def test_the_order_is_pinned():
    """A change here breaks the resume of every run saved before it."""
    assert shuffled(np.arange(10), 10, 0).tolist() == [6, 3, 8, 2, 1, 7, 5, 0, 9, 4]
    assert derived_seed(0, "shuffle") == 16014317637358574594


def test_large_sizes():
    size = 5_000_000_000
    values = shuffled(np.arange(2000) + 3 * size, size, 1)
    assert len(set(values.tolist())) == 2000
    assert 0 <= values.min() < size / 20
    assert size > values.max() > size * 19 / 20


def test_the_shuffle_is_uniform():
    """Where element 0 goes, over seeds: each place as often (chi-square, 15 degrees of freedom)."""
    places = [shuffled(np.arange(16), 16, seed).tolist().index(0) for seed in range(3200)]
    counts = np.bincount(places, minlength=16)
    assert ((counts - 200) ** 2 / 200).sum() < 40  # exceeded once in 2000 times by chance
    # Neighbours are not kept together.
    order = shuffled(np.arange(10_000), 10_000, 5)
    assert (np.abs(np.diff(order)) == 1).sum() < 15


@pytest.mark.parametrize("weights", [(1.0,), (1, 1), (0.7, 0.2, 0.1), (1e-3, 5.0), (3, 1, 1, 3)])
def test_mixture(weights):
    count = 20_000
    parts, numbers = mixed(np.arange(count), weights)
    shares = np.array(weights) / sum(weights)
    for part, share in enumerate(shares):
        chosen = parts == part
        # Every element of a part once, in order.
        np.testing.assert_array_equal(numbers[chosen], np.arange(chosen.sum()))
        # Evenly spread: at every place, the count so far is what the share says.
        off = np.cumsum(chosen) - share * np.arange(1, count + 1)
        assert np.abs(off).max() <= 1 + part + count * 2**-20


def test_mixture_far_into_the_stream():
    start = 10**12
    parts, numbers = mixed(np.arange(start, start + 1000), (0.3, 0.7))
    assert (parts == 0).sum() == pytest.approx(300, abs=1)
    assert numbers[parts == 1][0] == pytest.approx(0.7 * start, rel=1e-5)
    assert (np.diff(numbers[parts == 1]) == 1).all()
