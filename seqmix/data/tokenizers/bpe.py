# SPDX-License-Identifier: Apache-2.0
"""Training a byte-level BPE."""

from collections.abc import Iterable

from seqmix.data.errors import DataError
from seqmix.data.tokenizers.huggingface import HuggingFaceTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
MINIMUM_SIZE = 257  # the bytes and the end of a document


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE (the GPT-2 kind) with the `tokenizers` library.

    All 256 bytes are in the vocabulary, so any text encodes, and decodes to itself exactly.

    Args:
        texts: The texts to train on.
        vocabulary_size: Number of ids, the end-of-document token included; at least 257.

    Raises:
        ValueError: vocabulary_size too small.
        DataError: the texts have too few different words for that many tokens.
    """
    if vocabulary_size < MINIMUM_SIZE:
        raise ValueError(
            f"TrainBPE.vocabulary_size must be >= {MINIMUM_SIZE} (256 bytes and the end of a "
            f"document), got {vocabulary_size}"
        )
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocabulary_size:
        raise DataError(
            f"the corpus gives a BPE of {found} tokens at most; TrainBPE.vocabulary_size asks "
            f"for {vocabulary_size}"
        )
    return HuggingFaceTokenizer(tokenizer, END_OF_DOCUMENT, f"bpe-{vocabulary_size}")
