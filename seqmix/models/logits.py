# SPDX-License-Identifier: Apache-2.0
"""What lies between the head's products and the logits: a factor and a soft cap."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LogitScaling(NamedTuple):
    """logits = c tanh(m z / c) of the head's products z; without a cap, m z.

    Attributes:
      multiplier: m.
      softcap: c, or None.
    """

    multiplier: float = 1.0
    softcap: float | None = None

    def __call__(self, products: jax.Array) -> jax.Array:
        """Logits of the head's products, any shape, float32."""
        logits = products if self.multiplier == 1.0 else self.multiplier * products
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def backward(self, logits: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Gradient with respect to the products, from the logits that they gave and theirs."""
        if self.softcap is not None:
            cotangent = cotangent * (1.0 - jnp.square(logits / self.softcap))
        return cotangent if self.multiplier == 1.0 else self.multiplier * cotangent


UNSCALED = LogitScaling()
