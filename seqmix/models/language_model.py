# SPDX-License-Identifier: Apache-2.0
"""Hybrid language model: embedding, a stack of mixed layers, head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import mixers
from seqmix.layers.auxiliary import Auxiliary
from seqmix.layers.linear import product
from seqmix.layers.parameters import EmbeddingParam, HeadParam
from seqmix.models.config import HybridLMConfig
from seqmix.models.logits import LogitScaling
from seqmix.models.residual import make_norm
from seqmix.models.stack import Stack, StackCache


class HybridCache(NamedTuple):
    """Decode cache of a `HybridLM`.

    Attributes:
      position: [B] int32, tokens seen of each row's current document; padding does not count.
      layers: the caches of the layers.
    """

    position: jax.Array
    layers: StackCache


class HybridLM(nnx.Module):
    """Causal language model whose layers follow a pattern.

    Packed rows are separated by ``segment_ids``: tokens of different segments never influence each
    other; id 0 is padding, which influences nothing wherever it stands, so prompts of different
    lengths may be padded on either side.
    """

    def __init__(self, config: HybridLMConfig, *, rngs: nnx.Rngs):
        """Builds and initialises the model.

        Args:
          config: its settings, kept as ``self.config``.
          rngs: the ``params`` stream is drawn from. Scanned and unrolled models of one key start
            with the same parameters.
        """
        std = config.width**-0.5 * 0.4 if config.embedding_std is None else config.embedding_std
        draw = jax.nn.initializers.normal(std)
        table = draw(rngs.params(), (config.vocabulary, config.width), config.param_dtype)
        self.embedding = EmbeddingParam(table)
        self.stack = Stack(config, rngs=rngs)

        def norm(dtype: Any) -> nnx.Module:
            return make_norm(
                config.norm,
                config.width,
                epsilon=config.norm_epsilon,
                dtype=dtype,
                param_dtype=config.param_dtype,
            )

        self.embedding_norm = norm(config.residual_dtype) if config.embedding_norm else None
        self.norm = norm(config.dtype)
        shape = (config.width, config.vocabulary)
        head = None if config.tied else draw(rngs.params(), shape, config.param_dtype)
        self.head = None if head is None else HeadParam(head)
        shape = (config.meta_tokens, config.width)
        meta = draw(rngs.params(), shape, config.param_dtype) if config.meta_tokens else None
        self.meta = None if meta is None else EmbeddingParam(meta)
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token.

        Args:
          tokens: [B, T] integers in [0, vocabulary). An id outside gives NaN, never a wrong row;
            at padding any id will do. With meta tokens a document begins with their ids,
            ``config.meta_ids``; generation puts them there itself.
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32; None: counted per segment.

        Returns:
          [B, T, vocabulary] float32.
        """
        hidden, _ = self.hidden(tokens, segment_ids, positions)
        return self.logits(hidden)

    def hidden(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: HybridCache | None = None,
    ) -> tuple[jax.Array, HybridCache | None]:
        """Final-normed hidden states.

        Args:
          tokens, segment_ids, positions: as in a call of the model. With a cache, positions
            default to those that continue it.
          cache: from `init_cache` or an earlier call; the tokens continue each row's document.

        Returns:
          [B, T, D] in the compute dtype, and the cache after these tokens (None without one).

        Raises:
          ValueError: tokens, segment_ids or positions of a wrong shape or dtype.
        """
        hidden, cache, _ = self._run(tokens, segment_ids, positions, cache, auxiliary=False)
        return hidden, cache

    def hidden_and_auxiliary(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Auxiliary | None]:
        """`hidden` without a cache, and the layers' own losses and metrics, for training.

        Returns:
          [B, T, D] in the compute dtype, and sums over the real tokens (None where no layer has
          losses of its own).
        """
        hidden, _, auxiliary = self._run(tokens, segment_ids, positions, None, auxiliary=True)
        return hidden, auxiliary

    def _run(self, tokens, segment_ids, positions, cache, *, auxiliary: bool):
        _check_ids("tokens", tokens, None)
        for name, ids in (("segment_ids", segment_ids), ("positions", positions)):
            if ids is not None:
                _check_ids(name, ids, tokens.shape)
        ids = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
        if positions is None:
            start = None if cache is None else cache.position
            positions = mixers.segment_positions(ids, start)

        x, layers, sums = self.stack(
            self._embed(tokens, segment_ids),
            segment_ids=segment_ids,
            positions=positions,
            cache=None if cache is None else cache.layers,
            auxiliary=auxiliary,
        )
        x = self.norm(x)
        if cache is not None:
            cache = HybridCache(_next_position(ids, positions, cache.position), layers)
        return x, cache, sums

    def _embed(self, tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """[B, T] ids to the residual stream [B, T, D]; NaN where an id is outside, 0 at padding."""

        def real(x: jax.Array) -> jax.Array:
            return x if segment_ids is None else jnp.where((segment_ids != 0)[..., None], x, 0)

        outside = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
        x = self.embedding.at[tokens].get(**outside)
        if self.meta is not None:
            place = tokens.astype(jnp.int32) - self.config.vocabulary
            x = jnp.where((place >= 0)[..., None], self.meta.at[place].get(**outside), x)
        x = real(x.astype(self.config.residual_dtype))
        if self.config.embedding_multiplier != 1.0:
            x = self.config.embedding_multiplier * x
        # Masked on both sides of the norm: its gradient at NaN is NaN, and its bias is not 0.
        return x if self.embedding_norm is None else real(self.embedding_norm(x))

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """Metrics that the layers report in training; empty where none has losses of its own."""
        return self.stack.auxiliary_names

    def finish_step(self) -> None:
        """Ends a training step: what it changes without a gradient, such as selection biases."""
        self.stack.finish_step()

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] hidden states to [..., vocabulary] float32 logits."""
        kernel = self.head_kernel().astype(self.config.dtype)
        return self.logit_scaling(product(hidden, kernel, jnp.float32))

    def head_kernel(self) -> jax.Array:
        """Output projection [D, vocabulary]; the transposed embedding when tied.

        Its products with hidden states are logits once `logit_scaling` has been applied.
        """
        return self.embedding[...].T if self.head is None else self.head[...]

    @property
    def logit_scaling(self) -> LogitScaling:
        """What makes logits of the head's products."""
        return self.config.logit_scaling

    def init_cache(self, batch: int, capacity: int) -> HybridCache:
        """An empty cache.

        Args:
          batch: rows B.
          capacity: the most tokens a row may hold, prompt included. Recurrent layers and windows
            do not grow with it.
        """
        return HybridCache(jnp.zeros((batch,), jnp.int32), self.stack.init_cache(batch, capacity))


def _check_ids(name: str, ids: jax.Array, shape: tuple[int, ...] | None) -> None:
    """Raises ValueError unless ``ids`` is an integer [B, T] array (of the tokens' shape)."""
    if ids.ndim != 2 or (shape is not None and ids.shape != shape):
        expected = "[B, T]" if shape is None else f"the tokens' shape {list(shape)}"
        raise ValueError(f"{name} must have {expected}, got {list(ids.shape)}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {ids.dtype}")


def _next_position(ids: jax.Array, positions: jax.Array, before: jax.Array) -> jax.Array:
    """[B] position of the token that follows the last real one; ``before`` if there is none."""
    time = ids.shape[1]
    real = ids != 0
    last = time - 1 - jnp.argmax(real[:, ::-1], axis=1)
    after = jnp.take_along_axis(positions, last[:, None], axis=1)[:, 0] + 1
    return jnp.where(real.any(axis=1), after, before).astype(jnp.int32)
