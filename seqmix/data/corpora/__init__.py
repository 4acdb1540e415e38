# SPDX-License-Identifier: Apache-2.0
"""Corpora: where documents come from."""

from seqmix.data.corpora.base import SPLITS, Corpus, Document, Source, Split, stable_fraction
from seqmix.data.corpora.huggingface import HuggingFaceCorpus
from seqmix.data.corpora.jsonl import JsonlCorpus
from seqmix.data.corpora.parquet import ParquetCorpus
from seqmix.data.corpora.stdlib import StdlibCorpus
from seqmix.data.corpora.text import FileCorpus, TextCorpus

__all__ = [
    "SPLITS",
    "Corpus",
    "Document",
    "FileCorpus",
    "HuggingFaceCorpus",
    "JsonlCorpus",
    "ParquetCorpus",
    "Source",
    "Split",
    "StdlibCorpus",
    "TextCorpus",
    "stable_fraction",
]
