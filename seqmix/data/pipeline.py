# SPDX-License-Identifier: Apache-2.0
"""The Grain pipeline: documents in shuffled order, mixed, packed into rows, batched.

Every process plans the whole stream of rows, on lengths (see `packing`), and reads the tokens of
its own rows only: global batch b is rows [b * batch, (b + 1) * batch) of one stream, and process
p of n takes the p-th of n equal parts of it. So neither the order of the documents nor the state
of an iterator depends on the number of processes: a run saved on four goes on on two.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from seqmix.data.errors import DataError
from seqmix.data.order import derived_seed, mixed, shuffled
from seqmix.data.packing import EMPTY_ROW, PackedRows, Packing, Spans
from seqmix.data.store import TokenStore
from seqmix.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]


class DocumentStream:
    """The documents of some stores in the order in which they are packed."""

    def __init__(
        self, stores: Sequence[TokenStore], weights: Sequence[float], seed: int, repeat: bool
    ):
        """Orders the documents.

        Args:
            stores: The stores; each has a document.
            weights: Share of the tokens that should come from each store. Empty: all stores
                together are one corpus, of which every document comes once an epoch. With
                weights, each store has epochs of its own.
            seed: Of the shuffles; each epoch has another order.
            repeat: Begin again for ever; otherwise one epoch, without weights.
        """
        self._stores = stores
        self._first = np.cumsum([0, *map(len, stores)])
        self._seed = seed
        self._length = None if repeat else int(self._first[-1])
        # A share of tokens is a share of documents over their mean length.
        self._shares = [
            weight * len(store) / store.info.tokens
            for weight, store in zip(weights, stores, strict=bool(weights))
        ]

    def spans(self, start: int, count: int) -> Spans:
        """Documents [start, start + count) of the stream; fewer, or none, where it ends."""
        if self._length is not None:
            count = max(0, min(count, self._length - start))
        indices = np.arange(start, start + count)
        owners, documents = self._mixed(indices) if self._shares else self._joined(indices)
        starts, lengths = np.empty_like(indices), np.empty_like(indices)
        for number in np.unique(owners).tolist():
            chosen = owners == number
            offsets = self._stores[number].offsets
            starts[chosen] = offsets[documents[chosen]]
            lengths[chosen] = offsets[documents[chosen] + 1] - starts[chosen]
        return Spans(owners, starts, lengths)

    def _joined(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seed = derived_seed(self._seed, "shuffle")
        everywhere = shuffled(indices, int(self._first[-1]), seed)
        owners = np.searchsorted(self._first, everywhere, side="right") - 1
        return owners, everywhere - self._first[owners]

    def _mixed(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        owners, documents = mixed(indices, self._shares)
        for number, store in enumerate(self._stores):
            chosen = owners == number
            seed = derived_seed(self._seed, "shuffle", number)
            documents[chosen] = shuffled(documents[chosen], len(store), seed)
        return owners, documents


def read_rows(
    rows: Sequence[Spans],
    row_length: int,
    stores: Sequence[TokenStore],
    meta_ids: range = range(0),
) -> Batch:
    """Reads the tokens of rows.

    Args:
        rows: The rows: their pieces from left to right.
        row_length: Tokens in a row, padding included.
        stores: The stores that the rows speak of.
        meta_ids: Ids that every piece begins with.

    Returns:
        `tokens`, `segment_ids` (1, 2, ... along a row; 0 is padding) and `positions` (from 0 in
        each segment), int32 [rows, row_length]; padding is 0 in all three.
    """
    pieces = np.array([len(row.lengths) for row in rows])
    owners, starts, lengths = (np.concatenate(column) for column in zip(*rows, strict=True))
    lengths = lengths + len(meta_ids)
    segments = np.arange(len(lengths)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + 1
    begins = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    places = np.repeat(starts, lengths) + within - len(meta_ids)
    tokens = within.astype(np.int32) + meta_ids.start
    owner_of_token = np.where(within < len(meta_ids), -1, np.repeat(owners, lengths))
    for number in np.unique(owners).tolist():
        chosen = owner_of_token == number
        tokens[chosen] = stores[number].gather(places[chosen])
    row_tokens = np.array([row.lengths.sum() for row in rows], np.int64)
    row_tokens += len(meta_ids) * pieces
    real = np.arange(row_length) < row_tokens[:, None]
    batch = {}
    for name, values in (
        ("tokens", tokens),
        ("segment_ids", np.repeat(segments, lengths)),
        ("positions", within),
    ):
        batch[name] = np.zeros((len(rows), row_length), np.int32)
        batch[name][real] = values
    return batch


@dataclasses.dataclass(frozen=True)
class PackedDataset:
    """Batches of packed rows; iterating gives a `BatchIterator`.

    Attributes:
        tokenizer: What the tokens are tokens of.
        stores: The stores of the corpora, one each.
        batch_size: Rows of the global batch; a process gets `batch_size / process_count` of them.
        sequence_length: T: rows have T + 1 tokens, inputs and labels being T of them.
        packing: "concat" or "first_fit".
        window_tokens: Tokens that are packed, and whose rows are shuffled, together.
        weights: Shares of tokens; empty: every document once an epoch.
        seed: Of the order.
        repeat: For ever, or one pass with the last batch padded with empty rows.
        process_index: This process.
        process_count: Number of processes.
        prefetch: Batches a thread makes ahead; 0: no thread.
        meta_ids: Ids that every segment begins with.
    """

    tokenizer: Tokenizer
    stores: tuple[TokenStore, ...]
    batch_size: int
    sequence_length: int
    packing: Packing
    window_tokens: int
    weights: tuple[float, ...]
    seed: int
    repeat: bool
    process_index: int = 0
    process_count: int = 1
    prefetch: int = 0
    meta_ids: range = range(0)

    @property
    def documents(self) -> int:
        """Number of documents in an epoch."""
        return sum(len(store) for store in self.stores)

    @property
    def tokens(self) -> int:
        """Number of tokens in an epoch, end-of-document tokens included, meta tokens not."""
        return sum(store.info.tokens for store in self.stores)

    @property
    def bytes(self) -> int:
        """Bytes of text in an epoch."""
        return sum(store.info.bytes for store in self.stores)

    @property
    def identity(self) -> dict[str, Any]:
        """All that the order of the rows depends on (batch and processes are not among it)."""
        return {
            "vocabulary_size": self.tokenizer.vocabulary_size,
            "corpora": [store.info.digest[:16] for store in self.stores],
            "sequence_length": self.sequence_length,
            "packing": self.packing,
            "packing_window": self.window_tokens,
            "weights": list(self.weights),
            "seed": self.seed,
            "repeat": self.repeat,
            "meta_tokens": len(self.meta_ids),
        }

    def __iter__(self) -> "BatchIterator":
        row_length = self.sequence_length + 1
        rows = PackedRows(
            DocumentStream(self.stores, self.weights, self.seed, self.repeat),
            self.packing,
            max(1, self.window_tokens // row_length),
            row_length,
            derived_seed(self.seed, "rows"),
            len(self.meta_ids),
        )
        batches = rows.batch(self.batch_size, batch_fn=self._read)
        batches = grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=self.prefetch
        )
        return BatchIterator(iter(batches), self.identity)

    def _read(self, rows: Sequence[Spans]) -> Batch:
        """This process's part of a global batch, filled up with empty rows."""
        padded = [*rows, *[EMPTY_ROW] * (self.batch_size - len(rows))]
        share = self.batch_size // self.process_count
        own = padded[self.process_index * share :][:share]
        return read_rows(own, self.sequence_length + 1, self.stores, self.meta_ids)


class BatchIterator:
    """Iterator of batches whose place can be saved and restored exactly.

    A batch is a dict of int32 arrays [rows, T + 1]: `tokens`, `segment_ids`, `positions`. Inputs
    are [:, :-1] and labels [:, 1:]; a label counts where its segment id is that of its input and
    not 0.
    """

    def __init__(self, iterator: grain.DatasetIterator, identity: dict[str, Any]):
        # Grain's iterator is kept in a list of its own, so that it can be closed and let go at the
        # exit of the interpreter, while the modules that its destructor needs are still there.
        self._held = [iterator]
        self._identity = identity
        self._close = weakref.finalize(self, _close_all, self._held)

    @property
    def _iterator(self) -> grain.DatasetIterator:
        if not self._held:
            raise ValueError("the iterator is closed")
        return self._held[0]

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The place after the batches taken so far: JSON-able, well under a kilobyte.

        It is the same on every process, and holds on any number of them.
        """
        return {"position": dict(self._iterator.get_state()), "data": dict(self._identity)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place that `get_state` gave, in this process or another.

        Raises:
            DataError: the state is of other data, or of other settings, named.
        """
        saved = {"meta_tokens": 0} | state.get("data", {})
        for name, value in self._identity.items():
            if saved.get(name) != value:
                raise DataError(
                    f"the saved place in the data does not fit: {name} was {saved.get(name)!r} "
                    f"and is {value!r}"
                )
        self._iterator.set_state(state["position"])

    def close(self) -> None:
        """Ends the prefetch thread; the iterator gives nothing more."""
        self._close()


def _close_all(iterators: list[grain.DatasetIterator]) -> None:
    while iterators:
        iterators.pop().close()
