# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, how evenly, and their products: pure functions."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """What `route` chose for N tokens of E experts.

    Attributes:
      weights: [N, k] float32 factors of the chosen experts' outputs.
      experts: [N, k] int32, the chosen experts, best first; equal scores go by index.
      probabilities: [N, E] float32 scores that sum to one, for the balance loss.
    """

    weights: jax.Array
    experts: jax.Array
    probabilities: jax.Array


def route(
    logits: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int,
    router: Literal["softmax", "sigmoid"],
    renormalise: bool,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """Chooses each token's experts; no gradient flows through the choice.

    Args:
      logits: [N, E] float32.
      bias: [E] float32 added to the scores for the choice alone (arXiv 2408.15664), or None.
      top_k: experts of a token.
      router: scores are a softmax over the experts, or sigmoids.
      renormalise: the chosen scores are divided by their sum.
      scale: factor of the weights.
      groups, top_groups: experts lie in this many equal groups, and a token's experts come from
        those of its ``top_groups`` whose two best scores (bias included) have the largest sums
        (DeepSeek-V3, arXiv 2412.19437).
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if router == "softmax" else jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(scores)
    if bias is not None:
        choice = choice + bias.astype(jnp.float32)
    if top_groups < groups:
        choice = _limit(choice, groups, top_groups)
    experts = jax.lax.top_k(choice, top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if renormalise:
        # Sigmoids may all underflow.
        weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-20)
    if router == "softmax":
        probabilities = scores
    else:
        probabilities = scores / jnp.maximum(jnp.sum(scores, -1, keepdims=True), 1e-20)
    return Routing(weights * scale, experts, probabilities)


def _limit(choice: jax.Array, groups: int, top_groups: int) -> jax.Array:
    """Scores with -inf outside each token's best groups."""
    tokens, experts = choice.shape
    parts = choice.reshape(tokens, groups, experts // groups)
    best = jax.lax.top_k(parts, min(2, experts // groups))[0].sum(-1)
    chosen = jax.lax.top_k(best, top_groups)[1]
    kept = (chosen[:, :, None] == jnp.arange(groups)).any(1)
    return jnp.where(kept[:, :, None], parts, -jnp.inf).reshape(tokens, experts)


def count_load(experts: jax.Array, real: jax.Array, count: int) -> jax.Array:
    """[B, E] float32: how many real tokens of each row go to each expert.

    Args:
      experts: [B, T, k] int32.
      real: [B, T] float32, 0 for padding.
      count: number of experts E.
    """

    def count_row(experts: jax.Array, real: jax.Array) -> jax.Array:
        ones = jnp.broadcast_to(real[:, None], experts.shape)
        return jax.ops.segment_sum(ones.reshape(-1), experts.reshape(-1), count)

    # Sums of ones are exact in float32 up to 2^24, so their order does not matter.
    return jax.vmap(count_row)(experts, real)


def balance_loss(load: jax.Array, mass: jax.Array, tokens: jax.Array, top_k: int) -> jax.Array:
    """Load-balancing loss, summed over sets of tokens, each times its number of tokens.

    ``E sum_e f_e P_e`` with f the share of the assignments and P the mean probability of an expert
    (Switch, arXiv 2101.03961, equation 4, for several experts a token as DeepSeek-V3's equation
    17): 1 where the load is even, up to E where one expert gets everything.

    Args:
      load: [R, E] assignments in each of R sets.
      mass: [R, E] sums of probabilities.
      tokens: [R] real tokens.
      top_k: experts of a token.
    """
    per_set = jnp.sum(jax.lax.stop_gradient(load) * mass, -1) * load.shape[-1] / top_k
    return jnp.sum(per_set / jnp.maximum(tokens, 1.0))


class Layout(NamedTuple):
    """Where the N k pairs of token and expert lie, so that pairs of one expert are together.

    Attributes:
      place: [N k] int32, the slot of each pair.
      source: [S] int32, the pair in each slot, N k in an empty one.
      groups: [E] int32 sizes of the experts' groups in the slots, one after the other; or [blocks]
        int32, the expert of each block of slots.
    """

    place: jax.Array
    source: jax.Array
    groups: jax.Array


def sorted_layout(experts: jax.Array, count: int) -> Layout:
    """Slots without gaps, for `jax.lax.ragged_dot`; ``experts`` [N, k] of ``count``."""
    order, sizes, _ = _sort(experts, count)
    index = jnp.arange(order.size, dtype=jnp.int32)
    return Layout(index.at[order].set(index, unique_indices=True), order, sizes)


def block_layout(experts: jax.Array, count: int, block: int) -> Layout:
    """Slots in blocks of ``block``, each of one expert; a static number of blocks fits any load."""
    order, sizes, sorted_experts = _sort(experts, count)
    pairs = order.size
    blocks = min(pairs // block + count, pairs)
    ends = jnp.cumsum(-(-sizes // block))
    first = (ends + sizes // -block)[sorted_experts]
    start = (jnp.cumsum(sizes) - sizes)[sorted_experts]
    slots = first * block + jnp.arange(pairs, dtype=jnp.int32) - start
    owner = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    return Layout(
        place=jnp.zeros_like(order).at[order].set(slots, unique_indices=True),
        source=jnp.full(blocks * block, pairs, jnp.int32).at[slots].set(order, unique_indices=True),
        groups=jnp.minimum(owner, count - 1).astype(jnp.int32),
    )


def _sort(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pairs in the order of their experts, the sizes of the groups, the experts in that order."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    return order, jax.ops.segment_sum(jnp.ones_like(flat), flat, count), flat[order]


def block_size(pairs: int, count: int) -> int:
    """A power of two near half an even load: little padding, and few blocks to read experts for."""
    return min(512, max(8, 1 << max(pairs // (2 * count), 1).bit_length() - 1))


def mix_experts(
    x: jax.Array,
    routing: Routing,
    layout: Layout,
    apply: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The weighted sum of the chosen experts' outputs, without a capacity: no token is dropped.

    Args:
      x: [N, D].
      routing: of these tokens.
      layout: of their pairs with experts.
      apply: takes [S, D] in the slots' order and ``layout.groups``; returns [S, D].

    Returns:
      [N, D] float32.
    """
    tokens, top_k = routing.experts.shape
    slots = _spread(top_k, x, layout.place, layout.source)
    out = _collect(apply(slots, layout.groups), layout.place, layout.source)
    out = out.reshape(tokens, top_k, -1).astype(jnp.float32)
    return jnp.sum(out * routing.weights[..., None], axis=1)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by index; zeros for an index past the end, as that of an empty slot."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


# The gradients of both are gathers as well, where JAX would scatter.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(top_k: int, x: jax.Array, place: jax.Array, source: jax.Array) -> jax.Array:
    """[N, D] to the slots [S, D]."""
    del place
    return _take(x, source // top_k)


def _spread_forward(top_k, x, place, source):
    return _spread(top_k, x, place, source), place


def _spread_backward(top_k, place, gradient):
    pairs = _take(gradient, place).reshape(-1, top_k, gradient.shape[-1])
    return jnp.sum(pairs, axis=1), None, None


@jax.custom_vjp
def _collect(rows: jax.Array, place: jax.Array, source: jax.Array) -> jax.Array:
    """Slots [S, D] to pairs [N k, D]."""
    del source
    return _take(rows, place)


def _collect_forward(rows, place, source):
    return _collect(rows, place, source), source


def _collect_backward(source, gradient):
    return _take(gradient, source), None, None


_spread.defvjp(_spread_forward, _spread_backward)
_collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def block_product(x: jax.Array, kernel: jax.Array, owner: jax.Array) -> jax.Array:
    """Blocks [blocks, n, I] times the kernel [E, I, O] of each block's ``owner`` [blocks]."""
    return jnp.einsum("bni,bio->bno", x, kernel[owner])


def _block_forward(x, kernel, owner):
    return block_product(x, kernel, owner), (x, kernel, owner)


def _block_backward(saved, gradient):
    x, kernel, owner = saved
    of_x = jnp.einsum("bno,bio->bni", gradient, kernel[owner])
    parts = jnp.einsum("bni,bno->bio", x, gradient).astype(jnp.float32)
    # Owners ascend; blocks that no pair fell into have a gradient of zero.
    of_kernel = jax.ops.segment_sum(parts, owner, kernel.shape[0], indices_are_sorted=True)
    return of_x, of_kernel.astype(kernel.dtype), None


block_product.defvjp(_block_forward, _block_backward)
