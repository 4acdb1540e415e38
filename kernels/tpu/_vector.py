# SPDX-License-Identifier: Apache-2.0
"""What the kernels with one decay per key channel share: the grid, its blocks, and their loading.

The grid is (rows, groups of heads, chunks), chunks last and in order, so that the float32 state
stays in VMEM. It is held as [V, K]: a decay per key channel then scales lanes.

Arrays are read as projections write them, [B, T, H * width], a group of heads at once that fills
whole lanes; each head is a slice of lanes. Only where no small group does, heads are padded to
whole lanes outside.

Axes: n states of a step, m query heads of a state, C tokens, K key channels, V values.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seqmix_kernels.options import Heads, Options
from seqmix_kernels.tpu import _common as common

DEFAULT_CHUNK, SMALLEST_CHUNK, LARGEST_CHUNK = 64, 16, 128
# States of one step of the grid, for the products of one to hide the latency of another's; and the
# greatest product of their number, K and V.
STATES_AT_ONCE, NUMBERS_AT_ONCE = 4, 2**17
# Most states of one step where lanes ask for more.
MOST_STATES = 8


class Cut(NamedTuple):
    """What a call is compiled for.

    Attributes:
      heads: grouping of the heads of one step of the grid.
      groups: steps that the heads take.
      time: T.
      chunk: C.
      chunks: number of chunks.
      key: K, as the kernel sees it.
      value: V, likewise.
      low: dtype of the operands of large products.
      scale: factor on the output.
      reverse: whether the chunks are walked from the last to the first.
    """

    heads: Heads
    groups: int
    time: int
    chunk: int
    chunks: int
    key: int
    value: int
    low: jnp.dtype
    scale: float
    reverse: bool

    @property
    def states(self) -> int:
        """States of one step of the grid."""
        return self.heads.keys * self.heads.values


def cut_of(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, *, reverse: bool = False
) -> Cut:
    """How the grid cuts a call up."""
    heads, time = options.heads, q.shape[1]
    wanted = min(options.chunk_size or DEFAULT_CHUNK, LARGEST_CHUNK, time)
    chunk = max(SMALLEST_CHUNK, 1 << (wanted - 1).bit_length())
    key, value = k.shape[-1], v.shape[-1]
    keys = _keys_at_once(heads, key, value)
    if not keys:
        key, value = common.round_up(key, common.LANES), common.round_up(value, common.LANES)
        keys = _keys_at_once(heads, key, value)
    return Cut(
        Heads(keys, heads.values, heads.queries),
        heads.keys // keys,
        time,
        chunk,
        common.ceil_div(time, chunk),
        key,
        value,
        common.operand_dtype(q, k, v),
        options.scale,
        reverse,
    )


def _keys_at_once(heads, key, value):
    """Key heads of one step of the grid; 0 if no small number of them fills whole lanes."""

    def states(keys):
        return keys * heads.values

    fitting = [
        keys
        for keys in range(1, heads.keys + 1)
        if heads.keys % keys == 0
        and (keys == 1 or states(keys) <= MOST_STATES)
        and (keys == heads.keys or keys * key % common.LANES == keys * value % common.LANES == 0)
    ]
    good = [
        keys
        for keys in fitting
        if states(keys) <= STATES_AT_ONCE and states(keys) * key * value <= NUMBERS_AT_ONCE
    ]
    return max(good) if good else min(fitting, default=0)


def refusal(options: Options, arrays: tuple[jax.Array, ...], vmem: int) -> str | None:
    """Why a kernel that needs `vmem` bytes cannot take a call, or None."""
    for x in arrays:
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"the TPU kernel takes float32 and bfloat16, not {x.dtype}"
    if vmem > common.VMEM_LIMIT:
        return f"the TPU kernel would need {vmem} bytes of VMEM"
    return None


def vmem_bytes(options: Options, arrays: tuple[jax.Array, ...], values: tuple[int, int]) -> int:
    """VMEM of a backward kernel, which needs more than the forward one.

    Blocks twice, for the copies that run beside the arithmetic, and what of the values does not fit
    into registers.

    Args:
      options: static options.
      arrays: q, k, v, log_decay and any others.
      values: how many values of C tokens a state holds at a time, for operands in bfloat16 and in
        float32.
    """
    q, k, v, log_decay = arrays[:4]
    cut = cut_of(options, q, k, v)
    h, _, x = cut.heads
    tokens = (
        (2, h * x * cut.key, q.dtype),
        (2, h * cut.key, k.dtype),
        (2, cut.states * cut.value, v.dtype),
        (2, cut.states * cut.key, log_decay.dtype),
        (1, cut.states * x * cut.value, options.out_dtype),
    )
    blocks = sum(count * _tiled(cut.chunk, width, dtype) for count, width, dtype in tokens)
    state = _tiled(cut.value, cut.key, jnp.float32)
    count = values[cut.low == jnp.float32]
    width = max(common.LANES, cut.key, cut.value)
    spilled = count * (1 + x) * _tiled(cut.chunk, width, jnp.float32)
    return 2 * blocks + cut.states * (7 * state + 2 * state + spilled)


def _tiled(rows, columns, dtype):
    """Bytes of a block in whole tiles."""
    columns = common.round_up(columns, common.LANES)
    return common.round_up(rows, common.SUBLANES) * columns * jnp.dtype(dtype).itemsize


def flat(x: jax.Array, width: int) -> jax.Array:
    """[B, T, H, W] to [B, T, H width], each head padded to `width`."""
    x = common.pad_axis(x, 3, width)
    return x.reshape(*x.shape[:2], -1)


def unflat(x: jax.Array, like: jax.Array) -> jax.Array:
    """Inverse of `flat`, in the shape of `like`."""
    return x.reshape(*like.shape[:3], -1)[..., : like.shape[3]]


def padded(cut: Cut, state: jax.Array) -> jax.Array:
    """[B, Hs, K, V], widths as the kernel sees them."""
    return common.pad_axis(common.pad_axis(state, 2, cut.key), 3, cut.value)


def unpadded(x: jax.Array, like: jax.Array) -> jax.Array:
    """Inverse of `padded`, in the shape of `like`."""
    return x[:, :, : like.shape[2], : like.shape[3]]


def by_chunk(cut: Cut, x: jax.Array) -> jax.Array:
    """[B, T, Hs] -> [B, Hs, chunks / 8, 8, C], zeros past T: whole tiles, eight chunks a tile."""
    tiles = common.ceil_div(cut.chunks, common.SUBLANES)
    x = common.pad_axis(x, 1, tiles * common.SUBLANES * cut.chunk)
    x = x.reshape(x.shape[0], tiles, common.SUBLANES, cut.chunk, x.shape[2])
    return jnp.transpose(x, (0, 4, 1, 2, 3))


def by_token(cut: Cut, x: jax.Array) -> jax.Array:
    """Inverse of `by_chunk`."""
    x = jnp.transpose(x, (0, 2, 3, 4, 1))
    return x.reshape(x.shape[0], -1, x.shape[4])[:, : cut.time]


class Arrays:
    """The inputs and outputs of one kernel: by name, an array or shape and its block."""

    def __init__(self, cut: Cut, batch: int):
        self.cut, self.batch = cut, batch
        self.inputs: dict[str, tuple[jax.Array, Any]] = {}
        self.outputs: dict[str, tuple[Any, Any]] = {}

    def _add(self, name: str, x: Any, block: tuple[int, ...], axes: str) -> None:
        last = self.cut.chunks - 1

        def index(b, h, c):
            chunk = last - c if self.cut.reverse else c
            place = {"b": b, "h": h, "c": chunk, "t": chunk // common.SUBLANES, ".": 0}
            return tuple(place[axis] for axis in axes)

        side = self.outputs if isinstance(x, jax.ShapeDtypeStruct) else self.inputs
        side[name] = (x, common.BlockSpec(block, index))

    def tokens(self, **arrays: Any) -> None:
        """[B, T, H * width]: the chunk's tokens of the group's heads."""
        for name, x in arrays.items():
            block = (1, self.cut.chunk, x.shape[2] // self.cut.groups)
            self._add(name, x, block, "bch")

    def states(self, **arrays: Any) -> None:
        """[B, Hs, K, V]."""
        for name, x in arrays.items():
            self._add(name, x, (1, self.cut.states, *x.shape[2:]), "bh..")

    def chunk_states(self, **arrays: Any) -> None:
        """[B, chunks, V, Hs K]: the states that enter the chunk, side by side."""
        for name, x in arrays.items():
            block = (1, 1, self.cut.value, self.cut.states * self.cut.key)
            self._add(name, x, block, "bc.h")

    def channels(self, **arrays: Any) -> None:
        """[Hs, 1, K], or [B, Hs, 1, K]."""
        for name, x in arrays.items():
            lead, axes = ((1,), "b") if len(x.shape) == 4 else ((), "")
            self._add(name, x, (*lead, self.cut.states, 1, x.shape[-1]), axes + "h..")

    def strengths(self, **arrays: Any) -> None:
        """[B, Hs, chunks / 8, 8, C], from `by_chunk`: a number for each token of a state."""
        for name, x in arrays.items():
            self._add(name, x, (1, self.cut.states, 1, *x.shape[3:]), "bht..")

    def starts(self, run: jax.Array | None) -> None:
        """From document numbers [B, T]: 1 where a document starts within the row."""
        if run is None:
            return
        cut = self.cut
        starts = (jnp.diff(run, axis=1, prepend=0) > 0).astype(jnp.float32)
        starts = common.pad_axis(starts, 1, cut.chunks * cut.chunk)
        starts = starts.reshape(self.batch, cut.chunks, 1, cut.chunk)
        self._add("starts", starts, (1, 1, 1, cut.chunk), "bc..")

    def run(self, name: str, body, interpret: bool | str, cost: Any = None) -> list[jax.Array]:
        """Runs ``body(cut, refs)``: refs have the arrays' names, `carry` [n, V, K] is scratch."""
        cut, names = self.cut, (*self.inputs, *self.outputs, "carry")

        def kernel(*refs):
            body(cut, SimpleNamespace(**dict(zip(names, refs, strict=True))))

        return common.kernel_call(
            kernel,
            *(x for x, _ in self.inputs.values()),
            name=name,
            interpret=interpret,
            grid=(self.batch, cut.groups, cut.chunks),
            parallel=2,
            in_specs=[spec for _, spec in self.inputs.values()],
            out_specs=[spec for _, spec in self.outputs.values()],
            out_shape=[shape for shape, _ in self.outputs.values()],
            scratch=[common.vmem((cut.states, cut.value, cut.key))],
            cost=cost,
        )


def ends(cut: Cut) -> tuple[jax.Array, jax.Array]:
    """Whether this is the first and whether it is the last step of a row's group of heads."""
    step = common.program_id(2)
    return step == 0, step == cut.chunks - 1


def transposed(state: jax.Array) -> jax.Array:
    """[n, K, V] to [n, V, K] and back."""
    return jnp.swapaxes(state, 1, 2)


def chunk_index(cut: Cut) -> jax.Array:
    """The chunk of this step."""
    step = common.program_id(2)
    return cut.chunks - 1 - step if cut.reverse else step


def own_strengths(cut: Cut) -> tuple[Any, ...]:
    """Where the chunk's [n, 1, C] lies in a block of `Arrays.strengths`."""
    return 0, slice(None), 0, common.slice_of(chunk_index(cut) % common.SUBLANES, 1)


def load(cut: Cut, ref: Any, width: int, dtype: Any = jnp.float32) -> jax.Array:
    """The chunk's [1, C, heads * width] as [heads, C, width], zeros past T."""
    x = ref[0].astype(dtype)
    rest = cut.time % cut.chunk
    if rest:
        inside = (chunk_index(cut) < cut.chunks - 1) | (common.iota(x.shape, 0) < rest)
        x = jnp.where(inside, x, jnp.zeros_like(x))
    return split(x, width)


def split(x: jax.Array, width: int) -> jax.Array:
    """[R, n * width] -> [n, R, width]."""
    return jnp.stack([x[:, i : i + width] for i in range(0, x.shape[1], width)])


def joined(x: jax.Array) -> jax.Array:
    """Inverse of `split`."""
    return jnp.concatenate(list(x), axis=1)


def store(ref: Any, x: jax.Array) -> None:
    """Inverse of `load`."""
    ref[0] = joined(x.astype(ref.dtype))


def decays(cut: Cut, refs: Any) -> tuple[jax.Array, jax.Array]:
    """Log-decays [n, C, K] of the chunk, and those of a read before the token's own decay."""
    log_decay = load(cut, refs.log_decay, cut.key)
    before = jnp.zeros_like(log_decay)
    if not hasattr(refs, "starts"):
        return log_decay, before
    start = jnp.broadcast_to(column(refs.starts[0]), log_decay.shape) > 0
    return jnp.where(start, common.RESET, log_decay), jnp.where(start, common.RESET, before)


def per_state(cut: Cut, x: jax.Array, sides: int = 1) -> jax.Array:
    """[h sides, C, W] -> [n, sides C, W]: a key head's for each of its states."""
    h, r, _ = cut.heads
    x = x.reshape(h, 1, sides * x.shape[1], x.shape[2])
    return jnp.broadcast_to(x, (h, r, *x.shape[2:])).reshape(h * r, *x.shape[2:])


def per_key(cut: Cut, x: jax.Array, sides: int = 1) -> jax.Array:
    """[n, sides C, W] -> [h sides, C, W]: the sum over a key head's states."""
    h, r, _ = cut.heads
    x = x.reshape(h, r, *x.shape[1:])
    x = sum(x[:, i] for i in range(r))
    return x.reshape(h * sides, x.shape[1] // sides, x.shape[2])


def column(rows: jax.Array) -> jax.Array:
    """[n, 1, C] -> [n, C, 1]."""
    return jnp.sum(_on_diagonal(rows), axis=2, keepdims=True)


def row(columns: jax.Array) -> jax.Array:
    """[n, C, 1] -> [n, 1, C]."""
    return jnp.sum(_on_diagonal(columns), axis=1, keepdims=True)


def _on_diagonal(x):
    """[n, C, C] with the n vectors of C numbers on the diagonals."""
    count, size = x.shape[0], max(x.shape[1:])
    shape = (count, size, size)
    return jnp.where(common.iota(shape, 1) == common.iota(shape, 2), x, 0.0)
