# SPDX-License-Identifier: Apache-2.0
"""The training and evaluation steps: pure functions of flat state, compiled once each.

Metrics are one float32 vector on the device, so that fetching them is one small copy. `METRICS`
names the entries; counts are exact below 2^24.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seqmix.training.loss import chunked_cross_entropy
from seqmix.training.state import Arrays, ModelDefinition, TrainState

type Batch = Mapping[str, jax.Array]

EVAL_SUMS = ("loss", "z_loss", "tokens", "correct", "bytes", "context")
METRICS = (*EVAL_SUMS, "grad_norm", "learning_rate", "skipped", "consecutive", "finite")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What the compiled steps depend on besides the model.

    Attributes:
      gradient_accumulation: micro-batches the batch is cut into; divides the batch.
      z_loss: coefficient of the z-loss.
      chunk_tokens: tokens whose logits may exist at once.
      byte_lengths: [V] bytes each token stands for.
      hidden_sharding: constraint on the hidden states [B, T, D], None for none.
    """

    gradient_accumulation: int
    z_loss: float
    chunk_tokens: int
    byte_lengths: np.ndarray
    hidden_sharding: Any = None


def label_weights(segment_ids: jax.Array) -> jax.Array:
    """[B, T] float32, 1 where a label counts: its segment is its input's, and not padding (0).

    Args:
      segment_ids: [B, T + 1] int.
    """
    inputs, labels = segment_ids[:, :-1], segment_ids[:, 1:]
    return ((inputs == labels) & (labels != 0)).astype(jnp.float32)


def batch_loss(model, batch: Batch, options: StepOptions) -> tuple[jax.Array, jax.Array]:
    """Runs the model on {"tokens", "segment_ids", "positions"}, each [B, T + 1] int32.

    Returns:
      (objective, sums): the summed objective in nats and the [len(EVAL_SUMS)] float32 vector of
      sums.
    """
    tokens, segments = batch["tokens"], batch["segment_ids"]
    positions, labels = batch["positions"][:, :-1], tokens[:, 1:]
    hidden, _ = model.hidden(tokens[:, :-1], segment_ids=segments[:, :-1], positions=positions)
    if options.hidden_sharding is not None:
        hidden = jax.lax.with_sharding_constraint(hidden, options.hidden_sharding)
    weights = label_weights(segments)
    objective, sums = chunked_cross_entropy(
        hidden,
        model.head_kernel(),
        labels,
        weights,
        z_loss=options.z_loss,
        chunk_tokens=options.chunk_tokens,
    )
    lengths = jnp.asarray(options.byte_lengths, jnp.float32)
    extra = (
        jnp.sum(weights * lengths[labels]),
        jnp.sum(weights * (positions + 1)),  # tokens each counted position may attend to
    )
    return objective, jnp.stack([*sums, *extra])


def make_eval_step(definition: ModelDefinition, options: StepOptions) -> Callable[..., jax.Array]:
    """Returns (params, variables, batch) -> [len(EVAL_SUMS)] sums, to be jitted."""

    def eval_step(params: Arrays, variables: Arrays, batch: Batch) -> jax.Array:
        return batch_loss(definition.merge(params, variables), batch, options)[1]

    return eval_step


def make_gradient(definition: ModelDefinition, options: StepOptions):
    """Returns (params, variables, batch) -> (grads, variables, sums).

    The gradient is that of the objective's mean over ALL counted tokens of the batch, whatever the
    number of micro-batches: sums are accumulated in float32 and divided once.
    """

    def objective(params, variables, batch):
        model = definition.merge(params, variables)
        value, sums = batch_loss(model, batch, options)
        return value, (sums, definition.split(model)[1])

    def summed(params, variables, batch):
        (_, (sums, variables)), grads = jax.value_and_grad(objective, has_aux=True)(
            params, variables, batch
        )
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), variables, sums

    def accumulated(params, variables, batch, parts):
        # Strided, so that a batch sharded in contiguous blocks of rows is cut without
        # communication.
        def cut(array):
            rows = array.shape[0]
            return jnp.swapaxes(array.reshape(rows // parts, parts, *array.shape[1:]), 0, 1)

        def body(carry, micro):
            grads, variables, sums = carry
            new_grads, variables, new_sums = summed(params, variables, micro)
            return (jax.tree.map(jnp.add, grads, new_grads), variables, sums + new_sums), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        start = (zeros, variables, jnp.zeros(len(EVAL_SUMS), jnp.float32))
        return jax.lax.scan(body, start, jax.tree.map(cut, dict(batch)))[0]

    def gradient(params, variables, batch):
        parts = options.gradient_accumulation
        if parts == 1:
            grads, variables, sums = summed(params, variables, batch)
        else:
            grads, variables, sums = accumulated(params, variables, batch, parts)
        tokens = jnp.maximum(sums[EVAL_SUMS.index("tokens")], 1.0)
        return jax.tree.map(lambda g: g / tokens, grads), variables, sums

    return gradient


def make_train_step(
    definition: ModelDefinition,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    options: StepOptions,
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
    """Returns the pure (state, batch) -> (state, metrics), to be jitted with the state donated.

    A step whose loss or gradient is not finite leaves parameters, variables and optimizer as they
    were, and is counted. `step` advances either way: it counts batches, and the learning rate
    follows it.
    """
    gradient = make_gradient(definition, options)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        grads, variables, sums = gradient(state.params, state.variables, batch)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums[0])
        rate = learning_rate(state.step)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: (p + rate * u).astype(p.dtype), state.params, updates)
        bad = 1 - finite.astype(jnp.int32)
        new = TrainState(
            step=state.step + 1,
            params=_select(finite, params, state.params),
            variables=_select(finite, variables, state.variables),
            optimizer=_select(finite, optimizer_state, state.optimizer),
            skipped=state.skipped + bad,
            consecutive=(state.consecutive + 1) * bad,
        )
        tail = (norm, rate, new.skipped, new.consecutive, finite)
        return new, jnp.concatenate([sums, jnp.stack([jnp.asarray(x, jnp.float32) for x in tail])])

    return train_step


def _select(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def summarise(sums: np.ndarray, z_loss: float) -> dict[str, float]:
    """Turns summed metrics into the reported ones.

    Returns:
      "loss" (nats per token), "bits_per_byte", "z_loss" (as added to the objective, per token),
      "accuracy", "tokens", "bytes". NaN where nothing was counted.
    """
    values = dict(zip(EVAL_SUMS, map(float, sums), strict=False))
    tokens, size = values["tokens"], values["bytes"]
    per_token = 1.0 / tokens if tokens else float("nan")
    return {
        "loss": values["loss"] * per_token,
        "bits_per_byte": values["loss"] / math.log(2.0) / size if size else float("nan"),
        "z_loss": z_loss * values["z_loss"] * per_token,
        "accuracy": values["correct"] * per_token,
        "tokens": int(tokens),
        "bytes": int(size),
    }
