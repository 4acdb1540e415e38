# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts as the feed-forward part of a block, without a capacity (dropless)."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix.layers import LayerInfo, Linear
from seqmix.layers.auxiliary import Auxiliary
from seqmix.layers.checks import at_least, positive
from seqmix.layers.parameters import Buffer
from seqmix.mixers._numerics import contract
from seqmix.models.feed_forward import (
    ActivationName,
    FeedForward,
    FeedForwardConfig,
    activation,
    default_hidden,
)
from seqmix.models.routing import (
    Routing,
    balance_loss,
    block_layout,
    block_product,
    block_size,
    count_load,
    mix_experts,
    route,
    sorted_layout,
)
from seqmix.rows import by_rows


@configs.configurable("MoE")
@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Settings of `MoE`.

    Attributes:
      experts: number of experts E.
      top_k: experts of a token.
      hidden: hidden width of an expert; default that of `FeedForward` divided by ``top_k``, so that
        a token uses as many parameters as in the dense part.
      multiple_of: the default hidden width is a multiple of it.
      activation, gated: of the experts and of the shared part, as in `FeedForward`.
      router: scores of the experts: 'softmax' over them, or a 'sigmoid' each (DeepSeek-V3, Kimi).
      renormalise: divide a token's chosen scores by their sum (Mixtral, Qwen3-Next, Kimi; not
        Jamba).
      scale: factor of the routed experts' sum (2.446 in Kimi Linear).
      selection_bias: choose by the scores plus a bias for each expert that no gradient trains:
        after a step it rises by ``bias_rate`` for experts with less than the mean load, and falls
        for those with more (arXiv 2408.15664).
      bias_rate: see ``selection_bias``.
      groups: equal groups of experts; a token's experts come from ``top_groups`` of them.
      top_groups: see ``groups``.
      shared_experts: experts that every token uses, as one part of so many times the width.
      shared_hidden: hidden width of that part; default ``shared_experts`` times the experts'.
      shared_gate: its output is multiplied by a sigmoid of a projection of the token (Qwen3-Next).
      balance_loss: coefficient of the load-balancing loss, per layer; 0 for none. The loss is 1
        where the load is even (Mixtral's, in `transformers`, is ``top_k`` there).
      balance_over: tokens that are to be balanced: of a 'batch' (a micro-batch, over all devices),
        or of each 'row' by itself (DeepSeek-V3's sequence-wise loss).
      z_loss: coefficient of the mean squared logarithm of the logits' partition function
        (ST-MoE, arXiv 2202.08906), per layer; 0 for none.
      impl: products of tokens grouped by expert: 'ragged' is `jax.lax.ragged_dot`, which XLA makes
        sparse on TPUs alone; 'blocked' cuts the groups into padded blocks and reads the kernel of
        each. 'auto' takes what suits the device.
    """

    experts: int = 8
    top_k: int = 2
    hidden: int | None = None
    multiple_of: int = 64
    activation: ActivationName = "silu"
    gated: bool = True
    router: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    bias_rate: float = 1e-3
    groups: int = 1
    top_groups: int = 1
    shared_experts: int = 0
    shared_hidden: int | None = None
    shared_gate: bool = False
    balance_loss: float = 0.01
    balance_over: Literal["batch", "row"] = "batch"
    z_loss: float = 0.0
    impl: Literal["auto", "ragged", "blocked"] = "auto"

    def __post_init__(self):
        names = ("experts", "top_k", "hidden", "multiple_of", "groups", "top_groups")
        at_least(self, 1, *names, "shared_hidden")
        at_least(self, 0, "shared_experts")
        positive(self, "scale", "bias_rate")
        for name in ("balance_loss", "z_loss"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"MoE.{name} must be >= 0, got {value}")
        if self.top_k > self.experts:
            raise ValueError(f"MoE.top_k must be <= experts = {self.experts}, got {self.top_k}")
        if self.experts % self.groups:
            raise ValueError(f"MoE.groups must divide experts = {self.experts}, got {self.groups}")
        if self.top_groups > self.groups:
            raise ValueError(
                f"MoE.top_groups must be <= groups = {self.groups}, got {self.top_groups}"
            )
        reachable = self.top_groups * (self.experts // self.groups)
        if self.top_k > reachable:
            raise ValueError(
                f"MoE.top_k must be <= {reachable}, the experts of top_groups = "
                f"{self.top_groups} of {self.groups} groups, got {self.top_k}"
            )
        for name in ("shared_hidden", "shared_gate"):
            if getattr(self, name) and not self.shared_experts:
                raise ValueError(f"MoE.{name} needs MoE.shared_experts >= 1, got 0")

    def hidden_width(self, width: int) -> int:
        """Hidden width of an expert at this model width."""
        if self.hidden is not None:
            return self.hidden
        return default_hidden(width, self.multiple_of * self.top_k, gated=self.gated) // self.top_k

    def shared_part(self, width: int) -> FeedForwardConfig | None:
        """The shared experts as one dense part."""
        if not self.shared_experts:
            return None
        hidden = self.shared_hidden or self.shared_experts * self.hidden_width(width)
        return FeedForwardConfig(hidden=hidden, activation=self.activation, gated=self.gated)

    def flops_per_token(self, width: int) -> float:
        """Forward FLOPs per token, multiply-add = 2: router, chosen and shared experts."""
        matrices = 3 if self.gated else 2
        total = 2.0 * width * self.experts
        total += 2.0 * matrices * width * self.hidden_width(width) * self.top_k
        shared = self.shared_part(width)
        if shared is not None:
            total += shared.flops_per_token(width) + 2.0 * width * self.shared_gate
        return total

    def inactive_parameters(self, width: int) -> int:
        """Parameters that a token does not use: those of the experts it does not go to."""
        matrices = 3 if self.gated else 2
        return (self.experts - self.top_k) * matrices * width * self.hidden_width(width)


class ExpertLinear(nnx.Module):
    """y = x W_e without biases; kernels start as `Linear`'s do.

    Attributes:
      kernel: [experts, inputs, outputs].
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        scale: float = 1.0,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        initialise = jax.nn.initializers.variance_scaling(
            scale**2, "fan_in", "truncated_normal", batch_axis=0
        )
        shape = (experts, inputs, outputs)
        self.kernel = nnx.Param(initialise(rngs.params(), shape, param_dtype))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array, groups: jax.Array, form: str) -> jax.Array:
        """Products in one of three forms, in the compute dtype.

        Args:
          x: 'ragged': [N, inputs], sorted by expert; 'blocked': [blocks, n, inputs]; 'chosen':
            [N, k, inputs].
          groups: sizes [E] of the experts' groups; the expert of each block; experts [N, k].
          form: which.
        """
        x, kernel = x.astype(self.dtype), self.kernel[...].astype(self.dtype)
        if form == "ragged":
            return jax.lax.ragged_dot(x, kernel, groups, preferred_element_type=self.dtype)
        if form == "blocked":
            return block_product(x, kernel, groups)
        return jnp.einsum("nki,nkio->nko", x, kernel[groups])


class Experts(nnx.Module):
    """Equal networks, as `FeedForward` without biases, and the sum over a token's chosen ones."""

    def __init__(self, config: MoEConfig, width: int, *, layer: LayerInfo, **common: Any):
        hidden, count = config.hidden_width(width), config.experts
        self.gate = ExpertLinear(count, width, hidden, **common) if config.gated else None
        self.up = ExpertLinear(count, width, hidden, **common)
        self.down = ExpertLinear(count, hidden, width, scale=layer.residual_scale, **common)
        self.config = config

    def __call__(self, x: jax.Array, routing: Routing) -> jax.Array:
        """[N, D] to the weighted sum of the chosen experts' outputs, [N, D] float32."""
        count, pairs = self.config.experts, routing.experts.size
        if pairs <= count:  # a decoding step: reads the chosen experts alone
            copies = jnp.broadcast_to(x[:, None], (*routing.experts.shape, x.shape[-1]))
            y = self.apply(copies, routing.experts, "chosen").astype(jnp.float32)
            return jnp.sum(y * routing.weights[..., None], axis=1)
        graph, state = nnx.split(self)

        def ragged(state: nnx.State, x: jax.Array, routing: Routing) -> jax.Array:
            apply = functools.partial(nnx.merge(graph, state).apply, form="ragged")
            return mix_experts(x, routing, sorted_layout(routing.experts, count), apply)

        def blocked(state: nnx.State, x: jax.Array, routing: Routing) -> jax.Array:
            experts, size = nnx.merge(graph, state), block_size(pairs, count)

            def apply(x: jax.Array, owner: jax.Array) -> jax.Array:
                x = x.reshape(-1, size, x.shape[-1])
                return experts.apply(x, owner, "blocked").reshape(-1, x.shape[-1])

            return mix_experts(x, routing, block_layout(routing.experts, count, size), apply)

        if self.config.impl != "auto":
            return {"ragged": ragged, "blocked": blocked}[self.config.impl](state, x, routing)
        # Elsewhere XLA multiplies every token by every expert, and masks.
        return jax.lax.platform_dependent(state, x, routing, tpu=ragged, default=blocked)

    def apply(self, x: jax.Array, groups: jax.Array, form: str) -> jax.Array:
        """The networks, on the arguments of `ExpertLinear`."""
        function, up = activation(self.config.activation), self.up(x, groups, form)
        hidden = function(up) if self.gate is None else function(self.gate(x, groups, form)) * up
        return self.down(hidden, groups, form)


class MoE(nnx.Module):
    """y = scale * sum of weight_e expert_e(x) over a token's experts, + shared(x).

    Experts and shared part are `FeedForward`s without biases. Router, scores and the sum over
    experts are float32. Padding is routed, but counts for nothing.

    Attributes:
      bias: [E] float32 selection bias, None without one.
      load: [E] float32, tokens that went to each expert since the last `finish_step`; None without
        a bias.
    """

    auxiliary_names = (
        "moe.balance_loss",
        "moe.dead_experts",
        "moe.max_load",
        "moe.min_load",
        "moe.z_loss",
    )
    auxiliary_means = auxiliary_names

    def __init__(
        self,
        config: MoEConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        count = config.experts
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.router = Linear(width, count, **common)
        self.experts = Experts(config, width, layer=layer, **common)
        shared = config.shared_part(width)
        self.shared = None if shared is None else FeedForward(shared, width, layer=layer, **common)
        self.shared_gate = Linear(width, 1, **common) if config.shared_gate else None
        biased = config.selection_bias
        self.bias = Buffer(jnp.zeros((count,), jnp.float32)) if biased else None
        self.load = Buffer(jnp.zeros((count,), jnp.float32)) if biased else None
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, x: jax.Array, *, segment_ids: jax.Array | None = None, auxiliary: bool = False
    ):
        """Applies each token's experts.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding, which losses and loads leave out.
          auxiliary: also return losses and loads.

        Returns:
          y [B, T, D] in the compute dtype; with ``auxiliary`` (y, `Auxiliary`, load [E] of the real
          tokens).
        """
        graph, state = nnx.split(self)
        y, logits, routing = by_rows(
            lambda state, rows: nnx.merge(graph, state)._apply(rows),
            state,
            x.reshape(-1, x.shape[-1]),
        )
        y = y.reshape(x.shape)
        if not auxiliary:
            return y
        shape = x.shape[:2]
        real = jnp.ones(shape) if segment_ids is None else (segment_ids != 0)
        return y, *self._report(logits, routing, real.astype(jnp.float32))

    def _apply(self, rows: jax.Array) -> tuple[jax.Array, jax.Array, Routing]:
        """[N, D] to [N, D] in the compute dtype, the router's logits and the choice."""
        config, kernel = self.config, self.router.kernel[...]
        logits = contract("nd,de->ne", rows, kernel, dtype=jnp.float32)
        bias = None if self.bias is None else self.bias[...]
        names = ("top_k", "router", "renormalise", "scale", "groups", "top_groups")
        routing = route(logits, bias, **{name: getattr(config, name) for name in names})
        y = self.experts(rows, routing)
        if self.shared is not None:
            shared = self.shared(rows).astype(jnp.float32)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(self.shared_gate(rows, out_dtype=jnp.float32))
            y = y + shared
        return y.astype(self.dtype), logits, routing

    def _report(self, logits, routing: Routing, real: jax.Array) -> tuple[Auxiliary, jax.Array]:
        """Losses and metrics as sums over real tokens, and the load [E]."""
        config = self.config
        batch, time = real.shape
        experts = routing.experts.reshape(batch, time, -1)
        load = count_load(experts, real, config.experts)
        probabilities = routing.probabilities.reshape(batch, time, -1)
        mass = jnp.sum(probabilities * real[..., None], axis=1)
        tokens = jnp.sum(real, axis=1)
        sets = (load, mass, tokens)
        if config.balance_over == "batch":
            sets = tuple(jnp.sum(value, axis=0, keepdims=True) for value in sets)
        balance = balance_loss(*sets, config.top_k)
        z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * real.reshape(-1))
        total, load = jnp.sum(tokens), jnp.sum(load, axis=0)
        relative = load / jnp.maximum(jnp.mean(load), 1e-20)
        metrics = {
            "moe.balance_loss": balance,
            "moe.dead_experts": jnp.mean((load == 0).astype(jnp.float32)) * total,
            "moe.max_load": jnp.max(relative) * total,
            "moe.min_load": jnp.min(relative) * total,
            "moe.z_loss": z,
        }
        loss = config.balance_loss * balance + config.z_loss * z
        return Auxiliary(loss, metrics), load

    def add_load(self, load: jax.Array) -> None:
        """Counts the load of a batch towards the next `finish_step`."""
        if self.load is not None:
            self.load[...] = self.load[...] + load

    def finish_step(self) -> None:
        """Moves the selection bias by the load counted since the last time, which starts anew.

        Under a scanned stack, bias and load have an axis of periods in front.
        """
        if self.bias is None:
            return
        load = self.load[...]
        missing = jnp.mean(load, axis=-1, keepdims=True) - load
        self.bias[...] = self.bias[...] + self.config.bias_rate * jnp.sign(missing)
        self.load[...] = jnp.zeros_like(load)
