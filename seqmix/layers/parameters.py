# SPDX-License-Identifier: Apache-2.0
"""Kinds of parameters, and what an optimizer or a cast may do to each.

The kind is the Variable's type, so it survives stacking over layers, splitting and checkpoints:

| type | examples | weight decay | Muon | cast |
|---|---|---|---|---|
| ``nnx.Param`` | projection kernels [..., in, out] | yes | yes | yes |
| ``ConvolutionParam`` | depthwise kernels [..., W, D] | yes | no | yes |
| ``EmbeddingParam`` | token embedding [vocabulary, D] (also when tied) | no | no | yes |
| ``HeadParam`` | untied output head [D, vocabulary] | yes | no | yes |
| ``NoDecayParam`` | norm scales, biases | no | no | yes |
| ``Float32Param`` | A_log, dt_bias, D | no | no | never |
| ``Buffer`` | fixed slopes, biases of experts' choice | not trained | not trained | never |

Embeddings are left out of the decay because it shrinks them, and with them the input of the first
norm, whose gradient then grows (OLMo 2, arXiv 2501.00656, section 3.3).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class NoDecayParam(nnx.Param):
    """A norm scale or a bias: no weight decay."""


class Float32Param(NoDecayParam):
    """A decay rate, time-step bias or skip: float32 under any cast, no weight decay."""


class Buffer(nnx.Variable):
    """Numbers of a layer that no gradient trains; floats are always float32.

    Most are fixed, such as the slopes of heads; the `finish_step` of a layer (`Performer`) or of a
    feed-forward part (`MoE`) may change others after each training step.
    """


class ConvolutionParam(nnx.Param):
    """A depthwise convolution kernel [W, D]: decays, but is no matrix for Muon."""


class EmbeddingParam(nnx.Param):
    """A token embedding [vocabulary, D]: no weight decay, not for Muon."""


class HeadParam(EmbeddingParam):
    """An untied output head [D, vocabulary]: decays, not for Muon."""


def _decays(variable: nnx.Variable) -> bool:
    if isinstance(variable, HeadParam):
        return True
    return isinstance(variable, nnx.Param) and not isinstance(
        variable, NoDecayParam | EmbeddingParam
    )


def _is_matrix(variable: nnx.Variable) -> bool:
    return isinstance(variable, nnx.Param) and not isinstance(
        variable, NoDecayParam | EmbeddingParam | ConvolutionParam
    )


def _map(function: Callable[[nnx.Variable], Any], tree: Any) -> Any:
    """Maps over the Variables of a State or Module; the result keeps each Variable's type."""

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            raise ValueError(
                "parameters are told apart by their Variable type, got a bare "
                f"{type(leaf).__name__}; pass nnx.state(model, nnx.Param)"
            )
        return leaf.replace(function(leaf))

    return jax.tree.map(replace, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def decay_mask(state: Any) -> Any:
    """Which parameters get weight decay.

    Args:
      state: an ``nnx.State`` (or Module) of Variables; arrays may be abstract.

    Returns:
      The same tree with a bool in each Variable, as ``optax.masked`` takes it.
    """
    return _map(_decays, state)


def muon_mask(state: Any) -> Any:
    """Which parameters are matrices [..., in, out] to orthogonalise; the others go to AdamW.

    Args:
      state: an ``nnx.State`` (or Module) of Variables; arrays may be abstract.

    Returns:
      The same tree with a bool in each Variable.
    """
    return _map(_is_matrix, state)


def cast(state: Any, dtype: Any) -> Any:
    """Casts floating-point parameters to ``dtype``, except those that must stay float32.

    Args:
      state: an ``nnx.State`` (or Module) of Variables.
      dtype: a floating-point dtype.

    Returns:
      The same tree; ``Float32Param`` and ``Buffer`` values are float32 whatever they were.
    """

    def convert(variable: nnx.Variable) -> jax.Array:
        value = variable[...]
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        return value.astype(jnp.float32 if keeps_float32(variable) else dtype)

    return _map(convert, state)


def keeps_float32(variable: nnx.Variable) -> bool:
    """Whether ``cast`` leaves this Variable in float32."""
    return isinstance(variable, Float32Param | Buffer)
