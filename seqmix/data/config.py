# SPDX-License-Identifier: Apache-2.0
"""The settings of the data, and datasets built from them."""

import abc
import dataclasses
import itertools
import math
from typing import override

from seqmix import config
from seqmix.data import cache
from seqmix.data.bigram import bigram_bits_per_byte
from seqmix.data.corpora import Corpus, Split, StdlibCorpus
from seqmix.data.errors import DataError
from seqmix.data.packing import Packing
from seqmix.data.pipeline import PackedDataset
from seqmix.data.store import TokenStore
from seqmix.data.store_writer import token_store
from seqmix.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

# The order of an evaluation is not that of a training run: the same documents come first under
# every training seed.
_EVALUATION_SEED = 0


class TokenizerConfig(abc.ABC):
    """Base class of the configs that name a tokenizer."""

    @abc.abstractmethod
    def build(self, data: "DataConfig") -> Tokenizer:
        """The tokenizer, for that data."""


@config.configurable()
@dataclasses.dataclass(frozen=True)
class ByteTokenizerConfig(TokenizerConfig):
    """One token a byte (257 ids)."""

    @override
    def build(self, data: "DataConfig") -> Tokenizer:
        del data
        return ByteTokenizer()


@config.configurable()
@dataclasses.dataclass(frozen=True)
class TokenizerFile(TokenizerConfig):
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    Attributes:
        path: The file, or a folder that holds `tokenizer.json`.
        end_of_document: The token that ends a document; None: found in the file.
    """

    path: str
    end_of_document: str | None = None

    @override
    def build(self, data: "DataConfig") -> Tokenizer:
        del data
        return HuggingFaceTokenizer.from_file(self.path, self.end_of_document)


@config.configurable()
@dataclasses.dataclass(frozen=True)
class TrainBPE(TokenizerConfig):
    """A byte-level BPE trained on the training documents of the corpora, once.

    Attributes:
        vocabulary_size: Number of ids, at least 257.
        max_bytes: Train on this many bytes of each corpus at most.
    """

    vocabulary_size: int = 4096
    max_bytes: int = 100_000_000

    def __post_init__(self) -> None:
        if self.vocabulary_size < 257:
            raise ValueError(
                f"TrainBPE.vocabulary_size must be >= 257 (256 bytes and the end of a document), "
                f"got {self.vocabulary_size}"
            )
        if self.max_bytes < 1:
            raise ValueError(f"TrainBPE.max_bytes must be >= 1, got {self.max_bytes}")

    @override
    def build(self, data: "DataConfig") -> Tokenizer:
        key = cache.fingerprint(
            {
                "corpora": [corpus.key() for corpus in data.corpora],
                "vocabulary_size": self.vocabulary_size,
                "max_bytes": self.max_bytes,
            }
        )
        folder = cache.cache_dir(data.cache_dir) / "tokenizers" / f"bpe-{key[:20]}"
        texts = itertools.chain.from_iterable(map(self._texts, data.corpora))
        return load_tokenizer(
            cache.build_once(folder, lambda path: train_bpe(texts, self.vocabulary_size).save(path))
        )

    def _texts(self, corpus: Corpus):
        size = 0
        for split, document in corpus.documents():
            if split == "train" and size < self.max_bytes:
                size += len(document.text.encode())
                yield document.text
            elif size >= self.max_bytes:
                return


@config.configurable("Data")
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a model is trained on.

    Attributes:
        corpora: The corpora.
        weights: Share of the training tokens from each corpus, in any scale. Empty: all corpora
            are one, of which every document comes once an epoch.
        tokenizer: The tokenizer.
        sequence_length: T, tokens a row that the model reads; rows hold one more, for the labels.
        packing: "concat": documents one after another, cut at the end of a row, no padding;
            "first_fit": each document in the first row with room for it, cut only if longer than
            a row, the rest of the row padding. In both a cut document goes on in another row as a
            segment of its own, with positions from 0.
        packing_window: Tokens that are packed, and whose rows are shuffled, together. A larger
            window mixes documents better; after a resume one window is planned again.
        seed: Of the order of documents and rows.
        meta_tokens: Ids above the vocabulary that every segment begins with, as many as the model's
            `HybridLM.meta_tokens`; they are among a row's tokens.
        cache_dir: Folder for token stores and trained tokenizers; None: `$SEQMIX_CACHE`, else
            `~/.cache/seqmix`.
        prefetch: Batches that a thread makes ahead; 0: no thread.
    """

    corpora: tuple[Corpus, ...] = (StdlibCorpus(),)
    weights: tuple[float, ...] = ()
    tokenizer: TokenizerConfig = ByteTokenizerConfig()
    sequence_length: int = 256
    packing: Packing = "concat"
    packing_window: int = 1 << 20
    seed: int = 0
    meta_tokens: int = 0
    cache_dir: str | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not self.corpora:
            raise ValueError("Data.corpora is empty: name at least one corpus")
        if self.weights and len(self.weights) != len(self.corpora):
            raise ValueError(
                f"Data.weights must have one weight for each of the {len(self.corpora)} corpora, "
                f"got {len(self.weights)}"
            )
        for weight in self.weights:
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"Data.weights must be positive, got {weight}")
        for name, least in (
            ("sequence_length", 1),
            ("packing_window", 1),
            ("seed", 0),
            ("meta_tokens", 0),
            ("prefetch", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"Data.{name} must be >= {least}, got {getattr(self, name)}")
        if self.sequence_length <= self.meta_tokens:
            raise ValueError(
                f"Data.sequence_length must exceed Data.meta_tokens = {self.meta_tokens}, "
                f"got {self.sequence_length}"
            )


def build_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer of a data config; trained first, if it asks for that.

    Raises:
        DataError: the tokenizer file or a corpus to train on cannot be used.
    """
    return data.tokenizer.build(data)


def open_stores(data: DataConfig, tokenizer: Tokenizer, split: Split) -> tuple[TokenStore, ...]:
    """The stores of the corpora that have documents in a split, built first where missing.

    Raises:
        DataError: a corpus cannot be used, a store is damaged, or the split has no document.
    """
    folder = cache.cache_dir(data.cache_dir)
    stores = []
    for corpus in data.corpora:
        store = TokenStore(token_store(corpus, tokenizer, folder), split)
        # A corpus without validation documents is fine; one without training documents is not.
        if len(store):
            stores.append(store)
        elif split == "train":
            raise DataError(f"the corpus {corpus.label!r} has no training document")
    if not stores:
        names = ", ".join(repr(corpus.label) for corpus in data.corpora)
        raise DataError(
            f"no validation document in {names}: too few documents for validation_fraction; "
            "raise it, or name validation files"
        )
    return tuple(stores)


def build(
    data: DataConfig,
    *,
    split: Split = "train",
    batch_size: int,
    seed: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    one_pass: bool | None = None,
    vocabulary: int | None = None,
) -> PackedDataset:
    """Builds a dataset of packed batches; tokenises the corpora first if that is not done yet.

    Args:
        data: The settings.
        split: "train" or "validation".
        batch_size: Rows of the global batch, a multiple of `process_count`.
        seed: Of the order; None: `data.seed`. Not used in one pass.
        process_index: This process.
        process_count: Number of processes; each gets `batch_size / process_count` rows a batch.
        one_pass: Every document once, in an order that does not depend on the seed, the last batch
            filled with rows of segment 0; otherwise for ever. None: for validation.
        vocabulary: The model's, at which the ids of meta tokens begin; None: the tokenizer's.

    Returns:
        An iterable; its iterators have `get_state` and `set_state`.

    Raises:
        ValueError: batch_size, process_index or process_count do not go together.
        DataError: see `open_stores`.
    """
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size must be a positive multiple of process_count={process_count}, "
            f"got {batch_size}"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index must be in [0, process_count={process_count}), got {process_index}"
        )
    one_pass = split == "validation" if one_pass is None else one_pass
    tokenizer = build_tokenizer(data)
    first = tokenizer.vocabulary_size if vocabulary is None else vocabulary
    return PackedDataset(
        tokenizer=tokenizer,
        stores=open_stores(data, tokenizer, split),
        batch_size=batch_size,
        sequence_length=data.sequence_length,
        packing=data.packing,
        window_tokens=data.packing_window,
        weights=() if one_pass else data.weights,
        seed=_EVALUATION_SEED if one_pass else (data.seed if seed is None else seed),
        repeat=not one_pass,
        process_index=process_index,
        process_count=process_count,
        prefetch=data.prefetch,
        meta_ids=range(first, first + data.meta_tokens),
    )


def bigram_baseline(data: DataConfig, alpha: float = 1.0) -> float:
    """Bits per byte, on the validation documents, of a bigram byte model of the training documents.

    Args:
        data: The settings; the tokenizer does not change the result.
        alpha: Added to every count (see `bigram`).

    Raises:
        DataError: see `open_stores`.
    """
    tokenizer = build_tokenizer(data)
    train, validation = (
        sum(store.bigrams() for store in open_stores(data, tokenizer, split))
        for split in ("train", "validation")
    )
    return bigram_bits_per_byte(train, validation, alpha)
