# SPDX-License-Identifier: Apache-2.0
"""Weights w(q . k) of a pair of tokens, and the features whose product they are.

A polynomial of degree two in q . k is the product of finite features (2Mamba, Based), so a chunk
can weigh its pairs from their plain products while the state holds features: the features of a
whole sequence never exist.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Kernel(NamedTuple):
    """w(s) = constant + linear s + square s^2 of s = q . k, coefficients >= 0.

    Attributes:
      constant, linear, square: the coefficients; static, so that the kernel hashes.
    """

    constant: float = 0.0
    linear: float = 1.0
    square: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether w(s) = s, so that tokens are their own features."""
        return self == Kernel()

    def width(self, key_width: int) -> int:
        """Number of features of a token."""
        if self.plain:
            return key_width
        pairs = key_width * (key_width + 1) // 2
        return (
            (1 if self.constant else 0)
            + (key_width if self.linear else 0)
            + (pairs if self.square else 0)
        )

    def weights(self, scores: jax.Array) -> jax.Array:
        """w of products q . k."""
        if self.plain:
            return scores
        return self.constant + scores * (self.linear + self.square * scores)

    def slope(self, scores: jax.Array) -> jax.Array | float:
        """dw/ds of products q . k."""
        if self.plain:
            return 1.0
        return self.linear + (2 * self.square) * scores

    def features(self, x: jax.Array) -> jax.Array:
        """Features of tokens: the product of those of q and k is w(q . k).

        Args:
          x: [..., K].

        Returns:
          [..., width(K)].
        """
        if self.plain:
            return x
        parts = []
        if self.constant:
            parts.append(jnp.full_like(x[..., :1], math.sqrt(self.constant)))
        if self.linear:
            parts.append(x * math.sqrt(self.linear))
        if self.square:
            parts.append(symmetric_square(x) * math.sqrt(self.square))
        return jnp.concatenate(parts, axis=-1)


PLAIN = Kernel()


def symmetric_square(x: jax.Array) -> jax.Array:
    """[..., K] -> [..., K (K + 1) / 2]: the products of all pairs, each once.

    The features' product is (q . k)^2. They are ordered by cyclic distance d = 0, 1, ..., K // 2,
    x_i x_{(i + d) mod K} for every i (the first K / 2 of them at d = K / 2), times sqrt(2) for
    d > 0: whole rows to multiply instead of a gather of the upper triangle.
    """
    width = x.shape[-1]
    twice = jnp.concatenate([x, x], axis=-1)
    parts = [x * x]
    for distance in range(1, width // 2 + 1):
        count = width // 2 if 2 * distance == width else width
        shifted = twice[..., distance : distance + count]
        parts.append(x[..., :count] * shifted * math.sqrt(2))
    return jnp.concatenate(parts, axis=-1)
