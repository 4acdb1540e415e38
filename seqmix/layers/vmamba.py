# SPDX-License-Identifier: Apache-2.0
"""VMamba's selective scan along four routes over a 2-D grid (arXiv 2401.10166)."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.bidirectional import refuse_cache
from seqmix.layers.initialisation import time_step_bias
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GroupNorm
from seqmix.layers.parameters import ConvolutionParam, Float32Param, NoDecayParam
from seqmix.layers.registry import LayerInfo, register

_ROUTES = 4


@configs.configurable("VMamba")
@dataclasses.dataclass(frozen=True)
class VMambaConfig:
    """Settings of `VMamba`.

    Attributes:
      grid: height and width of the grid that a row of tokens lays out, row by row.
      expand: inner width over model width.
      state_size: states N per channel and route.
      convolution: side of the square depthwise convolution, odd.
      dt_rank: width of the bottleneck that makes the time steps; default: model width / 16, up.
      dt_min, dt_max, dt_floor: time steps start log-uniform in [dt_min, dt_max], at least dt_floor.
      norm_epsilon: epsilon of the layer norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.selective_scan`.
    """

    grid: tuple[int, int] = (16, 16)
    expand: float = 2.0
    state_size: int = 16
    convolution: int = 3
    dt_rank: int | None = None
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_floor: float = 1e-4
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    causal: ClassVar[bool] = False

    def __post_init__(self):
        checks.at_least(self, 1, "state_size", "convolution", "dt_rank", "chunk_size")
        checks.positive(self, "expand", "dt_min", "dt_max", "dt_floor", "norm_epsilon")
        if min(self.grid) < 1:
            raise ValueError(f"VMamba.grid must be height and width >= 1, got {self.grid}")
        if self.convolution % 2 == 0:
            raise ValueError(f"VMamba.convolution must be odd, got {self.convolution}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"VMamba.dt_min must be <= dt_max, got {self.dt_min} > {self.dt_max}")

    def sizes(self, width: int) -> tuple[int, int]:
        """Inner width and the rank of the time steps at this model width.

        Raises:
          ValueError: the inner width is no whole number.
        """
        inner = checks.expanded(self, width)
        return inner, -(-width // 16) if self.dt_rank is None else self.dt_rank

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; each token is met by every route.

        Counts as `MambaConfig.flops_per_token` does.
        """
        inner, rank = self.sizes(width)
        route = 4 * inner * (rank + self.state_size) + 6 * inner * self.state_size
        return 6 * width * inner + 2 * self.convolution**2 * inner + _ROUTES * route

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """0: the layer is not causal, so there is no cache to decode from."""
        return 0


@register("vmamba", VMambaConfig)
class VMamba(nnx.Module):
    """Mamba over a grid: rows, columns, and both backwards, summed where they meet (SS2D).

    x = silu(conv2d(u W)); along each route r: dt = softplus(x W_r,dt_rank W_r,dt + dt_bias_r),
    B, C = x W_r,B, x W_r,C, y_r = selective_scan(x, dt, -exp(A_log_r), B, C, D_r);
    y = W_o (layer_norm(sum y_r) * silu(u W_z)).

    A row of tokens is one grid or several in a sequence, which do not see each other. Padding may
    stand anywhere in a grid; different ids inside a grid never meet, but a route that leaves a
    document and comes back starts it anew.
    """

    def __init__(
        self,
        config: VMambaConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        inner, rank = config.sizes(width)
        size, side = config.state_size, config.convolution
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def uniform(bound: float, *shape: int) -> jax.Array:
            return jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound)

        self.gate = Linear(width, inner, **common)
        self.x = Linear(width, inner, **common)
        self.convolution = ConvolutionParam(uniform(1 / side, side, side, inner))
        self.convolution_bias = NoDecayParam(uniform(1 / side, inner))
        bound = inner**-0.5
        self.dt_rank = nnx.Param(uniform(bound, _ROUTES, inner, rank))
        self.B = nnx.Param(uniform(bound, _ROUTES, inner, size))
        self.C = nnx.Param(uniform(bound, _ROUTES, inner, size))
        self.dt = nnx.Param(uniform(rank**-0.5, _ROUTES, rank, inner))
        steps = time_step_bias(
            rngs.params(), _ROUTES * inner, config.dt_min, config.dt_max, config.dt_floor
        )
        self.dt_bias = Float32Param(steps.reshape(_ROUTES, inner))
        rates = jnp.log(jnp.arange(1, size + 1, dtype=jnp.float32))
        self.A_log = Float32Param(jnp.tile(rates, (_ROUTES, inner, 1)))
        self.D = Float32Param(jnp.ones((_ROUTES, inner), jnp.float32))
        self.norm = GroupNorm(
            inner, 1, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype
        )
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)
        self.dtype = jnp.dtype(dtype)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: None = None,
    ) -> tuple[jax.Array, None]:
        """Mixes over each grid.

        Args:
          x: [B, T, D], T a multiple of the grid's height times width.
          segment_ids: [B, T] int32, 0 = padding; None: all real, one document a grid.
          positions: the contract's; the grid itself carries the places, so they play no part.
          cache: None.

        Returns:
          y [B, T, D] in the compute dtype, and None.

        Raises:
          ValueError: there is a cache, or T is no multiple of the grid.
        """
        refuse_cache("VMamba", cache)
        batch, time, _ = x.shape
        cells = math.prod(self.config.grid)
        if time % cells:
            raise ValueError(
                f"VMamba: x must hold whole grids of {self.config.grid} = {cells} tokens, "
                f"got T = {time}"
            )
        ids = None if segment_ids is None else segment_ids.reshape(-1, cells)
        inputs = jax.nn.silu(
            self._convolve(self.x(x).reshape(batch * time // cells, cells, -1), ids)
        )
        y = self._scan(inputs, ids).reshape(batch, time, -1)
        y = self.output(self.norm(y) * jax.nn.silu(self.gate(x)))
        if segment_ids is not None:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        return y, None

    def _convolve(self, x: jax.Array, ids: jax.Array | None) -> jax.Array:
        """Depthwise convolution of [B, cells, inner] over the grid, in float32, documents apart."""
        height, width = self.config.grid
        side = self.config.convolution
        half = side // 2
        kernel = self.convolution[...].astype(jnp.float32)
        if ids is None:
            ids = jnp.ones(x.shape[:2], jnp.int32)
        ids = ids.reshape(-1, height, width)
        x = jnp.where((ids != 0)[..., None], x.reshape(*ids.shape, -1), 0).astype(jnp.float32)
        around = jnp.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
        ids_around = jnp.pad(ids, ((0, 0), (half, half), (half, half)))
        total = self.convolution_bias[...].astype(jnp.float32)
        for i in range(side):
            for j in range(side):
                place = (slice(None), slice(i, i + height), slice(j, j + width))
                same = (ids_around[place] == ids)[..., None]
                total = total + jnp.where(same, around[place] * kernel[i, j], 0)
        return total.reshape(x.shape[0], height * width, -1).astype(self.dtype)

    def _scan(self, x: jax.Array, ids: jax.Array | None) -> jax.Array:
        """Sum over the routes of the selective scans of [B, cells, inner]."""
        order = _routes(*self.config.grid)

        def route(order, back, dt_rank, B, C, dt, dt_bias, A_log, D):
            tokens = x[:, order]

            def project(kernel):
                return jnp.matmul(tokens, kernel.astype(self.dtype))

            steps = jnp.matmul(
                project(dt_rank).astype(jnp.float32), dt.astype(self.dtype).astype(jnp.float32)
            )
            y, _ = mixers.selective_scan(
                tokens,
                jax.nn.softplus(steps + dt_bias),
                -jnp.exp(A_log),
                project(B),
                project(C),
                D,
                segment_ids=None if ids is None else ids[:, order],
                chunk_size=self.config.chunk_size,
                impl=self.config.impl,
            )
            return y.astype(jnp.float32)[:, back]

        parts = (self.dt_rank, self.B, self.C, self.dt, self.dt_bias, self.A_log, self.D)
        outs = jax.vmap(route)(order, np.argsort(order, axis=1), *(p[...] for p in parts))
        return jnp.sum(outs, axis=0)

    def init_cache(self, batch: int, capacity: int) -> None:
        """Raises ValueError: the layer is not causal."""
        raise ValueError("VMamba is not causal and cannot decode: it has no cache")


def _routes(height: int, width: int) -> np.ndarray:
    """[4, cells] cells in the order of each route: rows, columns, and both backwards."""
    cells = np.arange(height * width).reshape(height, width)
    rows, columns = cells.reshape(-1), cells.T.reshape(-1)
    return np.stack([rows, columns, rows[::-1], columns[::-1]])
