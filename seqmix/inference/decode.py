# SPDX-License-Identifier: Apache-2.0
"""The compiled half of generation: prefill in pieces, then a loop that samples token by token.

Every program works on the model's flat list of arrays; shapes come in buckets and settings are
arguments, so another prompt, seed, temperature or length limit of the same bucket compiles nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from seqmix.inference.sampling import SamplingArrays, sample


class Carry(NamedTuple):
    """What a decode step changes; donated from step to step.

    Attributes:
      cache: the model's decode cache, all tokens but the newest.
      token: [B] int32, the newest token.
      step: int32, new tokens so far.
      tokens: [B, N] int32, the new tokens, the pad token where there is none.
      length: [B] int32, new tokens of each row.
      done: [B] bool, whether a row has ended.
      finite: [B] bool, False once a row's logits were NaN or infinite, which ends it.
    """

    cache: Any
    token: jax.Array
    step: jax.Array
    tokens: jax.Array
    length: jax.Array
    done: jax.Array
    finite: jax.Array


class Choice(NamedTuple):
    """How tokens are chosen and when a row ends: arrays, so that no value is compiled in.

    Attributes:
      keys: [B] random keys.
      sampling: temperature and filters.
      stops: [S] int32 token ids that end a row, -1 for none.
      pad: int32, fills `Carry.tokens`.
      vocabulary: int32; ids at or above it are never chosen.
    """

    keys: jax.Array
    sampling: SamplingArrays
    stops: jax.Array
    pad: jax.Array
    vocabulary: jax.Array


class Programs(NamedTuple):
    """The jitted functions of one model structure; `leaves` is its list of arrays.

    Attributes:
      start: (leaves, batch, capacity) -> an empty cache and hidden states [B, D].
      prefill: (leaves, cache, hidden, tokens, segment_ids) -> (cache, hidden): reads a piece
        [B, T] of the prompts; hidden is that of each row's last token. Donates cache and hidden.
      begin: (leaves, cache, hidden, choice, size) -> `Carry` after the first new token, with room
        for `size`. Donates the cache.
      advance: (leaves, carry, choice, stopped, limit) -> `Carry` after `limit` new tokens or with
        all rows done; rows in `stopped` [B] are done. Donates the carry.
    """

    start: Any
    prefill: Any
    begin: Any
    advance: Any


def programs(model: nnx.Module) -> tuple[Programs, list[jax.Array]]:
    """The programs of a model, shared by all models of its structure, and its arrays."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return _programs(graph, treedef), leaves


@functools.lru_cache(maxsize=8)
def _programs(graph: Any, treedef: Any) -> Programs:
    def merge(leaves):
        return nnx.merge(graph, jax.tree.unflatten(treedef, leaves))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def start(leaves, batch, capacity):
        model = merge(leaves)
        hidden = jnp.zeros((batch, model.config.width), model.config.dtype)
        return model.init_cache(batch, capacity), hidden

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def prefill(leaves, cache, hidden, tokens, segment_ids):
        new, cache = merge(leaves).hidden(tokens, segment_ids, cache=cache)
        count = jnp.sum(segment_ids, axis=1)
        last = jnp.maximum(count - 1, 0)
        new = jnp.take_along_axis(new, last[:, None, None], axis=1)[:, 0]
        return cache, jnp.where((count > 0)[:, None], new, hidden)

    @functools.partial(jax.jit, static_argnums=(4,), donate_argnums=(1,))
    def begin(leaves, cache, hidden, choice, size):
        batch = hidden.shape[0]
        carry = Carry(
            cache=cache,
            token=jnp.zeros((batch,), jnp.int32),
            step=jnp.zeros((), jnp.int32),
            tokens=jnp.full((batch, size), choice.pad, jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            done=jnp.zeros((batch,), bool),
            finite=jnp.ones((batch,), bool),
        )
        return _choose(carry, merge(leaves).logits(hidden), choice)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def advance(leaves, carry, choice, stopped, limit):
        model = merge(leaves)

        def unfinished(carry):
            return (carry.step < limit) & ~jnp.all(carry.done)

        def step(carry):
            hidden, cache = model.hidden(carry.token[:, None], cache=carry.cache)
            carry = carry._replace(cache=cache)
            return _choose(carry, model.logits(hidden[:, 0]), choice)

        return lax.while_loop(unfinished, step, carry._replace(done=carry.done | stopped))

    return Programs(start, prefill, begin, advance)


def _choose(carry: Carry, logits: jax.Array, choice: Choice) -> Carry:
    """The carry with one more token per row that is not done."""
    # The maximum is NaN if any logit is; checked first, as a filter would hide some.
    finite = carry.done | jnp.isfinite(jnp.max(logits, axis=-1))
    logits = jnp.where(jnp.arange(logits.shape[-1]) < choice.vocabulary, logits, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in, (0, None))(choice.keys, carry.step)
    token = sample(keys, logits, choice.sampling)
    goes_on = ~carry.done & finite
    column = jnp.where(goes_on, token, choice.pad)
    tokens = lax.dynamic_update_slice(carry.tokens, column[:, None], (0, carry.step))
    stops = jnp.any(token[:, None] == choice.stops, axis=1)
    return carry._replace(
        # Any id of the vocabulary will do for a row that is done.
        token=jnp.where(goes_on, token, 0),
        step=carry.step + 1,
        tokens=tokens,
        length=carry.length + goes_on,
        done=~goes_on | stops,
        finite=carry.finite & finite,
    )


@functools.partial(jax.jit, static_argnums=(2,))
def window(carry: Carry, first: jax.Array, width: int) -> tuple[jax.Array, ...]:
    """Copies of tokens [B, first : first + width], length, done and finite.

    Copies, because the carry's own buffers are donated to the next step.
    """
    batch = carry.tokens.shape[0]
    tokens = lax.dynamic_slice(carry.tokens, (0, first), (batch, width))
    return tuple(jnp.copy(x) for x in (tokens, carry.length, carry.done, carry.finite))
