# SPDX-License-Identifier: Apache-2.0
"""Packing documents into rows: which piece of which document stands where, on lengths alone.

Nothing here reads a token, so planning costs about a microsecond a document, and every process of
a cluster can plan the whole stream and then read only its own rows. (Grain's own packing works on
the tokens themselves, and its concatenation saves no place inside a window of shuffled rows.)

The stream of documents is cut into windows of a fixed number of rows' worth of tokens. A window
is planned as a whole, its rows are put in a random order (neighbouring pieces of one long document
would otherwise fill a whole batch), and the next window follows. The place in the stream is the
start of the window and the rows of it already given, four integers.

Where a model begins every segment with meta tokens, a piece takes that many tokens more of its row
than it has: the planners' `overhead`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import grain
import numpy as np

Packing = Literal["concat", "first_fit"]

_CHUNK = 1024  # documents that are looked up together


class Spans(NamedTuple):
    """Documents, or pieces of documents, in order: int64 [n] each.

    Attributes:
        stores: The store of each.
        starts: Its first place in the store.
        lengths: Its length in tokens, at least 1.
    """

    stores: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def part(self, start: int, stop: int) -> "Spans":
        """Those from `start` up to, not including, `stop`."""
        return Spans(*(column[start:stop] for column in self))


EMPTY_ROW = Spans(*(np.zeros(0, np.int64) for _ in range(3)))


class Documents(Protocol):
    """The order in which documents come, and where each one lies."""

    def spans(self, start: int, count: int) -> Spans:
        """Documents [start, start + count) of the stream; fewer, or none, where it ends."""


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the stream of rows.

    Attributes:
        window: Number of the current window.
        document: The stream's document at which the window begins.
        offset: Tokens of that document that earlier windows took.
        row: Rows of the window already given.
    """

    window: int = 0
    document: int = 0
    offset: int = 0
    row: int = 0


class Window(NamedTuple):
    """The rows of a window in order, and the document and offset where the next one begins."""

    rows: list[Spans]
    document: int
    offset: int


def plan_concat(
    documents: Documents,
    document: int,
    offset: int,
    rows: int,
    row_length: int,
    overhead: int = 0,
) -> Window:
    """Concatenates documents and cuts the stream into rows; only the very last row has padding.

    A document cut at the end of a row goes on in the next one as a new segment. With an overhead a
    row also has padding where no token beyond that of another piece fits.

    Args:
        documents: The stream.
        document: Where the window begins.
        offset: Tokens of that document to leave out.
        rows: Rows in a window.
        row_length: Tokens in a row.
        overhead: Tokens of a row that each piece takes besides its own, fewer than the row's.
    """
    if overhead:
        return _concat_pieces(documents, document, offset, rows, row_length, overhead)
    wanted = rows * row_length
    stores, starts, lengths = _take(documents, document, wanted + offset)
    if not len(lengths):
        return Window([], document, 0)
    starts[0] += offset
    lengths[0] -= offset
    total = int(lengths.sum())
    document += len(lengths)
    next_offset = 0
    if total > wanted:  # the last document goes on in the next window
        document -= 1
        left = int(lengths[-1]) - (total - wanted)
        next_offset = left + (offset if len(lengths) == 1 else 0)
        total = wanted
    begins = np.cumsum(lengths) - lengths
    cuts = np.union1d(begins, np.arange(0, total, row_length))
    owner = np.searchsorted(begins, cuts, side="right") - 1
    pieces = Spans(stores[owner], starts[owner] + cuts - begins[owner], np.diff(cuts, append=total))
    bounds = np.searchsorted(cuts, np.arange(0, total + row_length, row_length))
    return Window(_rows(pieces, bounds), document, next_offset)


def _concat_pieces(documents, document, offset, rows, row_length, overhead):
    """`plan_concat` row by row: what an overhead adds depends on where the rows end."""
    # Enough: a row holds fewer tokens of documents than it is long.
    stores, starts, lengths = _take(documents, document, rows * row_length + offset)
    ends = np.cumsum(lengths + overhead)  # if no document were cut
    planned: list[Spans] = []
    first = 0
    while len(planned) < rows and first < len(lengths):
        limit = ends[first] - lengths[first] - overhead + offset + row_length
        # The last document that has room for a token of its own.
        last = min(int(np.searchsorted(ends, limit - overhead)), len(lengths) - 1)
        row = Spans(*(column[first : last + 1].copy() for column in (stores, starts, lengths)))
        row.starts[0] += offset
        row.lengths[0] -= offset
        surplus = max(0, int(row.lengths.sum()) + overhead * len(row.lengths) - row_length)
        row.lengths[-1] -= surplus
        planned.append(row)
        offset = int(lengths[last]) - surplus if surplus else 0
        first = last if surplus else last + 1
    return Window(planned, document + first, offset if planned else 0)


def plan_first_fit(
    documents: Documents,
    document: int,
    offset: int,
    rows: int,
    row_length: int,
    overhead: int = 0,
) -> Window:
    """Puts each document into the first row of the window with room for it.

    Only documents longer than a row are cut, into rows and a rest. Documents are taken until they
    hold `rows` rows' worth of tokens; the number of rows they need varies.

    Args:
        documents: The stream.
        document: Where the window begins.
        offset: 0: windows end between documents here.
        rows: Rows' worth of tokens in a window.
        row_length: Tokens in a row.
        overhead: Tokens of a row that each piece takes besides its own, fewer than the row's.
    """
    if offset:
        raise ValueError(f"first-fit windows begin with a document, got offset {offset}")
    taken = _take(documents, document, rows * row_length)
    if not len(taken.lengths):
        return Window([], document, 0)
    pieces = _split(taken, row_length - overhead)
    places = _first_fit((pieces.lengths + overhead).tolist(), row_length)
    order = np.argsort(places, kind="stable")
    bounds = np.searchsorted(places[order], np.arange(places.max() + 2))
    pieces = Spans(*(column[order] for column in pieces))
    return Window(_rows(pieces, bounds), document + len(taken.lengths), 0)


def _take(documents: Documents, document: int, tokens: int) -> Spans:
    """The fewest documents from `document` on that hold that many tokens; all where it ends."""
    chunks = [EMPTY_ROW]
    total = 0
    while total < tokens:
        chunk = documents.spans(document, _CHUNK)
        if not len(chunk.lengths):
            break
        totals = total + np.cumsum(chunk.lengths)
        chunk = chunk.part(0, int(np.searchsorted(totals, tokens)) + 1)
        chunks.append(chunk)
        total += int(chunk.lengths.sum())
        document += len(chunk.lengths)
    return Spans(*map(np.concatenate, zip(*chunks, strict=True)))


def _split(spans: Spans, limit: int) -> Spans:
    """Cuts spans longer than `limit` into pieces of that length and a rest."""
    counts = -(-spans.lengths // limit)
    first = np.cumsum(counts) - counts
    begins = (np.arange(counts.sum()) - np.repeat(first, counts)) * limit
    return Spans(
        np.repeat(spans.stores, counts),
        np.repeat(spans.starts, counts) + begins,
        np.minimum(np.repeat(spans.lengths, counts) - begins, limit),
    )


def _first_fit(lengths: Sequence[int], row_length: int) -> np.ndarray:
    """The row of each piece, int64 [pieces]: the first with room for it, a new one if none has."""
    places = np.empty(len(lengths), np.int64)
    room = np.zeros(64, np.int64)  # of each row; 0 for those not begun
    used = 0  # rows begun
    first_open = 0  # every row before this one is full
    for number, length in enumerate(lengths):
        # Short pieces nearly always go into the first open row: no need to search.
        if first_open < used and room[first_open] >= length:
            place = first_open
        else:
            fits = room[first_open:used] >= length
            place = first_open + int(fits.argmax()) if fits.any() else used
        if place == used:
            if used == len(room):
                room = np.concatenate([room, np.zeros_like(room)])
            room[used] = row_length
            used += 1
        places[number] = place
        room[place] -= length
        while first_open < used and not room[first_open]:
            first_open += 1
    return places


def _rows(pieces: Spans, bounds: np.ndarray) -> list[Spans]:
    limits = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return [pieces.part(start, stop) for start, stop in limits]


_PLANNERS = {"concat": plan_concat, "first_fit": plan_first_fit}


def row_order(rows: int, seed: int, window: int) -> np.ndarray:
    """A random order of the rows of a window, int64 [rows].

    Made of the raw output of a counter-based generator, which NumPy keeps the same in every
    version, as it does not do for `permutation`.
    """
    generator = np.random.Philox(key=np.array([seed, window], np.uint64))
    return np.argsort(generator.random_raw(rows), kind="stable")


class PackedRows(grain.IterDataset):
    """Grain dataset of rows: the `Spans` of their pieces, from left to right."""

    def __init__(
        self,
        documents: Documents,
        packing: Packing,
        window_rows: int,
        row_length: int,
        seed: int,
        overhead: int = 0,
    ):
        """Packs documents.

        Args:
            documents: The stream.
            packing: How ("concat", "first_fit").
            window_rows: Rows' worth of tokens that are planned, and shuffled, together.
            row_length: Tokens in a row.
            seed: Of the order of rows inside windows, in [0, 2**64).
            overhead: Tokens of a row that each piece takes besides its own.
        """
        super().__init__()
        planner: Callable[..., Window] = _PLANNERS[packing]
        self._seed = seed
        self._plan = lambda position: planner(
            documents, position.document, position.offset, window_rows, row_length, overhead
        )

    def __iter__(self) -> "PackedRowsIterator":
        return PackedRowsIterator(self._plan, self._seed)


class PackedRowsIterator(grain.DatasetIterator):
    """Iterator of `PackedRows`; its state is the four integers of a `Position`."""

    def __init__(self, plan: Callable[[Position], Window], seed: int):
        super().__init__()
        self._plan = plan
        self._seed = seed
        self._position = Position()
        self._window: Window | None = None
        self._order: list[int] = []

    def __next__(self) -> Spans:
        self._assert_not_closed()
        position = self._position
        window = self._window or self._load(position)
        if window.rows and position.row == len(window.rows):
            position = Position(position.window + 1, window.document, window.offset)
            window = self._load(position)
        if not window.rows:
            raise StopIteration
        row = window.rows[self._order[position.row]]
        self._position = dataclasses.replace(position, row=position.row + 1)
        return row

    def _load(self, position: Position) -> Window:
        self._window = self._plan(position)
        self._order = row_order(len(self._window.rows), self._seed, position.window).tolist()
        return self._window

    def get_state(self) -> dict[str, Any]:
        """The position as a dict of four integers."""
        return dataclasses.asdict(self._position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` gave."""
        self._position = Position(**state)
        self._window = None
