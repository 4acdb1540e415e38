# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from seqmix.data.synthetic import NEEDLE_MARK, QUESTION_MARK, multi_query_recall, needle


@pytest.mark.parametrize("random_fill", [False, True])
def test_recall(random_fill):
    task = multi_query_recall(0, 50, 64, 8, vocabulary_size=128, random_fill=random_fill, power=0.5)
    assert task.tokens.shape == task.labels.shape == task.mask.shape == (50, 64)
    for tokens, labels, mask in zip(*task, strict=True):
        keys, values = tokens[0:16:2], tokens[1:16:2]
        assert len(set(keys)) == len(set(values)) == 8
        assert ((keys >= 1) & (keys < 64)).all()
        assert ((values >= 64) & (values < 128)).all()
        places = np.flatnonzero(mask)
        assert (places >= 16).all()
        assert not (places % 2).any()
        table = dict(zip(keys, values, strict=True))
        assert sorted(tokens[places]) == sorted(keys)
        assert labels[places].tolist() == [table[key] for key in tokens[places]]
        assert not labels[~mask].any()
        rest = np.delete(tokens[16:], places - 16)
        assert rest.any() == random_fill


def test_recall_places_follow_the_power_law():
    """With one pair, the place has weight power * i**(power - 1)."""
    power, places = 0.3, 9
    task = multi_query_recall(1, 40_000, 20, 1, vocabulary_size=16, power=power)
    counts = task.mask.sum(axis=0)[2::2]
    weights = np.arange(1, places + 1) ** (power - 1)
    np.testing.assert_allclose(counts / 40_000, weights / weights.sum(), atol=0.01)


def test_recall_is_a_function_of_the_seed():
    first, again, other = (multi_query_recall(s, 4, 32, 4) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 31}, "length must be >= 4 \\* pairs = 32, got 31"),
        ({"vocabulary_size": 16}, "vocabulary_size must be >= .* = 18, got 16"),
        ({"power": 0.0}, r"power must be in \(0, 1\], got 0"),
    ],
)
def test_recall_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        multi_query_recall(0, 2, **({"length": 64, "pairs": 8} | changes))


@pytest.mark.parametrize("depth", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("needles", [1, 4])
def test_needle(depth, needles):
    length, half = 62, 64
    task = needle(3, 40, length, needles=needles, depth=depth, vocabulary_size=128)
    found = []
    for tokens, labels, mask in zip(*task, strict=True):
        assert np.flatnonzero(mask).tolist() == [length - 1]
        marks = np.flatnonzero(tokens == NEEDLE_MARK)
        assert len(marks) == needles
        table = dict(zip(tokens[marks + 1], tokens[marks + 2], strict=True))
        assert len(table) == needles
        assert tokens[-2] == QUESTION_MARK
        assert labels[-1] == table[tokens[-1]]
        assert labels[:-1].sum() == 0
        text = np.delete(tokens[:-2], np.concatenate([marks, marks + 1, marks + 2]))
        assert (text >= half).all()
        found.append(marks[tokens[marks + 1] == tokens[-1]].item())
    if depth is None:
        assert min(found) < 15 < 40 < max(found)
    else:
        assert set(found) == {3 * round(depth * 19)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 13, "needles": 4}, r"length must be >= 3 \* needles \+ 2 = 14, got 13"),
        ({"needles": 6, "vocabulary_size": 16}, "vocabulary_size must be >= .* = 18, got 16"),
        ({"depth": 1.5}, r"depth must be in \[0, 1\], got 1.5"),
    ],
)
def test_needle_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        needle(0, 2, **({"length": 64} | changes))
