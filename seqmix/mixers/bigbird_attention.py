# SPDX-License-Identifier: Apache-2.0
"""BigBird: blocks of a window, the first and last blocks, and random blocks (arXiv 2007.14062).

Reference code: `google-research/bigbird` (the ITC form); `transformers`, `models/big_bird`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _bigbird as parts
from seqmix.mixers import _checks as check
from seqmix.mixers._bigbird import Options
from seqmix.mixers._dispatch import choose
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.kv_cache import KVCache, append, outgrown, place
from seqmix.typing import Keys, Queries, SegmentIds, Values

IMPLEMENTATIONS = ("dense", "sparse")


def bigbird_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    block_size: int = 64,
    window_blocks: int = 3,
    random_blocks: int = 3,
    seed: int = 0,
    causal: bool = True,
    scale: float | None = None,
    initial_state: KVCache | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T Hq V"], KVCache | None]:
    """o_t = softmax_s(scale q_t k_s) v_s over the tokens s of the blocks that t's block sees.

    Blocks are counted from the start of each document; the last may be partial. A block is seen
    once, whatever makes it visible. In a document of N blocks, block i sees

      causal=False (published): 0, N - 1, the `window_blocks` around i, and `random_blocks` of the
        others; blocks 0 and N - 1 see all.
      causal=True (ours, the paper defines none): 0, the last `window_blocks` up to i (itself by
        tokens up to t), and `random_blocks` of the others before i.

    Where fewer others exist, all are seen. The random blocks are a hash of the seed, the key head,
    i and, unless causal, N: they depend on nothing else, so packing, row length and decoding step
    by step do not change them. (`transformers` takes block 0 for all of them outside training and
    counts it again each time; here they are the same in training and evaluation.)

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hkv, K] float; Hq a multiple of Hkv, key head j serves consecutive query heads,
        which share its random blocks.
      v: [B, T, Hkv, V] float.
      block_size: tokens of a block.
      window_blocks: blocks of the window, i itself included; odd unless causal.
      random_blocks: random blocks a block sees, >= 0.
      seed: of the random blocks, >= 0.
      causal: t sees itself and earlier tokens only.
      scale: None for K**-0.5.
      initial_state: keys and values of each row's first document so far; needs causal=True.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned cache; None: as many as needed. Where a document outgrows it,
        the row's outputs are NaN.
      impl: 'dense' (the definition), 'sparse' (time and memory by T * blocks seen) or 'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v; 0 at padding.
      cache: of each row's last document, all of it: later blocks may draw any; None unless causal.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "bigbird_attention"
    heads = check.heads(name, q, k, v)
    if heads.values != 1:
        raise ValueError(
            f"{name}: k and v must have equally many heads, got k {k.shape[2]}, v {v.shape[2]}"
        )
    batch, time = q.shape[:2]
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "capacity", capacity)
    _check_options(name, block_size, window_blocks, random_blocks, seed, causal)
    if initial_state is not None:
        _check_cache(name, initial_state, k, v, causal)
    impl = choose(name, impl, IMPLEMENTATIONS, time=time, default="sparse")
    scale = float(k.shape[-1] ** -0.5 if scale is None else scale)
    before, after = (window_blocks - 1, 0) if causal else (window_blocks // 2, window_blocks // 2)
    options = Options(block_size, before, after, random_blocks, seed, causal, scale)

    q, k, v = mask_padding(segment_ids, q, k, v)
    at = place(initial_state, segment_ids, batch, time)
    cache, lost = None, None
    if causal:
        held = 0 if initial_state is None else initial_state.key.shape[1]
        slots = time + held if capacity is None else capacity
        cache = append(initial_state, k, v, at, slots)
        lost = outgrown(initial_state, cache, at)
    padded = segment_ids is not None
    if impl == "dense":
        out = parts.dense(q, k, v, initial_state, at, options)
    else:
        out = parts.sparse(q, k, v, initial_state, cache, at, options, padded)
    if lost is not None:
        out = jnp.where(lost[..., None, None], jnp.nan, out)
    return mask_padding(segment_ids, out.astype(v.dtype))[0], cache


def _check_options(name, block_size, window_blocks, random_blocks, seed, causal):
    for label, value in (("block_size", block_size), ("window_blocks", window_blocks)):
        check.positive(name, label, value, optional=False)
    if not causal and window_blocks % 2 == 0:
        raise ValueError(
            f"{name}: window_blocks must be odd with causal=False, as many blocks on either side, "
            f"got {window_blocks}"
        )
    for label, value in (("random_blocks", random_blocks), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}: {label} must be an integer >= 0, got {value!r}")


def _check_cache(name, cache, k, v, causal):
    check.state_type(name, cache, KVCache)
    if not causal:
        raise ValueError(f"{name}: initial_state needs causal=True")
    batch, slots = k.shape[0], cache.key.shape[1]
    for label, x, new in (("key", cache.key, k), ("value", cache.value, v)):
        expected = (batch, slots, *new.shape[2:])
        check.shape(name, f"initial_state.{label}", x, expected, "B S Hkv K")
    if cache.length.shape != (batch,):
        raise ValueError(
            f"{name}: initial_state.length must have shape [B] = [{batch}], "
            f"got {list(cache.length.shape)}"
        )
