# SPDX-License-Identifier: Apache-2.0
"""Shapes of published models that the kernels are compiled and counted at.

A name is that of the model's preset where it has one, with what differs behind it: the width of its
states, or the tokens of a row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seqmix_kernels.options import Heads, Options


class Call(NamedTuple):
    """Arguments of a kernel module's functions, as `jax.ShapeDtypeStruct`s.

    Attributes:
      options: static options.
      shared: parameters without batch and time.
      arrays: [B, T, ...].
      state: [B, ...] float32.
      run: [B, T] document numbers, or None.
    """

    options: Options | None
    shared: tuple[Any, ...]
    arrays: tuple[Any, ...]
    state: Any
    run: Any


class Shape(NamedTuple):
    """One call of a kernel family.

    Attributes:
      family: name of the kernel module.
      heads: grouping of the heads; None for the elementwise families.
      key: key width K; of the elementwise families the channels D.
      value: value width V; of `selective_scan` the states N of a channel.
      time: tokens T of a row.
      rows: B.
      packed: whether rows hold several documents.
      shared: whether the call has the optional parameter: bonus, or skip connection D.
      dtype: of the large arrays; gates are float32.
    """

    family: str
    heads: Heads | None
    key: int
    value: int = 1
    time: int = 4096
    rows: int = 2
    packed: bool = True
    shared: bool = False
    dtype: Any = jnp.bfloat16

    def call(self) -> Call:
        """The arguments."""
        if self.heads is None:
            return self._elementwise()
        h, row = self.heads, (self.rows, self.time)
        options = Options(h, self.key**-0.5, jnp.dtype(self.dtype))
        vector = self.family.startswith("vector")
        gates = (h.states, self.key) if vector else (h.states,)
        arrays = (
            jax.ShapeDtypeStruct((*row, h.keys * h.queries, self.key), self.dtype),
            jax.ShapeDtypeStruct((*row, h.keys, self.key), self.dtype),
            jax.ShapeDtypeStruct((*row, h.states, self.value), self.dtype),
            _float32(*row, *gates),
        )
        if self.family.endswith("delta"):
            arrays += (_float32(*row, h.states),)
        shared = (_float32(h.states, self.key),) if self.shared else ()
        state = _float32(self.rows, h.states, self.key, self.value)
        return Call(options, shared, arrays, state, self._documents(jnp.int32))

    def _elementwise(self) -> Call:
        row, width, states = (self.rows, self.time), self.key, self.value
        x, gate = jax.ShapeDtypeStruct((*row, width), self.dtype), _float32(*row, width)
        if self.family == "linear_scan":
            return Call(None, (), (x, gate), _float32(self.rows, width), None)
        group = jax.ShapeDtypeStruct((*row, states), self.dtype)
        shared = (_float32(width, states), *((_float32(width),) if self.shared else ()))
        state = _float32(self.rows, width, states)
        return Call(None, shared, (x, gate, group, group), state, self._documents(jnp.int8))

    def _documents(self, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((self.rows, self.time), dtype) if self.packed else None


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# One shape a family, of the model that the family is known by.
FIRST = {
    "mamba2": Shape("scalar_decay", Heads(1, 80, 1), 128, 64),
    "qwen3_next": Shape("delta", Heads(16, 2, 1), 128, 128),
    "gla": Shape("vector_decay", Heads(4, 1, 1), 256, 512),
    "kimi_linear": Shape("vector_delta", Heads(32, 1, 1), 128, 128),
    "mamba": Shape("selective_scan", None, 5120, 16, shared=True),
    "recurrent_gemma": Shape("linear_scan", None, 2560),
}

SHAPES = FIRST | {
    # scalar decay: groups, equal widths, wide states, narrow states
    "nemotron_h": Shape("scalar_decay", Heads(8, 16, 1), 128, 64),
    "minimax_01": Shape("scalar_decay", Heads(64, 1, 1), 128, 128, packed=False),
    "retnet": Shape("scalar_decay", Heads(16, 1, 1), 256, 512),
    "zamba2": Shape("scalar_decay", Heads(1, 80, 1), 64, 64),
    "simple_gla_grouped_queries": Shape("scalar_decay", Heads(8, 1, 4), 128, 128),
    # delta with scalar decay: widths off the lane grid, no decay's grouping, wide and narrow states
    "olmo_hybrid": Shape("delta", Heads(30, 1, 1), 96, 192),
    "gated_delta_net": Shape("delta", Heads(9, 1, 1), 200, 400),
    "delta_net": Shape("delta", Heads(16, 1, 1), 128, 128, packed=False),
    "gated_delta_net_64": Shape("delta", Heads(32, 1, 1), 64, 64),
    "gated_delta_net_256": Shape("delta", Heads(6, 1, 1), 256, 512),
    "gated_delta_rule_grouped_queries": Shape("delta", Heads(8, 1, 4), 128, 128),
    # vector decay: the bonus form, equal widths
    "rwkv6": Shape("vector_decay", Heads(32, 1, 1), 64, 64, shared=True),
    "hgrn2": Shape("vector_decay", Heads(16, 1, 1), 128, 128),
    "gla_grouped_values": Shape("vector_decay", Heads(4, 4, 1), 128, 128),
    # delta with vector decay
    "kda_64": Shape("vector_delta", Heads(32, 1, 1), 64, 64),
    "kda_256": Shape("vector_delta", Heads(8, 1, 1), 256, 256),
    "kda_grouped_values": Shape("vector_delta", Heads(8, 4, 1), 128, 128),
    # elementwise
    "jamba": Shape("selective_scan", None, 8192, 16),
    "mamba_64": Shape("selective_scan", None, 2048, 64),
    # long rows, odd lengths, float32
    "mamba2_256k": Shape("scalar_decay", Heads(1, 80, 1), 128, 64, time=2**18, rows=1),
    "qwen3_next_256k": Shape("delta", Heads(16, 2, 1), 128, 128, time=2**18, rows=1),
    "gla_64k": Shape("vector_decay", Heads(4, 1, 1), 256, 512, time=2**16, rows=1),
    "kimi_linear_64k": Shape("vector_delta", Heads(32, 1, 1), 128, 128, time=2**16, rows=1),
    "mamba_64k": Shape("selective_scan", None, 5120, 16, time=2**16, rows=1),
    "recurrent_gemma_256k": Shape("linear_scan", None, 2560, time=2**18, rows=1),
    "mamba2_odd": Shape("scalar_decay", Heads(1, 80, 1), 128, 64, time=4097),
    "qwen3_next_odd": Shape("delta", Heads(16, 2, 1), 128, 128, time=4097),
    "mamba2_float32": Shape("scalar_decay", Heads(1, 80, 1), 128, 64, dtype=jnp.float32),
    "qwen3_next_float32": Shape("delta", Heads(16, 2, 1), 128, 128, dtype=jnp.float32),
    "gla_float32": Shape("vector_decay", Heads(4, 1, 1), 256, 512, dtype=jnp.float32),
    "kimi_linear_float32": Shape("vector_delta", Heads(32, 1, 1), 128, 128, dtype=jnp.float32),
    "mamba_float32": Shape("selective_scan", None, 5120, 16, dtype=jnp.float32),
    "recurrent_gemma_float32": Shape("linear_scan", None, 2560, dtype=jnp.float32),
}
