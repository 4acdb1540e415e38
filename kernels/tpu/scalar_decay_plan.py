# SPDX-License-Identifier: Apache-2.0
"""How the scalar-decay kernels cut their arrays: tiles of heads, blocks of chunks, and the VMEM."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seqmix_kernels.options import Options
from seqmix_kernels.tpu import _common as common

# 128 tokens fill the matrix unit of v5e and v5p; pairs of tokens cost as much as states there.
DEFAULT_CHUNK, LONGEST_CHUNK = 128, 256
BLOCK_CHUNKS = 4  # between stored states
TILE_OUTPUTS = 4  # heads in a step of the grid: independent products to fill the units with
VMEM_BUDGET = 32 * 2**20  # well below `common.VMEM_LIMIT`


class Plan(NamedTuple):
    """Sizes that a kernel is built for.

    Attributes:
      scale: factor on the output.
      out_dtype: dtype of the output.
      low: dtype of matrix operands.
      keys: key heads h.
      values: values a key head r.
      queries: queries a state x.
      key: K as the kernel sees it, padded where no tile of heads would lie on the lanes.
      value: V, likewise.
      batch: B.
      time: T.
      chunk: tokens C of a chunk, a multiple of 16.
      block_chunks: chunks of a block.
      tile_keys: key heads of a tile.
      tile_values: values of each; all r when tile_keys > 1.
      sizes: bytes of an element of q, k, v and out.
    """

    scale: float
    out_dtype: Any
    low: Any
    keys: int
    values: int
    queries: int
    key: int
    value: int
    batch: int
    time: int
    chunk: int
    block_chunks: int
    tile_keys: int
    tile_values: int
    sizes: tuple[int, int, int, int]

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.chunk * self.block_chunks

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return common.ceil_div(self.time, self.block)

    @property
    def ragged(self) -> bool:
        """Whether the last block goes beyond the row."""
        return self.time % self.block != 0

    @property
    def splits(self) -> int:
        """Tiles of one key head."""
        return self.values // self.tile_values

    @property
    def tile_states(self) -> int:
        """States of a tile."""
        return self.tile_keys * self.tile_values

    @property
    def pieces(self) -> int:
        """Of log-decays (`common.pieces`): two hold more digits than bfloat16 operands."""
        return 2 if self.low == jnp.bfloat16 else 3

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Rows, groups of key heads, blocks in order, tiles of a key head."""
        return (self.batch, self.keys // self.tile_keys, self.blocks, self.splits)

    @property
    def widths(self) -> dict[str, int]:
        """Lanes of a tile in q, k, v and out."""
        return {
            "q": self.tile_keys * self.queries * self.key,
            "k": self.tile_keys * self.key,
            "v": self.tile_states * self.value,
            "out": self.tile_states * self.queries * self.value,
        }

    def specs(self, *, reverse: bool) -> dict[str, Any]:
        """The blocks of each array; `reverse` takes the last block of tokens first.

        States are read in the first step of a row and written in the last: at other steps their
        place does not change, so that nothing is moved.
        """
        splits, last = self.splits, self.blocks - 1

        def at(place):
            def index(b, tile, step, split):
                block = last - step if reverse else step
                return place(b, tile, block, tile * splits + split)

            return index

        def tokens(width, shared):
            place = (lambda b, t, n, s: (b, n, t)) if shared else (lambda b, t, n, s: (b, n, s))
            return common.BlockSpec((1, self.block, width), at(place))

        def first(b, tile, step, split):
            split = jnp.where(step == 0, split, splits - 1) if splits > 1 else split
            return (b, tile * splits + split, 0, 0)

        def final(b, tile, step, split):
            split = jnp.where(step == last, split, 0) if splits > 1 else split
            return (b, tile * splits + split, 0, 0)

        state = (1, self.tile_states, self.key, self.value)
        joined = (1, 1, 1, self.key, self.widths["v"])
        rows = (1, 1, self.block_chunks, self.tile_states, self.chunk)
        return {
            **{name: tokens(width, name in "qk") for name, width in self.widths.items()},
            "rows": common.BlockSpec(rows, at(lambda b, t, n, s: (b, s, n, 0, 0))),
            "first": common.BlockSpec(state, first),
            "final": common.BlockSpec(state, final),
            "states": common.BlockSpec(joined, at(lambda b, t, n, s: (b, n, s, 0, 0))),
        }

    def shapes(self, q: jax.Array, k: jax.Array, v: jax.Array) -> dict[str, Any]:
        """Shape and dtype of each array as the kernels see it; gradients are like theirs."""
        states = self.keys * self.values
        row = (self.batch, self.time)
        chunks = self.blocks * self.block_chunks
        tiles = states // self.tile_states
        f32 = jnp.float32
        shapes = {
            "q": ((*row, self.keys * self.queries * self.key), q.dtype),
            "k": ((*row, self.keys * self.key), k.dtype),
            "v": ((*row, states * self.value), v.dtype),
            "out": ((*row, states * self.queries * self.value), self.out_dtype),
            "rows": ((self.batch, tiles, chunks, self.tile_states, self.chunk), f32),
            "final": ((self.batch, states, self.key, self.value), f32),
            "states": ((self.batch, self.blocks, tiles, self.key, self.widths["v"]), f32),
        }
        return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}

    def scratch(self, *, backward: bool) -> list[Any]:
        """What stays in VMEM: the states of a key head's tiles, side by side on the lanes.

        Backward, these are the gradients of the states, and there are the states that enter the
        block's chunks, and sums over the tiles.
        """
        joined = (self.key, self.widths["v"])
        kept = [(self.splits, *joined)]
        if backward:
            kept.append((self.block_chunks, *joined))
            if self.splits > 1:
                kept += [(self.block, self.widths["q"]), (self.block, self.widths["k"])]
        return [common.vmem(shape) for shape in kept]

    def vmem_bytes(self) -> int:
        """VMEM of the backward kernel: two buffers an array, the scratch, values in between."""
        q, k, v, out = (
            common.round_up(w, common.LANES) * self.block * size
            for w, size in zip(self.widths.values(), self.sizes, strict=True)
        )
        state = _padded(self.key, self.value) * self.tile_states
        joined = _padded(self.key, self.widths["v"])
        rows = self.block_chunks * _padded(self.tile_states, self.chunk)
        buffers = 2 * (2 * (q + k + v) + out + 2 * (state + rows) + joined)
        scratch = joined * (self.splits + self.block_chunks)
        if self.splits > 1:
            scratch += _padded(self.block, self.widths["q"]) + _padded(self.block, self.widths["k"])
        return buffers + scratch + 40 * _padded(self.chunk, self.chunk) + 2 * joined

    def cost(self, shapes: dict[str, Any], *, backward: bool) -> Any:
        """What the kernel costs, for XLA's scheduler."""
        pairs, key, value = self.chunk, self.key, self.value
        sums = pairs * self.pieces
        if backward:
            products = pairs * (3 * key + 2 * value + 2 * sums) + 6 * key * value
        else:
            products = pairs * (key + value + sums) + 2 * key * value
        tokens = self.batch * self.blocks * self.block * self.keys * self.values * self.queries
        size = {n: math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for n, s in shapes.items()}
        return common.CostEstimate(
            flops=2 * tokens * products,
            bytes_accessed=sum(size.values()) * (2 if backward else 1),
            transcendentals=tokens * pairs,
        )

    def flat(self, x: jax.Array, width: int) -> jax.Array:
        """[B, T, heads, w] -> [B, T, heads * width]."""
        return common.pad_axis(x, 3, width).reshape(*x.shape[:2], -1)

    def wide(self, state: jax.Array) -> jax.Array:
        """States with the kernel's widths."""
        return common.pad_axis(common.pad_axis(state, 2, self.key), 3, self.value)

    def rows(self, gates: jax.Array) -> jax.Array:
        """[B, T, states] -> [B, tiles, chunks, states of a tile, C], 0 beyond T."""
        batch, chunks = self.batch, self.blocks * self.block_chunks
        gates = common.pad_axis(gates, 1, chunks * self.chunk)
        gates = gates.reshape(batch, chunks, self.chunk, -1, self.tile_states)
        return jnp.transpose(gates, (0, 3, 1, 4, 2))

    def tokens(self, rows: jax.Array) -> jax.Array:
        """The inverse of `rows`."""
        chunks = self.blocks * self.block_chunks
        gates = jnp.transpose(rows, (0, 2, 4, 1, 3))
        return gates.reshape(self.batch, chunks * self.chunk, -1)[:, : self.time]


def make_plan(options: Options, arrays: tuple[jax.Array, ...]) -> Plan | None:
    """The cut for a call, None where nothing fits into VMEM; arguments as for `refusal`."""
    q, k, v, _ = arrays
    heads, time = options.heads, q.shape[1]
    asked = min(options.chunk_size or DEFAULT_CHUNK, LONGEST_CHUNK, time)
    chunk = common.round_up(asked, 16)
    low = common.operand_dtype(q, k, v)
    dtypes = (q.dtype, k.dtype, v.dtype, options.out_dtype)
    width, tiles = k.shape[-1], _tiles(heads, k.shape[-1], v.shape[-1])
    value = v.shape[-1]
    if not tiles:
        width, value = (common.round_up(w, common.LANES) for w in (width, value))
        tiles = _tiles(heads, width, value)
    for tile_keys, tile_values in tiles:
        count = min(BLOCK_CHUNKS, common.ceil_div(time, chunk))
        while count:
            plan = Plan(
                scale=options.scale,
                out_dtype=jnp.dtype(options.out_dtype),
                low=low,
                keys=heads.keys,
                values=heads.values,
                queries=heads.queries,
                key=width,
                value=value,
                batch=q.shape[0],
                time=time,
                chunk=chunk,
                block_chunks=count,
                tile_keys=tile_keys,
                tile_values=tile_values,
                sizes=tuple(jnp.dtype(d).itemsize for d in dtypes),
            )
            if plan.vmem_bytes() <= VMEM_BUDGET:
                return plan
            count //= 2
    return None


def _tiles(heads: Any, key: int, value: int) -> list[tuple[int, int]]:
    """(key heads, values) of the tiles that lie on whole lanes, the best first."""

    def whole(count, total, width):
        return count == total or count * width % common.LANES == 0

    h, r, x = heads.keys, heads.values, heads.queries
    tiles = []
    for keys in _divisors(h):
        for values in _divisors(r) if keys == 1 else (r,):
            states = keys * values
            if keys * values * x > 4 * TILE_OUTPUTS and (keys > 1 or values > 1):
                continue
            if (
                whole(keys * x, h * x, key)
                and whole(keys, h, key)
                and whole(states, h * r, value)
                and whole(states * x, h * r * x, value)
            ):
                tiles.append((keys, values))
    # Wide heads are enough work one by one.
    wanted = min(TILE_OUTPUTS, max(1, TILE_OUTPUTS * common.LANES**2 // (key * value)))
    return sorted(tiles, key=lambda t: abs(t[0] * t[1] * x - wanted))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _padded(rows: int, columns: int) -> int:
    """Bytes of a float32 matrix in VMEM."""
    return 4 * common.round_up(rows, common.SUBLANES) * common.round_up(columns, common.LANES)
