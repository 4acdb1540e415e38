# SPDX-License-Identifier: Apache-2.0
import itertools
import time

import numpy as np
import pytest

from seqmix.data.packing import (
    PackedRows,
    Spans,
    _concat_pieces,
    plan_concat,
    plan_first_fit,
    row_order,
)

PLANNERS = {"concat": plan_concat, "first_fit": plan_first_fit}


class Listed:
    """Documents of given lengths, document i at place 1000 * i of store i % 2."""

    def __init__(self, lengths):
        self.all = np.array(lengths, np.int64)

    def spans(self, start, count):
        index = np.arange(start, min(start + count, len(self.all)))
        return Spans(index % 2, 1000 * index, self.all[index])


def rows_of(window):
    return [list(zip(*map(np.ndarray.tolist, row), strict=True)) for row in window.rows]


def test_concat_by_hand():
    """Documents of 3, 4, 9 and 1 tokens in rows of 5; windows of two rows."""
    documents = Listed([3, 4, 9, 1])
    first = plan_concat(documents, 0, 0, 2, 5)
    assert rows_of(first) == [[(0, 0, 3), (1, 1000, 2)], [(1, 1002, 2), (0, 2000, 3)]]
    assert (first.document, first.offset) == (2, 3)
    second = plan_concat(documents, 2, 3, 2, 5)
    assert rows_of(second) == [[(0, 2003, 5)], [(0, 2008, 1), (1, 3000, 1)]]
    assert (second.document, second.offset) == (4, 0)
    assert plan_concat(documents, 4, 0, 2, 5) == ([], 4, 0)


def test_concat_of_one_document_over_many_windows():
    documents = Listed([23])
    place, found = (0, 0), []
    while (window := plan_concat(documents, *place, 2, 4)).rows:
        found += rows_of(window)
        place = window.document, window.offset
    assert found == [[(0, s, 4)] for s in range(0, 20, 4)] + [[(0, 20, 3)]]


def test_first_fit_by_hand():
    """3 opens row 0, 4 row 1, 2 fills row 0, 12 fills two rows and 2 are left for row 4."""
    window = plan_first_fit(Listed([3, 4, 2, 12, 1, 3]), 0, 0, 5, 5)
    assert rows_of(window) == [
        [(0, 0, 3), (0, 2000, 2)],
        [(1, 1000, 4), (0, 4000, 1)],
        [(1, 3000, 5)],
        [(1, 3005, 5)],
        [(1, 3010, 2), (1, 5000, 3)],
    ]
    assert (window.document, window.offset) == (6, 0)


def test_concat_with_an_overhead_by_hand():
    """Two tokens of a row of six go to each piece: one or two pieces a row, at times padding."""
    documents = Listed([3, 9, 1, 1, 2])
    first = plan_concat(documents, 0, 0, 3, 6, 2)
    # After 2 + 3 there is no room for 2 and a token; 2 + 4; 2 + 4.
    assert rows_of(first) == [[(0, 0, 3)], [(1, 1000, 4)], [(1, 1004, 4)]]
    assert (first.document, first.offset) == (1, 8)
    second = plan_concat(documents, 1, 8, 3, 6, 2)
    assert rows_of(second) == [
        [(1, 1008, 1), (0, 2000, 1)],
        [(1, 3000, 1), (0, 4000, 1)],
        [(0, 4001, 1)],
    ]
    assert (second.document, second.offset) == (5, 0)
    assert plan_concat(documents, 5, 0, 3, 6, 2) == ([], 5, 0)


def test_first_fit_with_an_overhead_by_hand():
    window = plan_first_fit(Listed([3, 9, 1, 1]), 0, 0, 5, 6, 2)
    assert rows_of(window) == [
        [(0, 0, 3)],
        [(1, 1000, 4)],
        [(1, 1004, 4)],
        [(1, 1008, 1), (0, 2000, 1)],
        [(1, 3000, 1)],
    ]


def test_concat_without_an_overhead_is_the_same_row_by_row():
    documents = Listed(np.random.default_rng(4).integers(1, 60, size=200))
    place = (0, 0)
    while (window := plan_concat(documents, *place, 5, 17)).rows:
        again = _concat_pieces(documents, *place, 5, 17, 0)
        assert rows_of(again) == rows_of(window)
        assert again[1:] == window[1:]
        place = window.document, window.offset


def brute_first_fit(lengths, row_length):
    rows = []
    for number, length in enumerate(lengths):
        pieces = [row_length] * (length // row_length)
        pieces += [length % row_length] if length % row_length else []
        start = 0
        for piece in pieces:
            for row in rows:
                if sum(p[2] for p in row) + piece <= row_length:
                    break
            else:
                rows.append(row := [])
            row.append((number % 2, 1000 * number + start, piece))
            start += piece
    return rows


def test_first_fit_against_the_definition():
    lengths = np.random.default_rng(0).integers(1, 60, size=400).tolist()
    window = plan_first_fit(Listed(lengths), 0, 0, 10_000, 40)
    assert rows_of(window) == brute_first_fit(lengths, 40)


@pytest.mark.parametrize("packing", PLANNERS)
@pytest.mark.parametrize("longest", [3, 40, 500])
@pytest.mark.parametrize("overhead", [0, 3, 15])
def test_every_token_once(packing, longest, overhead):
    row_length, rows = 16, 7
    lengths = np.random.default_rng(longest).integers(1, longest + 1, size=300)
    seen = []
    for row in PackedRows(Listed(lengths), packing, rows, row_length, 3, overhead):
        assert 1 <= row.lengths.sum() <= row_length - overhead * len(row.lengths)
        assert row.lengths.min() >= 1
        seen += [s + np.arange(n) for s, n in zip(row.starts, row.lengths, strict=True)]
    wanted = [1000 * i + np.arange(n) for i, n in enumerate(lengths)]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.concatenate(wanted))


@pytest.mark.parametrize("packing", PLANNERS)
def test_padding(packing):
    lengths = np.random.default_rng(1).integers(1, 200, size=2000)
    rows = list(PackedRows(Listed(lengths), packing, 500, 64, seed=0))
    least = -(-int(lengths.sum()) // 64)
    if packing == "concat":
        assert len(rows) == least
        assert sorted(int(r.lengths.sum()) for r in rows)[1:] == [64] * (least - 1)
    else:
        assert least <= len(rows) < 1.03 * least
        # Only documents longer than a row are cut.
        lengths_at = {
            int(s): int(n) for r in rows for s, n in zip(r.starts, r.lengths, strict=True)
        }
        for number, length in enumerate(lengths.tolist()):
            if length <= 64:
                assert lengths_at[1000 * number] == length


@pytest.mark.parametrize("packing", PLANNERS)
def test_tens_of_thousands_of_short_documents_in_a_row(packing):
    """(failures 23) Planned in a moment, and all there."""
    lengths = np.random.default_rng(2).integers(1, 4, size=120_000)
    began = time.perf_counter()
    rows = list(PackedRows(Listed(lengths), packing, 1, 65_536, seed=0))
    assert time.perf_counter() - began < 5
    assert max(len(row.lengths) for row in rows) > 30_000
    assert sum(int(row.lengths.sum()) for row in rows) == lengths.sum()


def test_rows_are_shuffled_inside_windows():
    """Pieces of a long document do not follow one another."""

    def starts_of(seed):
        rows = PackedRows(Listed([900] * 40), "concat", 200, 20, seed)
        return [int(row.starts[0]) for row in rows]

    starts = starts_of(1)
    assert len(starts) == 40 * 45
    following = sum(b - a == 20 for a, b in itertools.pairwise(starts))
    assert following < 30
    assert starts != [
        int(r.starts[0]) for r in PackedRows(Listed([900] * 40), "concat", 200, 20, 2)
    ]


def test_row_order_is_pinned():
    """A change here breaks the resume of every run saved before it."""
    assert row_order(8, 3, 5).tolist() == [0, 6, 2, 1, 3, 4, 7, 5]
    assert not np.array_equal(row_order(100, 3, 5), row_order(100, 3, 6))


@pytest.mark.parametrize("packing", PLANNERS)
def test_state_of_rows(packing):
    lengths = np.random.default_rng(4).integers(1, 90, size=120)
    dataset = PackedRows(Listed(lengths), packing, 5, 32, seed=0)
    iterator = iter(dataset)
    states, rows = [], []
    for row in iterator:
        rows.append(row)
        states.append(iterator.get_state())
    assert len(rows) > 60
    for index in range(0, len(rows) - 1, 7):
        other = iter(dataset)
        other.set_state(states[index])
        assert other.get_state() == states[index]
        for ours, theirs in zip(next(other), rows[index + 1], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    other.set_state(states[-1])
    with pytest.raises(StopIteration):
        next(other)
