# SPDX-License-Identifier: Apache-2.0
"""The rows that `kernels.py` measures: shapes, arrays, and the forms that compute them."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seqmix import mixers

BANDWIDTH = 4.27e12
"""Bytes a second of a large copy on an H200, what floors are counted with."""
SWEPT = ("simple_gla", "ssd", "gated_delta_rule")
LENGTHS = (2048, 8192, 32_768, 131_072, 262_144)
HEADS = (8, 128, 512, 32, 64, 256)
DOCUMENTS = 16


class Row(NamedTuple):
    """One shape of one mixer.

    Attributes:
      mixer: name in `seqmix.mixers`.
      batch: rows.
      time: tokens of a row.
      keys: key heads (groups of an SSM).
      values: value heads.
      key: K.
      value: V.
      documents: documents packed into each row, 1 for none.
      known: ms on an H200 that other code is known to need, forward and gradients alone.
    """

    mixer: str
    batch: int
    time: int
    keys: int
    values: int
    key: int
    value: int
    documents: int = 1
    known: tuple[float | None, float | None] = (None, None)

    @property
    def name(self) -> str:
        """Name in tables."""
        heads = f"H{self.values}" if self.keys == self.values else f"H{self.keys}/{self.values}"
        width = f"D{self.key}" if self.key == self.value else f"K{self.key} V{self.value}"
        packed = f" {self.documents} documents" if self.documents > 1 else ""
        return f"{self.mixer} B{self.batch} T{self.time} {heads} {width}{packed}"

    @property
    def floor(self) -> tuple[float, float]:
        """Ms of the least bytes: forward (arrays in, out), and forward + backward.

        The backward reads the arrays and the gradient of the output again, and writes a gradient
        of each array.
        """
        taken = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes(self)))
        out = self.batch * self.time * self.values * self.value * 2
        return tuple(n / BANDWIDTH * 1e3 for n in (taken + out, 3 * taken + 2 * out))


def _swept(mixer: str, batch: int, time: int, states: int, documents: int = 1) -> Row:
    """A row with 16 heads of 128, or 32 of N = 128 and P = 64 for an SSM, or fewer."""
    if mixer == "ssd":
        return Row(mixer, batch, time, 1, states, 128, 64, documents)
    return Row(mixer, batch, time, states, states, 128, 128, documents)


def _most(mixer: str) -> int:
    return 32 if mixer == "ssd" else 16


def _by_states(mixer: str, states: int) -> Row:
    heads = min(states, _most(mixer))
    return _swept(mixer, states // heads, 4096, heads)


GROUPS = {
    # Known: jax-linear-attention 0.1.0; fla 0.6.0 for linear attention, its second number forward
    # and backward; for grouped heads what FlashInfer and FlashQLA publish.
    "peers": (
        Row("simple_gla", 8, 4096, 16, 16, 128, 128, known=(0.173, 0.969)),
        Row("gated_delta_rule", 8, 4096, 16, 16, 128, 128, known=(0.333, 1.312)),
        Row("ssd", 8, 4096, 1, 32, 128, 64, known=(0.245, 1.189)),
        Row("simple_gla", 1, 32768, 16, 16, 128, 128, known=(0.307, 1.215)),
        Row("gated_delta_rule", 1, 32768, 16, 16, 128, 128, known=(0.560, 1.710)),
        Row("ssd", 1, 32768, 1, 32, 128, 64, known=(0.373, 1.419)),
        Row("simple_gla", 8, 4096, 32, 32, 64, 64, known=(0.156, 0.779)),
        Row("gated_delta_rule", 8, 4096, 32, 32, 64, 64, known=(0.394, 1.394)),
        Row("gated_delta_rule", 1, 8192, 16, 64, 128, 128, known=(0.392, None)),
        Row("delta_rule", 8, 4096, 16, 16, 128, 128, known=(0.329, 1.267)),
        Row("delta_rule", 1, 32768, 16, 16, 128, 128, known=(0.549, 1.697)),
        Row("gated_delta_rule", 1, 8192, 16, 32, 128, 128, known=(0.280, 0.789)),
        Row("gated_delta_rule", 1, 32768, 16, 32, 128, 128, known=(0.877, 2.515)),
        Row("gated_delta_rule", 1, 32768, 16, 64, 128, 128, known=(1.521, None)),
        Row("gated_delta_rule", 1, 8192, 32, 32, 128, 128, known=(0.283, None)),
        Row("linear_attention", 8, 4096, 16, 16, 128, 128, known=(0.371, 1.893)),
        Row("linear_attention", 1, 32768, 16, 16, 128, 128, known=(0.744, 3.047)),
        Row("linear_attention", 8, 4096, 32, 32, 64, 64, known=(0.394, 1.820)),
    ),
    "packed": tuple(
        _swept(mixer, batch, 32_768 // batch, _most(mixer), DOCUMENTS)
        for batch in (8, 1)
        for mixer in SWEPT
    ),
    "lengths": tuple(
        _swept(mixer, LENGTHS[-1] // time, time, _most(mixer))
        for time in LENGTHS
        for mixer in SWEPT
    ),
    "heads": tuple(_by_states(mixer, states) for states in HEADS for mixer in SWEPT),
}


def arrays(row: Row) -> dict[str, jax.Array]:
    """Inputs by argument name."""
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (row.batch, row.time)

    def normal(i, *rest):
        return jax.random.normal(keys[i], (*shape, *rest))

    q, k = normal(0, row.keys, row.key), normal(1, row.keys, row.key)
    k = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(jnp.bfloat16)
    q, v = q.astype(jnp.bfloat16), normal(2, row.values, row.value).astype(jnp.bfloat16)
    gate = normal(3, row.values)
    if row.mixer == "ssd":
        rates = -jnp.exp(jax.random.uniform(keys[4], (row.values,), minval=-3.0, maxval=2.0))
        return {"x": v, "dt": jax.nn.softplus(gate - 1), "A": rates, "B": k, "C": q}
    found = {"q": q, "k": k, "v": v}
    if row.mixer in ("simple_gla", "gated_delta_rule"):
        found["log_decay"] = -jnp.exp(gate * 1.5 - 2)
    if row.mixer in ("delta_rule", "gated_delta_rule"):
        found["beta"] = jax.nn.sigmoid(normal(5, row.values))
    return found


def shapes(row: Row) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of `arrays`."""
    return jax.eval_shape(lambda: arrays(row))


def segments(row: Row) -> np.ndarray | None:
    """Documents of random lengths, the same in every row; their borders are no chunks'."""
    if row.documents == 1:
        return None
    borders = np.random.default_rng(0).choice(row.time - 1, row.documents - 1, replace=False) + 1
    ids = 1 + np.searchsorted(np.sort(borders), np.arange(row.time), side="right")
    return np.broadcast_to(ids.astype(np.int32), (row.batch, row.time))


type Form = Callable[[dict[str, jax.Array], jax.Array | None], Any]
"""(arrays, segment ids) -> (out, state)."""


def ours(row: Row, impl: str) -> Form:
    """One of our forms."""
    mixer, options = getattr(mixers, row.mixer), {"impl": impl}
    if row.mixer == "linear_attention":
        options |= {"feature_map": "identity", "normalize": False}
    return lambda xs, ids: mixer(**xs, segment_ids=ids, **options)


def has_peer() -> bool:
    """Whether jax-linear-attention can be imported."""
    return importlib.util.find_spec("jla") is not None


def peer(row: Row) -> Form:
    """The same of jax-linear-attention."""
    scalar = importlib.import_module("jla.ops.mosaic_gpu.scalar_gate")
    delta = importlib.import_module("jla.ops.mosaic_gpu.gated_delta_rule")

    def call(xs, ids):
        options = {"output_final_state": True, "segment_ids": ids}
        if row.mixer == "ssd":
            values = (xs["x"] * xs["dt"][..., None]).astype(xs["x"].dtype)
            decay = xs["dt"] * xs["A"]
            return scalar.simple_gla(xs["C"], xs["B"], values, decay, scale=1.0, **options)
        qkv = xs["q"], xs["k"], xs["v"]
        if row.mixer == "simple_gla":
            return scalar.simple_gla(*qkv, xs["log_decay"], **options)
        if row.mixer == "linear_attention":
            still = jnp.zeros((row.batch, row.time, row.values), jnp.float32)
            return scalar.simple_gla(*qkv, still, scale=1.0, **options)
        if row.mixer == "delta_rule":
            return delta.delta_rule(*qkv, xs["beta"], **options)
        return delta.gated_delta_rule(*qkv, xs["log_decay"], xs["beta"], **options)

    return call


def form(row: Row, name: str) -> Form:
    """One of our forms by name, or 'peer'."""
    return peer(row) if name == "peer" else ours(row, name)


def both(function: Form) -> Callable[..., Any]:
    """(arrays, segment ids, cotangents) -> (results, gradients of the arrays)."""

    def call(xs, ids, cotangents):
        results, pull = jax.vjp(lambda xs: function(xs, ids), xs)
        return results, pull(cotangents)[0]

    return call


def gradients(function: Form) -> Callable[..., Any]:
    """As `both`, but gradients only: what a forward alone needs may be left out."""
    return lambda *args: both(function)(*args)[1]


def cotangents(results: Any) -> Any:
    """Random numbers in the shapes and dtypes of (out, state)."""
    keys = iter(jax.random.split(jax.random.key(9), 2))
    return jax.tree.map(
        lambda s: jax.random.normal(next(keys), s.shape, jnp.bfloat16).astype(s.dtype), results
    )
