# SPDX-License-Identifier: Apache-2.0
"""What the roles of the delta rule's backward sweep share: memory, barriers, registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu._common import (
    SMEM,
    WGMMA,
    Barrier,
    accumulated,
    load,
    registers,
    tile,
    union,
)
from seqmix_kernels.gpu.calls import WIDTH
from seqmix_kernels.gpu.delta_pieces import SQUARE, VECTORS, C, Plan

SUMS = 6
"""What a block says about gates: straddling pairs, reads, writes; beta from pairs; what passes
through; beta from writes."""


def role_registers(role: str, units: int, full_pass: bool) -> None:
    """Sets a role's registers; of four warpgroups (or three) a launch gives each 128 (168)."""
    if not full_pass:
        counts = {"feeder": 40, "owner": 232, "queries": 160}
    elif units == 2:
        counts = {"feeder": 24, "owner": 224, "queries": 136, "keys": 128}
    else:
        counts = {"feeder": 32, "owner": 136, "queries": 184, "keys": 160}
    action = "increase" if counts[role] > (128 if full_pass else 168) else "decrease"
    registers(counts[role], action)


def scratch(p: Plan, dtype: Any, full_pass: bool) -> dict[str, Any]:
    """Shared memory and barriers by name; a pass that finds only states needs fewer."""
    units, halves = p.units, p.key // WIDTH
    names = {
        "tiles": union(
            [tile((2 * halves, C, WIDTH), dtype)] * 2,  # q, then dq; k, then dk
            [SMEM((units * halves, WIDTH, WIDTH), jnp.float32)],
        ),
        "do_s": tile((2 * units, C, WIDTH), dtype),
        "g_s": SMEM((2, 2, VECTORS, C), jnp.float32),
        "t_s": tile((1, C, C), dtype),
        # A, then X of its pairs, then dA; of the rule's pairs the decays, then X, then B.
        "pairs_s": tile((2 if full_pass else 1, C, C), dtype),
        "ds_s": tile((units * halves, WIDTH, WIDTH), dtype),
        "dv_s": tile((units, C, WIDTH), dtype),  # beta dV', then dV
        "numbers_s": SMEM((2, 2, C), jnp.float32),
        "full": Barrier(num_arrivals=2 + 2 * halves + units, num_barriers=2),
        "free": Barrier(num_arrivals=2, num_barriers=2),
        "t_full": Barrier(),
        "t_free": Barrier(),
        "a_ready": Barrier(),
        "a_free": Barrier(),
        "begun": Barrier(num_arrivals=units * halves),
        "joined": Barrier(num_arrivals=2),
        "left": Barrier(num_arrivals=4 if full_pass else 3),
    }
    if not full_pass:
        return names
    return names | {
        "new_s": tile((units, C, WIDTH), dtype),
        "s_s": tile((units * halves, WIDTH, WIDTH), dtype),
        "sums_s": SMEM((2, SUMS, C), jnp.float32),
        "new_full": Barrier(num_arrivals=units),
        "new_free": Barrier(num_arrivals=2),
        "s_full": Barrier(num_arrivals=units * halves),
        "s_free": Barrier(num_arrivals=2),
        "ds_full": Barrier(),
        "ds_free": Barrier(num_arrivals=2),
        "dv_full": Barrier(),
        "dv_free": Barrier(num_arrivals=2),
        "paired": Barrier(num_arrivals=2),
        "ended": Barrier(num_arrivals=3),
    }


def each(tiles) -> list:
    """((i, j), tile) of all tiles[i][j]."""
    return [((i, j), x) for i, row in enumerate(tiles) for j, x in enumerate(row)]


held = lax.optimization_barrier
"""What is computed before it stays there: the compiler may not wait until it is used."""


def tiles_of(tiles, at, count: int) -> list:
    """The `count` tiles [64, 64] of number `at`."""
    return [tiles.at[at * count + h] for h in range(count)]


def sum_of_products(left, right) -> jax.Array:
    """The sum of all ``a @ b``, [64, 64]."""
    return accumulated((SQUARE, list(zip(left, right, strict=True))))[0]


def row_sums(x: jax.Array, tile_s) -> jax.Array:
    """Sums along the rows of x times a tile in shared memory, one each."""
    return (x * load(tile_s, layout=WGMMA).astype(jnp.float32)).sum(axis=1)


class Names:
    """A block's shared memory and barriers, by name."""

    def __init__(self, shared: dict):
        self.__dict__.update(shared)
