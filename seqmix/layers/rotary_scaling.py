# SPDX-License-Identifier: Apache-2.0
"""How RoPE's frequencies are stretched for contexts longer than those trained on.

A class a method, with the field names of the ``rope_parameters`` of published configs. Each gives
the frequencies of a width and base, and the factor of the rotated channels. None of them depends on
the length of the row: cached keys would otherwise stand under other angles than new ones.
"""

import dataclasses
import math

import numpy as np

from seqmix import config as configs
from seqmix.layers import checks


def plain_frequencies(width: int, base: float) -> np.ndarray:
    """[width / 2] float64 radians per token: ``base**(-2i / width)``."""
    return float(base) ** (-np.arange(0, width, 2) / width)


@configs.configurable("LinearScaling")
@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency divided by ``factor``.

    Attributes:
      factor: how many times longer the context becomes.
    """

    factor: float = 1.0

    def __post_init__(self):
        checks.positive(self, "factor")

    def frequencies(self, width: int, base: float) -> np.ndarray:
        """[width / 2] float64 radians per token."""
        return plain_frequencies(width, base) / self.factor

    @property
    def rotation_factor(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        return 1.0


@configs.configurable("NTKScaling")
@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """NTK-aware scaling: the base grows by ``factor**(width / (width - 2))``.

    The slowest pair is then interpolated by ``factor`` and the fastest stays. With both lengths
    the factor is that of the dynamic method at this length,
    ``factor * length / original_max_position_embeddings - (factor - 1)``. (The dynamic method
    itself changes the base as the row grows, and with it what cached keys mean.)

    Attributes:
      factor: how many times longer the context becomes.
      original_max_position_embeddings: trained length.
      length: length that the dynamic method's base is taken for; at least the trained one.
    """

    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    length: int | None = None

    def __post_init__(self):
        checks.positive(self, "factor")
        checks.at_least(self, 1, "original_max_position_embeddings")
        trained = self.original_max_position_embeddings
        if (trained is None) != (self.length is None):
            raise ValueError(
                "NTKScaling.length and original_max_position_embeddings go together, got "
                f"{self.length} and {trained}"
            )
        if trained is not None:
            checks.at_least(self, trained, "length")

    def frequencies(self, width: int, base: float) -> np.ndarray:
        """[width / 2] float64 radians per token.

        Raises:
          ValueError: the width is 2, for which the method is not defined.
        """
        if width <= 2:
            raise ValueError(f"NTKScaling needs more than 2 rotated channels, got {width}")
        factor = self.factor
        if self.length is not None:
            factor = factor * self.length / self.original_max_position_embeddings - (factor - 1)
        return plain_frequencies(width, base * factor ** (width / (width - 2)))

    @property
    def rotation_factor(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        return 1.0


@configs.configurable("YarnScaling")
@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071), as DeepSeek and transformers compute it.

    A pair that turns more than ``beta_fast`` times within the trained length keeps its frequency,
    one that turns less than ``beta_slow`` times is interpolated by ``factor``, with a linear ramp
    over the pairs between. Rotated queries and keys are multiplied by the attention factor,
    0.1 log(factor) + 1, so that logits grow by its square.

    Attributes:
      factor: how many times longer the context becomes.
      original_max_position_embeddings: trained length.
      beta_fast, beta_slow: turns at the two ends of the ramp.
      attention_factor: instead of the one computed.
      mscale, mscale_all_dim: given both, the attention factor is the quotient
        (0.1 mscale log(factor) + 1) / (0.1 mscale_all_dim log(factor) + 1). MLA also multiplies
        its scale by the square of the denominator.
      truncate: round the ends of the ramp outwards to whole pairs.
    """

    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        checks.positive(self, "factor", "beta_fast", "beta_slow", "attention_factor")
        checks.at_least(self, 1, "original_max_position_embeddings")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YarnScaling.beta_fast must be >= beta_slow, got {self.beta_fast} < "
                f"{self.beta_slow}"
            )

    def frequencies(self, width: int, base: float) -> np.ndarray:
        """[width / 2] float64 radians per token.

        Raises:
          ValueError: the base is not above 1, so that no pair is slower than another.
        """
        if base <= 1:
            raise ValueError(f"YarnScaling needs a rotary_base > 1, got {base}")

        def pair(turns: float) -> float:
            """The pair, a real number, that turns so often within the trained length."""
            wavelength = self.original_max_position_embeddings / turns
            return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        if first == last:
            last += 0.001
        ramp = np.clip((np.arange(width // 2) - first) / (last - first), 0, 1)
        plain = plain_frequencies(width, base)
        return plain * (1 - ramp) + plain / self.factor * ramp

    @property
    def rotation_factor(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def logit_factor(self) -> float:
        """Factor of MLA's scale."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@configs.configurable("Llama3Scaling")
@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: slow pairs interpolated by ``factor``, fast ones kept, a ramp between.

    Attributes:
      factor: how many times longer the context becomes.
      original_max_position_embeddings: trained length.
      low_freq_factor, high_freq_factor: a pair is slow below the first number of turns within the
        trained length, and fast above the second.
    """

    factor: float = 8.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        checks.positive(self, "factor", "low_freq_factor", "high_freq_factor")
        checks.at_least(self, 1, "original_max_position_embeddings")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                "Llama3Scaling.low_freq_factor must be < high_freq_factor, got "
                f"{self.low_freq_factor} >= {self.high_freq_factor}"
            )

    def frequencies(self, width: int, base: float) -> np.ndarray:
        """[width / 2] float64 radians per token."""
        plain = plain_frequencies(width, base)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    @property
    def rotation_factor(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        return 1.0


RotaryScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling
