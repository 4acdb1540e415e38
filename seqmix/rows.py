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


def rows_sharding() -> NamedSharding | None:
    """How rows are cut up where this is traced, or None."""
    return _ROWS.get()


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


def cut_refusal(rows: int) -> str | None:
    """Why a kernel cannot run on arrays with `rows` rows as the program is cut up, or None.

    XLA cannot cut a kernel up over devices: each device must be given its own rows, by `rows_on` or
    by the caller's own `jax.shard_map`.
    """
    mesh, sharding = jax.sharding.get_abstract_mesh(), _ROWS.get()
    if mesh.axis_names and set(mesh.manual_axes) == set(mesh.axis_names):
        return None
    if sharding is not None:
        devices = sharding.mesh.size
        return None if rows % devices == 0 else f"{rows} rows do not divide over {devices} devices"
    if jax.device_count() > 1:
        return (
            "there is more than one device, and no rows_on or shard_map says which rows are whose"
        )
    return None


def on_own_rows(function: Callable[..., Any], shared: Any, *arrays: Any) -> Any:
    """`by_rows` for a kernel: every result has the leading axis of rows.

    It may be differentiated with respect to the arrays, not to what is shared.

    Args:
      function: called as ``function(shared, *arrays)``.
      shared: a tree of arrays that every device gets whole.
      *arrays: trees of arrays with one leading axis.
    """
    sharding = _ROWS.get()
    if sharding is None:
        return function(shared, *arrays)
    spec = sharding.spec
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(), *[spec] * len(arrays)),
        out_specs=spec,
        check_vma=False,  # kernels do not say over which axes their results vary
    )(shared, *arrays)
