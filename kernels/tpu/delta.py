# SPDX-License-Identifier: Apache-2.0
"""TPU kernels of the delta rule with one decay per head.

The chunkwise form of `seqmix.mixers.delta` (arXiv 2412.06464) in chunks of 128 tokens, the side of
the matrix unit; a smaller or larger chunk would leave part of it idle, so `chunk_size` is not
heard. One step of the grid (rows, blocks of heads, chunks) does one chunk of the heads of a block;
the states stay in VMEM from chunk to chunk. With T = (I + beta (K K^T) * D)^-1,

    V' = T (beta (V - e^G * K S));  O = s (e^G * Q S + ((Q K^T) * D) V')
    S' = e^{G_C} S + K^T (e^{G_C - G} * V')

so that neither W nor U of the paper is formed. A key head's K K^T, Q K^T, K S and Q S are computed
once for all of its states, whose columns lie side by side, and summing gradients over them is part
of the products. The backward kernel runs over the chunks in reverse, reads the states that entered
them and computes everything else again.

Per token and key head with r states, widths K and V, x queries, and b bytes a number:

* forward bytes  b (K (1 + x) + r V (1 + x)) + 4 r K V / 128 of states;
  backward bytes b (2 K (1 + x) + r V (2 + x)) + 4 r K V / 128;
* forward FLOPs  2 C (1 + x) K + 2 (2 + x) r K V + 2 C (1 + x) r V, C = 128, and the inverses;
  backward about 2.7 times as much;
* an inverse: for each doubling from 16 to 128, 2 products [64, 128] x [128, 128], at six passes of
  the matrix unit for float32 and three for bfloat16: 2 * 3 * 2 * 64 * 128 FLOPs a token and pass.
"""

import functools
import math

import jax
import jax.numpy as jnp

from seqmix_kernels.options import Options
from seqmix_kernels.tpu import _common as tpu
from seqmix_kernels.tpu import delta_backward, delta_forward
from seqmix_kernels.tpu.delta_chunk import CHUNK, Plan

# States of a step of the grid: independent work that hides the latency of each chain of products,
# against the size of the program.
_WANTED_STATES = 4
_MOST_STATES = 16
_DTYPES = (jnp.float32, jnp.bfloat16)


def refusal(options: Options, arrays: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot take q, k, v, log_decay, beta, or None."""
    for x in arrays[:3]:
        if x.dtype not in _DTYPES:
            return f"it reads float32 and bfloat16, not {x.dtype}"
    for x in arrays[3:]:
        if x.dtype != jnp.float32:
            return f"its gates are float32, not {x.dtype}"
    need = vmem_bytes(options, arrays)
    if need > tpu.VMEM_LIMIT:
        return f"it needs {need} bytes of VMEM, of {tpu.VMEM_LIMIT}"
    return None


def _plan(options: Options, q, k, v) -> Plan:
    heads, (key, value) = options.heads, (k.shape[-1], v.shape[-1])
    block = _block(heads, key, value)
    if block * heads.values > _MOST_STATES and (key % tpu.LANES or value % tpu.LANES):
        # No small block of such heads ends on the lane grid.
        key, value = tpu.round_up(key, tpu.LANES), tpu.round_up(value, tpu.LANES)
        block = _block(heads, key, value)
    time = max(q.shape[1], CHUNK)
    low = tpu.operand_dtype(q, k, v)
    return Plan(heads, key, value, block, time, options.scale, low)


def _block(heads, key: int, value: int) -> int:
    """Key heads of a step: blocks must end on the lane grid, or hold all heads.

    The last block may reach beyond the last head: heads do not meet, and what is written there is
    dropped.
    """
    widths = (key, value * heads.values)
    whole = math.lcm(*(tpu.LANES // math.gcd(tpu.LANES, n) for n in widths))
    if whole >= heads.keys:
        return heads.keys
    most = max(whole, _WANTED_STATES // heads.values)
    fitting = [n for n in range(whole, min(most, heads.keys) + 1, whole) if heads.keys % n == 0]
    return fitting[-1] if fitting else whole


def vmem_bytes(options: Options, arrays: tuple[jax.Array, ...]) -> int:
    """Bytes of VMEM that the larger of the two kernels needs: the backward one.

    Blocks twice, for the copies that run beside the arithmetic, and what the arithmetic of a state
    holds at a time, in [C, C] and [C, V] float32 arrays: found by compiling, as is the half more
    that float32 products hold, whose operands are cut up.
    """
    q, k, v, *_ = arrays
    plan = _plan(options, q, k, v)
    h, s, x = plan.block, plan.states, plan.heads.queries
    tokens = {
        "q": (2, h * x * plan.key, q.dtype),
        "k": (2, h * plan.key, k.dtype),
        "v": (2, s * plan.value, v.dtype),
        "d_out": (1, s * x * plan.value, options.out_dtype),
    }
    blocks = sum(n * _tiled(CHUNK, width, dtype) for n, width, dtype in tokens.values())
    blocks += 2 * _tiled(2 * s, CHUNK, jnp.float32)
    state = _tiled(plan.key, plan.value, jnp.float32)
    blocks += 2 * s * state + _tiled(plan.key, s * plan.value, jnp.float32)
    held = (4 + 6 * x) * _tiled(CHUNK, CHUNK, jnp.float32)
    held = s * (held + 4 * _tiled(CHUNK, plan.value, jnp.float32))
    return 2 * blocks + (held if plan.low == jnp.bfloat16 else held * 3 // 2)


def _tiled(rows: int, columns: int, dtype) -> int:
    """Bytes of a matrix in VMEM."""
    size = jnp.dtype(dtype).itemsize
    return tpu.round_up(rows, 32 // size) * tpu.round_up(columns, tpu.LANES) * size


class _Call:
    """Arrays as the kernels read them, and the blocks of each."""

    def __init__(self, options: Options, q, k, v, log_decay, beta, run, *, reverse: bool):
        self.plan = plan = _plan(options, q, k, v)
        self.reverse = reverse
        self.batch = q.shape[0]
        self.blocks = tpu.ceil_div(plan.heads.keys, plan.block)
        self.inputs = [
            self.tokens(q, plan.key),
            self.tokens(k, plan.key),
            self.tokens(v, plan.value),
            self._gates(tpu.restarts(log_decay, run), beta),
        ]
        h, x = plan.block, plan.heads.queries
        self.q = self.columns(CHUNK, h * x * plan.key)
        self.k = self.columns(CHUNK, h * plan.key)
        self.v = self.columns(CHUNK, plan.states * plan.value)
        self.out = self.columns(CHUNK, plan.states * x * plan.value)
        self.gates = tpu.BlockSpec(
            (None, None, None, 2 * plan.states, CHUNK),
            lambda b, h, n: (b, h, self._chunk(n), 0, 0),
        )
        self.specs = [self.q, self.k, self.v, self.gates]
        self.state = tpu.BlockSpec(
            (None, plan.states, plan.key, plan.value), lambda b, h, n: (b, h, 0, 0)
        )
        self.entering = tpu.BlockSpec(
            (None, None, plan.key, plan.states * plan.value),
            lambda b, h, n: (b, self._chunk(n), 0, h),
        )

    def _chunk(self, step):
        return self.plan.chunks - 1 - step if self.reverse else step

    def columns(self, rows: int, width: int):
        """The blocks of [B, T, heads * width]."""
        return tpu.BlockSpec((None, rows, width), lambda b, h, n: (b, self._chunk(n), h))

    def tokens(self, x, width: int):
        """[B, T, H, W] -> [B, T, H * width]."""
        x = tpu.pad_axis(tpu.pad_axis(x, 3, width), 1, self.plan.time)
        return x.reshape(*x.shape[:2], -1)

    def padded_state(self, state):
        """[B, H, K, V] as the kernels read it."""
        return tpu.pad_axis(tpu.pad_axis(state, 2, self.plan.key), 3, self.plan.value)

    def _gates(self, *gates):
        """Gates [B, T, H] -> [B, blocks of heads, chunks, gates * heads, C]."""
        plan = self.plan
        x = tpu.pad_axis(jnp.stack(gates, axis=2), 1, plan.chunks * CHUNK)
        x = tpu.pad_axis(x, 3, self.blocks * plan.states)
        x = x.reshape(self.batch, plan.chunks, CHUNK, len(gates), self.blocks, plan.states)
        x = x.transpose(0, 4, 1, 3, 5, 2)
        return x.reshape(*x.shape[:3], -1, CHUNK)

    def split_gates(self, x, time: int):
        """Inverse of `_gates`, for two."""
        plan = self.plan
        x = x.reshape(*x.shape[:3], 2, plan.states, CHUNK).transpose(3, 0, 2, 5, 1, 4)
        x = x.reshape(2, self.batch, plan.chunks * CHUNK, self.blocks * plan.states)
        return x[:, :, :time, : plan.heads.states]

    def run(self, body, name, interpret, inputs, in_specs, out_specs, out_shape, factor):
        """Runs one of the kernels; `factor` is its FLOPs over those of the forward one."""
        plan = self.plan
        moved = sum(x.size * x.dtype.itemsize for x in (*self.inputs, *inputs, *out_shape))
        tokens = self.batch * plan.chunks * CHUNK
        return tpu.kernel_call(
            functools.partial(body, plan),
            *self.inputs,
            *inputs,
            name=name,
            interpret=interpret,
            grid=(self.batch, self.blocks, plan.chunks),
            parallel=2,
            in_specs=[*self.specs, *in_specs],
            out_specs=out_specs,
            out_shape=out_shape,
            cost=tpu.CostEstimate(
                flops=int(factor * tokens * plan.heads.keys * _flops(plan)),
                transcendentals=tokens * plan.heads.states * CHUNK,
                bytes_accessed=moved,
            ),
        )


def _flops(plan: Plan) -> int:
    """FLOPs of the forward kernel per token and key head, without the inverses."""
    r, x = plan.heads.values, plan.heads.queries
    shared = 2 * CHUNK * (1 + x) * plan.key
    return shared + r * plan.value * (2 * (2 + x) * plan.key + 2 * CHUNK * (1 + x))


def forward(
    options: Options, interpret, shared, q, k, v, log_decay, beta, state, run, *, keep: bool
):
    """Outputs, final states and residuals.

    Args:
      options: static options of the call.
      interpret: as in `seqmix_kernels.target.Target`.
      shared: ().
      q: [B, T, Hq, K] float32 or bfloat16, zero at padding; so are k, v and beta.
      k: [B, T, Hk, K].
      v: [B, T, Hv, V].
      log_decay: [B, T, Hs] float32, finite, in [-1e5, 0]; 0 at padding.
      beta: [B, T, Hs] float32.
      state: [B, Hs, K, V] float32.
      run: [B, T] int32 document numbers, or None.
      keep: whether `backward` will be called.

    Returns:
      out [B, T, Ho, V]; final states [B, Hs, K, V] float32; the states entering each chunk, side by
      side in [B, chunks, K, Hs * V] float32, so that narrow ones fill the lanes, or () if not kept.
    """
    del shared
    call = _Call(options, q, k, v, log_decay, beta, run, reverse=False)
    plan, heads = call.plan, call.plan.heads
    outputs = (call.batch, plan.time, heads.outputs * plan.value)
    states = (call.batch, heads.states, plan.key, plan.value)
    kept = jax.ShapeDtypeStruct(
        (call.batch, plan.chunks, plan.key, heads.states * plan.value), jnp.float32
    )
    out, final, *entering = call.run(
        delta_forward.body,
        "delta_forward",
        interpret,
        [call.padded_state(state)],
        [call.state],
        [call.out, call.state, call.entering][: 2 + keep],
        [
            jax.ShapeDtypeStruct(outputs, options.out_dtype),
            jax.ShapeDtypeStruct(states, jnp.float32),
            kept,
        ][: 2 + keep],
        1,
    )
    (time, key, value) = q.shape[1], k.shape[-1], v.shape[-1]
    out = out.reshape(*out.shape[:2], heads.outputs, plan.value)[:, :time, :, :value]
    return out, final[:, :, :key, :value], tuple(entering)


def backward(
    options: Options,
    interpret,
    shared,
    q,
    k,
    v,
    log_decay,
    beta,
    state,
    run,
    entering,
    d_out,
    d_final,
):
    """Gradients ((), (dq, dk, dv, d_log_decay, d_beta), d_state).

    Args:
      options, interpret, shared, q, k, v, log_decay, beta, state, run: as in `forward`.
      entering: what `forward` returned third.
      d_out: gradient of out.
      d_final: gradient of the final states.
    """
    del shared, state
    (entering,) = entering
    call = _Call(options, q, k, v, log_decay, beta, run, reverse=True)
    plan, heads = call.plan, call.plan.heads
    rows = (call.batch, plan.time)
    dq, dk, dv, d_gates, d_state = call.run(
        delta_backward.body,
        "delta_backward",
        interpret,
        [entering, call.tokens(d_out, plan.value), call.padded_state(d_final)],
        [call.entering, call.out, call.state],
        [call.q, call.k, call.v, call.gates, call.state],
        [
            jax.ShapeDtypeStruct((*rows, q.shape[2] * plan.key), q.dtype),
            jax.ShapeDtypeStruct((*rows, heads.keys * plan.key), k.dtype),
            jax.ShapeDtypeStruct((*rows, heads.states * plan.value), v.dtype),
            jax.ShapeDtypeStruct(call.inputs[3].shape, jnp.float32),
            jax.ShapeDtypeStruct((call.batch, heads.states, plan.key, plan.value), jnp.float32),
        ],
        2.7,
    )
    grads = [
        d.reshape(*rows, x.shape[2], -1)[:, : x.shape[1], :, : x.shape[3]]
        for d, x in ((dq, q), (dk, k), (dv, v))
    ]
    d_log_decay, d_beta = call.split_gates(d_gates, q.shape[1])
    return (), (*grads, d_log_decay, d_beta), d_state[:, :, : k.shape[-1], : v.shape[-1]]
