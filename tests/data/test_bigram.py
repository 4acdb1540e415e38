# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math

import numpy as np
import pytest

from seqmix.data import TrainBPE, bigram_baseline, bigram_bits_per_byte, count_bigrams


def by_hand(train, validation, alpha):
    """The same model symbol by symbol."""
    follows = {}
    for document in train:
        for a, b in zip(document, [*document[1:], 256], strict=True):
            follows.setdefault(a, []).append(b)
    bits, size = 0.0, 0
    for document in validation:
        for a, b in zip(document, [*document[1:], 256], strict=True):
            seen = follows.get(a, [])
            bits -= math.log2((seen.count(b) + alpha) / (len(seen) + 257 * alpha))
            size += b != 256
    return bits / size


def test_counts():
    counts = count_bigrams([b"aba", b"", b"b"])
    wanted = np.zeros((257, 257), int)
    for a, b in ((256, 97), (97, 98), (98, 97), (97, 256), (256, 256), (256, 98), (98, 256)):
        wanted[a, b] += 1
    np.testing.assert_array_equal(counts, wanted)
    assert count_bigrams([]).sum() == 0


@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_bits_per_byte(alpha):
    train, validation = [b"abracadabra", b"banana"], [b"bandana", "é".encode(), b"x"]
    got = bigram_bits_per_byte(count_bigrams(train), count_bigrams(validation), alpha)
    assert got == pytest.approx(by_hand(train, validation, alpha), rel=1e-12)


def test_untrained_model_is_uniform():
    counts = count_bigrams([b"abc"])
    got = bigram_bits_per_byte(np.zeros((257, 257), int), counts)
    assert got == pytest.approx(3 * math.log2(257) / 2)


def test_errors():
    counts = count_bigrams([b"abc"])
    with pytest.raises(ValueError, match="alpha must be positive, got 0"):
        bigram_bits_per_byte(counts, counts, alpha=0)
    with pytest.raises(ValueError, match="no validation document has two bytes"):
        bigram_bits_per_byte(counts, count_bigrams([b"a"]))


def test_baseline_of_the_data(data):
    documents = {"train": [], "validation": []}
    for split, document in data.corpora[0].documents():
        documents[split].append(document.text.encode())
    expected = by_hand(documents["train"], documents["validation"], 1.0)
    assert bigram_baseline(data) == pytest.approx(expected, rel=1e-9)
    # On bytes, whatever the tokenizer.
    bpe = dataclasses.replace(data, tokenizer=TrainBPE(vocabulary_size=300))
    assert bigram_baseline(bpe) == pytest.approx(expected, rel=1e-9)
