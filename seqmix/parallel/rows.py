# SPDX-License-Identifier: Apache-2.0
"""Work that each device does on its own rows, inside a program over a mesh."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

_ROWS: contextvars.ContextVar[NamedSharding | None] = contextvars.ContextVar("rows", default=None)


@contextlib.contextmanager
def rows_on(sharding: NamedSharding | None) -> Iterator[None]:
    """While it is open, `by_rows` cuts work up as ``sharding`` does a batch; None: not at all."""
    token = _ROWS.set(sharding)
    try:
        yield
    finally:
        _ROWS.reset(token)


def by_rows(function: Callable[..., Any], shared: Any, *arrays: Any) -> Any:
    """``function(shared, *arrays)``, on each device for its own rows where `rows_on` says so.

    For what mixes rows without need, such as sorting them: XLA would gather all rows on each
    device.

    Args:
      function: its result has the same leading axis as the arrays, and does not depend on how that
        is cut.
      shared: a tree of arrays that every device gets whole.
      *arrays: trees of arrays with one leading axis.
    """
    sharding, rows = _ROWS.get(), jax.tree.leaves(arrays)[0].shape[0]
    if sharding is None or rows % sharding.mesh.size:
        return function(shared, *arrays)
    spec, axes = sharding.spec, sharding.mesh.axis_names

    def local(shared: Any, *arrays: Any) -> Any:
        # Its gradient is the sum over the devices.
        return function(jax.lax.pcast(shared, axes, to="varying"), *arrays)

    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(), *[spec] * len(arrays)),
        out_specs=spec,
    )(shared, *arrays)
