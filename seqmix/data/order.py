# SPDX-License-Identifier: Apache-2.0
"""The order of documents: shuffled anew each epoch, mixed by weight, computed and never stored.

Document number i of an endless stream is a function of i, so a place in the stream is one integer.
Grain's shuffle and mix have this property too but go through Python once a document (some 16
microseconds on one core); these work on arrays (less than one), which lets every process of a
cluster plan the whole stream, and keeps rows of tens of thousands of short documents cheap.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

_ROUNDS = 6
_SHARES = 1 << 20  # resolution of mixing weights


def derived_seed(seed: int, *purpose: str | int) -> int:
    """A 64-bit seed for one purpose, unrelated to those of other purposes and other seeds."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def shuffled(indices: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Elements of the endless shuffled repetition of range(size).

    Each epoch, indices [e * size, (e + 1) * size), is a permutation of its own: a Feistel network
    on the smallest even number of bits that holds `size`, applied again while the result is
    outside of the range (M. Luby and C. Rackoff, "How to construct pseudorandom permutations from
    pseudorandom functions", 1988; J. Black and P. Rogaway, "Ciphers with arbitrary finite
    domains", 2002).

    Args:
        indices: int64 [n], not negative.
        size: Number of elements, positive.
        seed: In [0, 2**64).

    Returns:
        int64 [n], in [0, size).
    """
    epochs, values = np.divmod(indices.astype(np.uint64), np.uint64(size))
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    # One key an epoch and round.
    epoch_keys = _mix(_mix(np.full(1, seed, np.uint64)) + epochs)
    keys = [_mix(epoch_keys + np.uint64(number)) for number in range(1, _ROUNDS + 1)]
    walking = np.arange(len(values))
    while len(walking):
        left, right = values[walking] >> half, values[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key[walking]) & mask)
        values[walking] = (left << half) | right
        walking = walking[values[walking] >= size]
    return values.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """A good 64-bit hash: the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mixed(indices: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Which part each element of an endless mixture comes from, and its number in that part.

    The parts are interleaved as evenly as their shares allow: of the first n elements, part k has
    n * share_k to within one for every part before it. The first part takes its share of all, the
    second its share of the rest, and so on; part k takes an element where the count of the rest
    does not grow.

    Args:
        indices: int64 [n], in [0, 2**42).
        weights: Positive, in any scale; shares are rounded to 2**-20.

    Returns:
        Part and number in it, int64 [n] each.
    """
    total = float(sum(weights))
    shares = [max(1, round(weight / total * _SHARES)) for weight in weights]
    parts = np.zeros_like(indices)
    numbers = np.zeros_like(indices)
    open_ = np.ones(len(indices), bool)
    before, after = indices, indices + 1  # elements not yet taken, before and with this one
    remaining = sum(shares)
    for part, share in enumerate(shares):
        rest_before = before * (remaining - share) // remaining
        rest_after = after * (remaining - share) // remaining
        here = open_ & (rest_before == rest_after)
        parts[here] = part
        numbers[here] = (before - rest_before)[here]
        open_ &= ~here
        before, after, remaining = rest_before, rest_after, remaining - share
    return parts, numbers
