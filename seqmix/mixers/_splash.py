# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention by JAX's Splash kernels on TPU.

Splash masks by row index and by segment. Runs are the segments: ids may come back (1, 2, 1 are
three documents), runs do not. A window counts a document's tokens, so for it real tokens are moved
together first; the distance of two tokens of a document is then that of their rows.
"""

import functools
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import seqmix_kernels
from seqmix.mixers.kv_cache import KVCache, Placement
from seqmix.rows import cut_refusal, on_own_rows

# Splash lists its blocks on the host, in time quadratic in T: some 10 s here, once per shape.
MAX_TIME = 32768
MAX_WIDTH = 256
LANES = 128
MAX_BLOCK = 512
_PADDING = -1


def refusal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool,
    sinks: jax.Array | None,
    cache: KVCache | None,
    prefix: int = 0,
) -> str | None:
    """Why Splash cannot take a call of `mixers.attention`, or None."""
    platform = seqmix_kernels.target().platform
    if platform != "tpu":
        return f"the backend is '{platform}', not 'tpu'"
    return _unsupported(q, k, v, causal, sinks, cache, prefix)


def _unsupported(q, k, v, causal, sinks, cache, prefix=0):
    """`refusal` on any backend."""
    dtypes = {jnp.dtype(x.dtype) for x in (q, k, v)}
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float32)}):
        return "q, k and v must all be bfloat16 or all be float32"
    if not causal:
        return "causal=False"
    if sinks is not None:
        return "sinks is set"
    if prefix:
        return "prefix is set"
    if cache is not None:
        return "initial_state is set"
    if max(k.shape[-1], v.shape[-1]) > MAX_WIDTH:
        widths = f"{k.shape[-1]} and {v.shape[-1]}"
        return f"head widths of k and v must be <= {MAX_WIDTH}, got {widths}"
    if q.shape[1] > MAX_TIME:
        return f"T must be <= {MAX_TIME}, got {q.shape[1]}"
    if any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v)):
        return "it runs inside a shard_map with check_vma=True"
    return cut_refusal(q.shape[0])


def _library():
    """JAX's module, imported where it runs: Pallas for TPU is a third of this package's import."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")


class _Static(NamedTuple):
    """What a kernel is built from.

    Attributes:
      time: rows, a multiple of `block`.
      block: queries and keys of a block.
      heads: query heads.
      window: keys that a token sees, None for all.
      logit_softcap: as in `mixers.attention`.
      interpret: run the kernel's interpreter, on any backend.
    """

    time: int
    block: int
    heads: int
    window: int | None
    logit_softcap: float | None
    interpret: bool


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    at: Placement,
    *,
    packed: bool,
    window: int | None,
    logit_softcap: float | None,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention within documents.

    Args:
      q: [B, T, Hq, K].
      k: [B, T, Hkv, K].
      v: [B, T, Hkv, V].
      at: placement of the tokens.
      packed: whether rows hold padding or more than one document.
      window: keys that a token sees, itself included; None for all.
      logit_softcap: logits become cap * tanh(logits / cap).
      scale: factor of the logits.
      interpret: run the kernels' interpreter; for tests.

    Returns:
      [B, T, Hq, V]; anything at padding.
    """
    time = q.shape[1]
    window = None if window is None or window >= time else window
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    # Padding has a segment of its own, in which each token at least sees itself.
    run = jnp.where(at.real, at.run, _PADDING) if packed else None
    move = packed and window is not None
    if move:
        order = jnp.argsort(~at.real, axis=1, stable=True)
        run = jnp.take_along_axis(run, order, axis=1)
        q, k, v = (jnp.take_along_axis(x, order[..., None, None], axis=1) for x in (q, k, v))
    padded, block = _grid(time)
    cap = None if logit_softcap is None else float(logit_softcap)
    static = _Static(padded, block, q.shape[2], window, cap, interpret)
    out = _kernels(static, *(_heads_first(x, padded) for x in (q, k, v)), _segments(run, padded))
    out = jnp.swapaxes(out, 1, 2)[:, :time]
    if not move:
        return out
    back = jnp.maximum(jnp.cumsum(at.real, axis=1) - 1, 0)
    return jnp.take_along_axis(out, back[..., None, None], axis=1)


def _grid(time):
    """The rows of the kernels for T tokens, and the rows of a block: what pads least."""
    blocks = -(-time // MAX_BLOCK)
    block = -(-time // (blocks * LANES)) * LANES
    return -(-time // block) * block, block


def _heads_first(x, padded):
    """[B, T, H, K] -> [B, H, padded, K]; causal tokens never see the keys added at the end."""
    return jnp.swapaxes(jnp.pad(x, ((0, 0), (0, padded - x.shape[1]), (0, 0), (0, 0))), 1, 2)


def _segments(run, padded):
    if run is None:
        return None
    run = jnp.pad(run, ((0, 0), (0, padded - run.shape[1])), constant_values=_PADDING)
    return _library().SegmentIds(q=run, kv=run)


@functools.lru_cache(maxsize=64)
def _kernel(static):
    """The kernel of one row; its tables are NumPy's, so that no trace's arrays are kept."""
    splash, block = _library(), static.block
    shape = (static.time, static.time)
    mask = splash.CausalMask(shape)
    if static.window is not None:
        mask = splash.LocalMask(shape, (static.window - 1, 0), 0)
    sizes = splash.BlockSizes(*[block] * 8)
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * static.heads),
            block_sizes=sizes,
            attn_logits_soft_cap=static.logit_softcap,
            interpret=static.interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _precision(dtype):
    """Splash names no precision, and the TPU's default rounds float32 operands to bfloat16."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def _rows(static, q, k, v, segments):
    def local(_, *arrays):
        return jax.vmap(_kernel(static))(*arrays)

    with _precision(q.dtype):
        return on_own_rows(local, (), q, k, v, segments)


# A rule of its own, so that the precision holds where the backward kernels are traced.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(static, q, k, v, segments):
    """[B, Hq, T, V] of q [B, Hq, T, K], k [B, Hkv, T, K], v [B, Hkv, T, V]."""
    return _rows(static, q, k, v, segments)


def _kernels_forward(static, q, k, v, segments):
    return jax.vjp(lambda *qkv: _rows(static, *qkv, segments), q, k, v)


def _kernels_backward(static, pull, d_out):
    with _precision(d_out.dtype):
        return (*pull(d_out), None)


_kernels.defvjp(_kernels_forward, _kernels_backward)
