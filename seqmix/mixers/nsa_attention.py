# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (NSA): compressed, selected and nearby tokens in three gated branches."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import _selection as selection
from seqmix.mixers._compression import (
    NSACompression,
    check_compression,
    check_windows,
    window_slots,
)
from seqmix.mixers._dispatch import choose
from seqmix.mixers._nsa_branches import Sizes, attend, decode
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.kv_cache import KVCache, append, init_kv_cache, outgrown, place
from seqmix.typing import Queries, SegmentIds

IMPLEMENTATIONS = ("dense", "sparse")


class NSABranches(NamedTuple):
    """An array for each branch of NSA.

    Attributes:
      compressed: of the branch that sees compressed windows.
      selected: of the branch that sees the selected blocks.
      window: of the branch that sees the last tokens.
    """

    compressed: Float[Array, "B T Hkv X"]
    selected: Float[Array, "B T Hkv X"]
    window: Float[Array, "B T Hkv X"]


class NSAState(NamedTuple):
    """What the three branches keep of the current document.

    Attributes:
      raw: the last compression_block - 1 tokens of the compressed branch, a ring.
      compressed: slot i holds window i; its length counts windows.
      selected: every token.
      window: the last `window` tokens, a ring.
    """

    raw: KVCache
    compressed: KVCache
    selected: KVCache
    window: KVCache


def init_nsa_state(
    batch: int,
    capacity: int,
    heads: int,
    key_width: int,
    value_width: int,
    dtype,
    *,
    compression_block: int = 32,
    stride: int = 16,
    window: int = 512,
) -> NSAState:
    """An empty state for `capacity` tokens.

    Raises:
      ValueError: if a size is too small.
    """
    name = "init_nsa_state"
    check.positive(name, "capacity", capacity)
    check_windows(name, compression_block, stride)
    shape = (heads, key_width, value_width, dtype)
    return NSAState(
        init_kv_cache(batch, compression_block - 1, *shape),
        init_kv_cache(batch, window_slots(capacity, compression_block, stride), *shape),
        init_kv_cache(batch, capacity, *shape),
        init_kv_cache(batch, capacity, *shape, window=window),
    )


def nsa_attention(
    q: Queries,
    k: NSABranches,
    v: NSABranches,
    gates: Float[Array, "B T Hq 3"],
    *,
    compress_keys: NSACompression | None = None,
    compress_values: NSACompression | None = None,
    compression_block: int = 32,
    stride: int = 16,
    block_size: int = 64,
    selected_blocks: int = 16,
    initial_blocks: int = 1,
    local_blocks: int = 2,
    window: int = 512,
    scale: float | None = None,
    initial_state: NSAState | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T Hq V"], NSAState]:
    """o_t = sum over the branches c of gates_c Attention_c(q_t, k_c, v_c).

    All blocks are counted from the start of each document. With positions from 0:

    compressed: window i presses the tokens i d .. i d + l - 1 (l = compression_block, d = stride)
      into one key and value; t sees the windows whose last token it sees. None: output 0.
    selected: blocks of l' = block_size tokens. A block's importance is the sum of the compressed
      branch's softmax over the group's query heads and over its windows, p[(l'/d) j + m - n] for
      m < l'/d, n < l/d: a window counts as often as its strides overlap the block's. The first
      `initial_blocks`, the token's own and the local_blocks - 1 before it are in, then those of the
      highest importance, the earlier one of equals, up to `selected_blocks` in all. t sees itself
      and earlier tokens of them. No gradient passes through the choice.
    window: t sees the last `window` tokens, itself included.

    NSA: arXiv 2502.11089 sections 3-5 (equation 9 counts from 1). With stride = compression_block =
    block_size, no MLP and the same k and v in each branch it is the form of layers/nsa.py of
    flash-linear-attention.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hkv, K] float each; Hq a multiple of Hkv, the query heads of a group select alike.
      v: [B, T, Hkv, V] float each.
      gates: [B, T, Hq, 3] float, of the compressed, selected and window branch.
      compress_keys: MLP of the windows' keys; None for their mean.
      compress_values: likewise of their values.
      compression_block: l >= 2, tokens of a window, a multiple of `stride`.
      stride: d, tokens between windows.
      block_size: l', tokens of a selected block, a multiple of `stride`.
      selected_blocks: blocks that a token selects, at least initial_blocks + local_blocks.
      initial_blocks: first blocks that are always selected, may be 0.
      local_blocks: last blocks that are always selected, its own included.
      window: tokens of the window branch.
      scale: of the logits; None for K**-0.5.
      initial_state: of each row's first document so far.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned caches. None: as many as needed. A decode loop passes a
        constant; where a document outgrows it, the row's outputs are NaN.
      impl: 'dense' (the definition: masked softmaxes over all tokens), 'sparse' or 'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v; 0 at padding.
      state: of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "nsa_attention"
    check.state_type(name, initial_state, NSAState)
    for label, x in (("k", k), ("v", v)):
        if not isinstance(x, (tuple, list)) or len(x) != len(NSABranches._fields):
            raise ValueError(
                f"{name}: {label} must be an NSABranches of three arrays, got {type(x).__name__}"
            )
    k, v = NSABranches(*k), NSABranches(*v)
    for branch in NSABranches._fields:
        key, value = getattr(k, branch), getattr(v, branch)
        selection.check_heads(name, q, key, value, key=f"k.{branch}", value=f"v.{branch}")
    batch, time, heads, _ = q.shape
    check.shape(name, "gates", gates, (batch, time, heads, 3), "B T Hq 3")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "capacity", capacity)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    sizes = Sizes(
        compression_block,
        stride,
        block_size,
        selected_blocks,
        initial_blocks,
        local_blocks,
        window,
        scale,
    )
    _check_sizes(name, sizes)
    check_compression(name, "compress_keys", compress_keys, compression_block, k.compressed)
    check_compression(name, "compress_values", compress_values, compression_block, v.compressed)
    _check_state(name, initial_state, k, v, sizes)
    impl = choose(name, impl, IMPLEMENTATIONS, time=time, default="sparse")

    gates, q, *masked = mask_padding(segment_ids, gates, q, *k, *v)
    k, v = NSABranches(*masked[:3]), NSABranches(*masked[3:])
    slots = capacity or time + (0 if initial_state is None else initial_state.selected.key.shape[1])
    after = _append(initial_state, k, v, segment_ids, slots, sizes)
    mlps = (compress_keys, compress_values)
    if impl == "sparse" and time == 1:
        outs, compressed = decode(q, k, v, initial_state, after, segment_ids, mlps, sizes)
    else:
        dense = impl == "dense"
        outs, compressed = attend(
            q, k, v, initial_state, after, segment_ids, mlps, sizes, dense=dense
        )
    out = sum(out * gates[..., i, None].astype(out.dtype) for i, out in enumerate(outs))
    before = None if initial_state is None else initial_state.selected
    at = place(before, segment_ids, batch, time)
    out = jnp.where(outgrown(before, after.selected, at)[..., None, None], jnp.nan, out)
    out = mask_padding(segment_ids, out.astype(v.selected.dtype))[0]
    return out, after._replace(compressed=compressed)


def _append(state, k, v, segment_ids, slots, sizes):
    """The state after the new tokens, but for the windows that they complete."""
    batch, time, heads, width = k.selected.shape
    at = place(None if state is None else state.selected, segment_ids, batch, time)
    if state is None:
        shape = (heads, width, v.selected.shape[3], k.selected.dtype)
        compressed = init_kv_cache(batch, 1, *shape)
        state = NSAState(None, compressed, None, None)
    return NSAState(
        append(state.raw, k.compressed, v.compressed, at, sizes.compression_block - 1),
        state.compressed,
        append(state.selected, k.selected, v.selected, at, slots),
        append(state.window, k.window, v.window, at, min(slots, sizes.window)),
    )


def _check_sizes(name, sizes):
    for option, value in zip(sizes._fields[:-1], sizes, strict=False):
        if option != "initial_blocks":
            check.positive(name, option, value, optional=False)
    initial = sizes.initial_blocks
    if isinstance(initial, bool) or not isinstance(initial, int) or initial < 0:
        raise ValueError(f"{name}: initial_blocks must be an integer >= 0, got {initial!r}")
    check_windows(name, sizes.compression_block, sizes.stride)
    if sizes.block_size % sizes.stride:
        raise ValueError(
            f"{name}: block_size must be a multiple of stride = {sizes.stride}, "
            f"got {sizes.block_size}"
        )
    forced = sizes.initial_blocks + sizes.local_blocks
    if sizes.selected_blocks < forced:
        raise ValueError(
            f"{name}: selected_blocks must be >= initial_blocks + local_blocks = {forced}, "
            f"got {sizes.selected_blocks}"
        )


def _check_state(name, state, k, v, sizes):
    if state is None:
        return
    slots = state.selected.key.shape[1]
    expected = {
        "raw": ("compressed", sizes.compression_block - 1),
        "compressed": ("compressed", window_slots(slots, sizes.compression_block, sizes.stride)),
        "selected": ("selected", slots),
        "window": ("window", min(slots, sizes.window)),
    }
    for part, (branch, count) in expected.items():
        cache = getattr(state, part)
        label = f"initial_state.{part}"
        selection.check_cache(name, label, cache, getattr(k, branch), getattr(v, branch))
        if cache.key.shape[1] != count:
            raise ValueError(
                f"{name}: {label} must have {count} slots for {slots} tokens, "
                f"got {cache.key.shape[1]}"
            )
