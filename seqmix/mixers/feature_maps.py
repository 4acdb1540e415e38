# SPDX-License-Identifier: Apache-2.0
"""Feature maps of linear attention: [..., K] to [..., F], computed in float32.

Products of features stand in for the exponential of a product of queries and keys. A normaliser
needs maps that are not negative; `identity` needs a norm on the output instead.
"""

import math

import jax
import jax.numpy as jnp

from seqmix.mixers._kernels import Kernel
from seqmix.mixers._numerics import contract, state_dtype


def elu_plus_one(x: jax.Array) -> jax.Array:
    """elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236): exp(x) below 0, x + 1 above.

    Written without the subtraction of 1 that elu makes first, so it does not vanish for negative x.
    """
    x = _wide(x)
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0)."""
    return jax.nn.relu(_wide(x))


def identity(x: jax.Array) -> jax.Array:
    """x itself."""
    return x


def taylor(x: jax.Array) -> jax.Array:
    """Features whose product is 1 + s + s^2 / 2 with s = q . k / sqrt(K) (Based, 2402.18668).

    The pairs of channels appear once each: 1 + K + K (K + 1) / 2 features. `linear_attention` with
    feature_map='taylor' does not call it for whole sequences.
    """
    x = _wide(x)
    scale = x.shape[-1] ** -0.5
    return Kernel(1.0, scale, scale**2 / 2).features(x)


def hedgehog(x: jax.Array, weight: jax.Array) -> jax.Array:
    """softmax([W x, -W x]) over the features (Zhang et al. 2024, arXiv 2402.04347).

    Args:
      x: [..., H, K].
      weight: [H, K, F] float, learned per head; the identity at first.

    Returns:
      [..., H, 2 F].
    """
    x, weight = _wide(x), _wide(weight)
    y = contract("...hk,hkf->...hf", x, weight)
    return jax.nn.softmax(jnp.concatenate([y, -y], axis=-1), axis=-1)


def dpfp(x: jax.Array, order: int = 4) -> jax.Array:
    """Deterministic parameter-free projection (Schlag et al. 2021, arXiv 2102.11174).

    With r = relu([x, -x]): the products of r with itself rolled by 1, ..., `order` channels.

    Args:
      x: [..., K].
      order: nu, in [1, 2 K - 1].

    Returns:
      [..., 2 K order].

    Raises:
      ValueError: if the order is out of range.
    """
    if not 1 <= order <= 2 * x.shape[-1] - 1:
        raise ValueError(f"dpfp: order must be in [1, {2 * x.shape[-1] - 1}], got {order}")
    x = _wide(x)
    r = jax.nn.relu(jnp.concatenate([x, -x], axis=-1))
    return jnp.concatenate([r * jnp.roll(r, j, axis=-1) for j in range(1, order + 1)], axis=-1)


def favor_exponents(x: jax.Array, projection: jax.Array, scale: float) -> jax.Array:
    """Exponents of Performer's positive features: W x' - |x'|^2 / 2 with x' = sqrt(scale) x.

    Args:
      x: [..., K].
      projection: W [m, K].
      scale: factor on q . k that the features stand for.

    Returns:
      [..., m]; the mean over rows of W of exp(. at q + . at k) estimates exp(scale q . k).
    """
    x = _wide(x) * math.sqrt(scale)
    norm = jnp.sum(x * x, axis=-1, keepdims=True)
    return contract("...k,mk->...m", x, _wide(projection)) - norm / 2


def random_features(
    key: jax.Array, count: int, width: int, *, constant_norm: bool = False
) -> jax.Array:
    """Orthogonal random directions of Performer (arXiv 2009.14794): [count, width] float32.

    Blocks of `width` orthogonal rows, the last one cut off. Row norms are those of Gaussian vectors
    (chi distributed), so that each row is Gaussian by itself and the estimate is unbiased; or all
    sqrt(width).

    Args:
      key: random key; a fresh one redraws.
      count: m.
      width: K.
      constant_norm: norms of sqrt(K) instead of Gaussian ones.

    Raises:
      ValueError: if `count` or `width` is < 1.
    """
    if count < 1 or width < 1:
        raise ValueError(f"random_features: count and width must be >= 1, got {count}, {width}")
    directions, lengths = jax.random.split(key)
    blocks = -(-count // width)
    rows = jax.random.orthogonal(directions, width, (blocks,)).reshape(blocks * width, width)
    if constant_norm:
        norms = jnp.full((count,), math.sqrt(width))
    else:
        norms = jnp.linalg.norm(jax.random.normal(lengths, (count, width)), axis=-1)
    return rows[:count] * norms[:, None]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(state_dtype(x))
