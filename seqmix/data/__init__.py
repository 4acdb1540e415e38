# SPDX-License-Identifier: Apache-2.0
"""Data: corpora, tokenizers, the token store, packing and the input pipeline.

`build(DataConfig(...), split="train", batch_size=16)` gives an iterable of batches.
"""

from seqmix.data.bigram import bigram_bits_per_byte, count_bigrams
from seqmix.data.config import (
    ByteTokenizerConfig,
    DataConfig,
    TokenizerConfig,
    TokenizerFile,
    TrainBPE,
    bigram_baseline,
    build,
    build_tokenizer,
)
from seqmix.data.corpora import (
    Corpus,
    Document,
    HuggingFaceCorpus,
    JsonlCorpus,
    ParquetCorpus,
    StdlibCorpus,
    TextCorpus,
)
from seqmix.data.errors import DataError
from seqmix.data.pipeline import Batch, BatchIterator, PackedDataset
from seqmix.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

__all__ = [
    "Batch",
    "BatchIterator",
    "ByteTokenizer",
    "ByteTokenizerConfig",
    "Corpus",
    "DataConfig",
    "DataError",
    "Document",
    "HuggingFaceCorpus",
    "HuggingFaceTokenizer",
    "JsonlCorpus",
    "PackedDataset",
    "ParquetCorpus",
    "StdlibCorpus",
    "TextCorpus",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerFile",
    "TrainBPE",
    "bigram_baseline",
    "bigram_bits_per_byte",
    "build",
    "build_tokenizer",
    "count_bigrams",
    "load_tokenizer",
    "train_bpe",
]
