# SPDX-License-Identifier: Apache-2.0
"""The one place where the GPU kernels meet Pallas: Mosaic GPU for Hopper, and its interpreter.

One Pallas thread is one warpgroup. Operands of matrix products are bfloat16, sums float32. Tiles
live in registers in the WGMMA layout; `ROWS` and `COLS` are layouts of a vector with one value per
row or column of such a tile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from seqmix_kernels.target import target

CHUNK = 64
WGMMA = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLS = plgpu.Layout.WGMMA.reduce(0)
# Shared memory that one block may use on Hopper, less what the compiler keeps.
SMEM_BYTES = 227 * 1024
# Streaming multiprocessors of an H100 or H200 (SXM).
MULTIPROCESSORS = 132
MAX_GRID_YZ = 65535
# Registers a thread of two warpgroups that carry a state and of two that read it: four have 128
# each to begin with. With fewer than 112 for the first, ptxas serialises all products.
OWNER, READER = 120, 136

Barrier = plgpu.Barrier
SMEM = plgpu.SMEM
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
commit_smem = plgpu.commit_smem
copy_in = plgpu.copy_gmem_to_smem
copy_out = plgpu.copy_smem_to_gmem
commit_copies_out = plgpu.commit_smem_to_gmem_group
wait_copies_out = plgpu.wait_smem_to_gmem
load = plgpu.load
ds = pl.ds
when = pl.when


def chip_refusal() -> str | None:
    """Why the present GPU cannot run these kernels, or None. Without a GPU, none is known."""
    if target().interpret or jax.default_backend() != "gpu":
        return None
    found = getattr(jax.devices()[0], "compute_capability", "unknown")
    if found == "9.0":
        return None
    return f"the kernels are for compute capability 9.0 (Hopper), this GPU has {found}"


def tile(shape: Sequence[int], dtype: Any) -> Any:
    """Shared memory [..., rows, columns] in the tiling that TMA and the tensor cores share."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def union(*groups: Sequence[Any]) -> Any:
    """Groups of buffers that lie in the same shared memory, one group in use at a time."""
    return plgpu.RefUnion(*groups)


def depth(stage_bytes: int, fixed_bytes: int) -> int:
    """Stages of input, two to four, that fit in shared memory beside `fixed_bytes`."""
    # Every buffer is aligned to 1 KiB; barriers are small.
    return max(2, min(4, (SMEM_BYTES - 4096 - fixed_bytes) // stage_bytes))


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    scratch: Any,
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    warpgroups: int = 1,
) -> Callable[..., Any]:
    """A kernel whose block is `warpgroups` warpgroups, told apart by ``lax.axis_index("wg")``."""
    interpret = target().interpret
    threads = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=grid_names,
        # No scratch space for sums across warps: it is one for all warpgroups, which would race.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name=name,
        interpret=(
            plgpu.InterpretGPUParams(detect_races=interpret == "races") if interpret else None
        ),
        **threads,
    )


def registers(count: int, action: str) -> None:
    """Gives the warpgroup more registers a thread, or takes some away."""
    if not target().interpret:
        plgpu.set_max_registers(count, action=action)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """A float32 tile of zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def is_causal() -> jax.Array:
    """[64, 64] tile of whether row >= column.

    To be called where it is used: the compiler would move a mask made of constants out of the loop
    over the chunks, where it takes registers that the loop needs. The barrier keeps it in.
    """
    rows, columns = token_numbers()
    return rows >= columns


def is_later() -> jax.Array:
    """The transpose of `is_causal`: whether column >= row."""
    rows, columns = token_numbers()
    return columns >= rows


def token_numbers() -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a [64, 64] tile, as float32; see `is_causal`."""

    def counted(layout):
        return plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout).astype(jnp.float32)

    shape, rows = (CHUNK, CHUNK), lax.optimization_barrier(counted(ROWS))
    return per_row(rows, shape), per_column(counted(COLS), shape)


def prefix_sums(raw: Any, sums: Any) -> jax.Array:
    """Inclusive sums of a chunk's 64 numbers, as a `ROWS` vector and in shared memory.

    Args:
      raw: [64] float32 in shared memory.
      sums: [2, 64] float32 shared memory that gets the sums twice: a vector that is read both by
        row and by column must lie in two places. Another warp sees them after `commit_smem`.
    """
    terms = per_column(load(raw, layout=COLS), (CHUNK, CHUNK))
    total = jnp.where(is_causal(), terms, 0.0).sum(axis=1)
    for i in range(2):
        sums.at[i][...] = total
    return total


def unknown_zero(log_decay: jax.Array) -> jax.Array:
    """An int32 zero that the compiler cannot know; `log_decay` is any number that is not above 0.

    Added to the indices of tiles. Swizzled addresses are many to a tile, and where they do not
    change the compiler computes them all before the loop over the chunks: it runs out of registers.
    """
    return jnp.where(log_decay > 1.0, 1, 0)


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """Row (axis 0) or column (axis 1) numbers of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def per_row(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A `ROWS` vector as a tile that is constant along each row."""
    return lax.broadcast_in_dim(vector, shape, [0])


def per_column(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A `COLS` vector as a tile that is constant along each column."""
    return lax.broadcast_in_dim(vector, shape, [1])


def overlapped(
    terms: Sequence[Sequence[tuple[Any, Any]]], work: Callable[[], Any]
) -> tuple[list[jax.Array], Any]:
    """Sums ``a @ b + ...`` on the tensor cores, and what the warpgroup does while they run.

    Args:
      terms: for each sum its (a, b): a [M, K] a bfloat16 tile in shared memory or registers,
        b [K, N] one in shared memory.
      work: reads nothing that the products write.

    Returns:
      The sums, float32 tiles in registers, and the result of `work`.
    """
    if target().interpret:  # the interpreter has no left operand in registers
        sums = [sum(_plain(a, b) for a, b in pairs) for pairs in terms]
        done = work()
        commit_smem()  # the tensor cores read memory as TMA does, these products do not
        return sums, done

    def issue(*sums):
        for total, pairs in zip(sums, terms, strict=True):
            for a, b in pairs:
                plgpu.wgmma(total, a, b)
        done = work()
        return tuple(total[...] for total in sums), done

    shapes = [plgpu.ACC((p[0][0].shape[0], p[0][1].shape[1]), jnp.float32) for p in terms]
    sums, done = pl.run_scoped(issue, *shapes)
    # A wait for the tensor cores is no data dependence: without a barrier the compiler may move
    # arithmetic on a sum before it.
    return [lax.optimization_barrier(x) for x in sums], done


def accumulated(*terms: tuple[Any, Sequence[tuple[Any, Any]]]) -> list[jax.Array]:
    """Tiles ``start + a @ b + ...``, issued together and awaited once.

    Args:
      *terms: (start, products) each: start a float32 tile in registers or a shape (then zeros), and
        (a, b) as in `overlapped`.
    """
    if target().interpret:
        starts = (0.0 if isinstance(start, tuple) else start for start, _ in terms)
        sums = [
            sum((_plain(a, b) for a, b in pairs), start)
            for start, (_, pairs) in zip(starts, terms, strict=True)
        ]
        commit_smem()
        return sums

    def issue(sums):
        for total, (_, pairs) in zip(sums, terms, strict=True):
            for a, b in pairs:
                plgpu.wgmma(total, a, b)

    def issue_and_read(*sums):
        issue(sums)
        return tuple(total[...] for total in sums)

    if all(isinstance(start, tuple) for start, _ in terms):
        fresh = (plgpu.ACC(start, jnp.float32) for start, _ in terms)
        sums = pl.run_scoped(issue_and_read, *fresh)
    else:
        starts = [zeros(s) if isinstance(s, tuple) else s for s, _ in terms]
        sums = pl.run_state(issue)(tuple(plgpu.ACC.init(s) for s in starts))
    return [lax.optimization_barrier(x) for x in sums]


def products(*terms: Sequence[tuple[Any, Any]]) -> list[jax.Array]:
    """Sums ``a @ b + ...``, issued together and awaited once; see `overlapped`."""
    return accumulated(*(((p[0][0].shape[0], p[0][1].shape[1]), p) for p in terms))


def accumulate(*products: tuple[jax.Array, Any, Any]) -> list[jax.Array]:
    """Sums ``init + a @ b``, issued together and awaited once; `init` is a tile in registers."""
    return accumulated(*((init, [(a, b)]) for init, a, b in products))


def _plain(a, b):
    a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def join(done: Any) -> None:
    """Waits for all warpgroups of the block: none may leave while another uses the tensor cores."""
    plgpu.barrier_arrive(done)
    plgpu.barrier_wait(done)


def foldable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `jax.vmap` run a function of rows once on all lanes' rows: kernels have no rule for it.

    Args:
      function: of trees of arrays that all have rows as the leading axis, like its results.
    """
    function = jax.custom_batching.custom_vmap(function)

    @function.def_vmap
    def fold(lanes, batched, *arguments):
        def rows(x, has_lanes):
            x = x if has_lanes else jnp.broadcast_to(x, (lanes, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = function(*jax.tree.map(rows, arguments, tuple(batched)))
        out = jax.tree.map(lambda x: x.reshape(lanes, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return function
