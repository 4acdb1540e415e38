# SPDX-License-Identifier: Apache-2.0
"""The training and evaluation steps: pure functions of flat state, compiled once each.

Metrics are one float32 vector on the device, so that fetching them is one small copy.
`metric_names` names the entries; counts are exact below 2^24.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seqmix.rows import rows_on
from seqmix.training.loss import chunked_cross_entropy
from seqmix.training.state import Arrays, ModelDefinition, TrainState

type Batch = Mapping[str, jax.Array]

EVAL_SUMS = ("loss", "z_loss", "tokens", "correct", "bytes", "context")
_STEP = ("grad_norm", "learning_rate", "skipped", "consecutive", "finite")
METRICS = (*EVAL_SUMS, *_STEP)
# Counted only where layers report something that is averaged over them.
_REAL = "real_tokens"


def sum_names(auxiliary: Sequence[str] = ()) -> tuple[str, ...]:
    """Entries of an evaluation's vector, for layers that report these metrics."""
    return (*EVAL_SUMS, _REAL, *auxiliary) if auxiliary else EVAL_SUMS


def metric_names(auxiliary: Sequence[str] = ()) -> tuple[str, ...]:
    """Entries of a training step's vector: those of `sum_names` first."""
    return (*sum_names(auxiliary), *_STEP)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What the compiled steps depend on besides the model.

    Attributes:
      gradient_accumulation: micro-batches the batch is cut into; divides the batch.
      z_loss: coefficient of the z-loss.
      chunk_tokens: tokens whose logits may exist at once.
      byte_lengths: [V] bytes each token stands for.
      meta_ids: ids of the model's meta tokens, which are no labels.
      hidden_sharding: constraint on the hidden states [B, T, D], None for none.
      trainable: names of the trained parameters, None for all. The others are constants: neither
        gradients nor optimizer states of them exist.
    """

    gradient_accumulation: int
    z_loss: float
    chunk_tokens: int
    byte_lengths: np.ndarray
    meta_ids: range = range(0)
    hidden_sharding: Any = None
    trainable: frozenset[str] | None = None

    def split(self, params: Arrays) -> tuple[Arrays, Arrays]:
        """(trained, frozen) parameters."""
        trained = params.keys() if self.trainable is None else self.trainable
        return (
            {name: value for name, value in params.items() if name in trained},
            {name: value for name, value in params.items() if name not in trained},
        )


def label_weights(
    segment_ids: jax.Array, tokens: jax.Array | None = None, meta_ids: range = range(0)
) -> jax.Array:
    """[B, T] float32, 1 where a label counts: its segment is its input's, and not padding (0).

    Args:
      segment_ids: [B, T + 1] int.
      tokens: [B, T + 1] int, the labels from the second on; only needed with meta tokens.
      meta_ids: ids that are no labels.
    """
    inputs, labels = segment_ids[:, :-1], segment_ids[:, 1:]
    counted = (inputs == labels) & (labels != 0)
    if meta_ids:
        label = tokens[:, 1:]
        counted = counted & ~((label >= meta_ids.start) & (label < meta_ids.stop))
    return counted.astype(jnp.float32)


def labels_per_token(batch: Batch, meta_ids: range = range(0)) -> jax.Array:
    """Counted labels per real input token of a whole batch: brings sums over these to one mean."""
    segments = batch["segment_ids"]
    labels = jnp.sum(label_weights(segments, batch["tokens"], meta_ids))
    real = jnp.sum((segments[:, :-1] != 0).astype(jnp.float32))
    return jnp.maximum(labels, 1.0) / jnp.maximum(real, 1.0)


def batch_loss(
    model, batch: Batch, options: StepOptions, auxiliary_weight: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Runs the model on {"tokens", "segment_ids", "positions"}, each [B, T + 1] int32.

    Args:
      model: a `HybridLM`.
      batch: rows, or a micro-batch of them.
      options: of the step.
      auxiliary_weight: factor of the layers' own losses, which are sums over real tokens, in the
        objective, which is a sum over counted labels.

    Returns:
      (objective, sums): the summed objective in nats and the float32 vector of `sum_names`.
    """
    tokens, segments = batch["tokens"], batch["segment_ids"]
    positions, labels = batch["positions"][:, :-1], tokens[:, 1:]
    with rows_on(options.hidden_sharding):
        hidden, auxiliary = model.hidden_and_auxiliary(
            tokens[:, :-1], segment_ids=segments[:, :-1], positions=positions
        )
    if options.hidden_sharding is not None:
        hidden = jax.lax.with_sharding_constraint(hidden, options.hidden_sharding)
    weights = label_weights(segments, tokens, options.meta_ids)
    objective, sums = chunked_cross_entropy(
        hidden,
        model.head_kernel(),
        labels,
        weights,
        z_loss=options.z_loss,
        chunk_tokens=options.chunk_tokens,
        scaling=model.logit_scaling,
    )
    lengths = jnp.asarray(options.byte_lengths, jnp.float32)
    extra = (
        jnp.sum(weights * lengths[labels]),
        jnp.sum(weights * (positions + 1)),  # tokens each counted position may attend to
    )
    if auxiliary is not None:
        objective = objective + auxiliary_weight * auxiliary.loss
        real = jnp.sum((segments[:, :-1] != 0).astype(jnp.float32))
        extra = (*extra, real, *(auxiliary.metrics[name] for name in sorted(auxiliary.metrics)))
    return objective, jnp.stack([*sums, *extra])


def make_eval_step(definition: ModelDefinition, options: StepOptions) -> Callable[..., jax.Array]:
    """Returns (params, variables, batch) -> vector of `sum_names`, to be jitted."""

    def eval_step(params: Arrays, variables: Arrays, batch: Batch) -> jax.Array:
        return batch_loss(definition.merge(params, variables), batch, options)[1]

    return eval_step


def make_gradient(definition: ModelDefinition, options: StepOptions):
    """Returns (params, variables, batch) -> (grads of the trained parameters, variables, sums).

    The gradient is that of the objective's mean over ALL counted tokens of the batch, whatever the
    number of micro-batches: sums are accumulated in float32 and divided once. Losses of the layers'
    own are averaged over all real tokens.
    """

    def objective(trained, frozen, variables, batch, weight):
        model = definition.merge({**trained, **frozen}, variables)
        value, sums = batch_loss(model, batch, options, weight)
        return value, (sums, definition.split(model)[1])

    def summed(params, variables, batch, weight):
        (_, (sums, variables)), grads = jax.value_and_grad(objective, has_aux=True)(
            *options.split(params), variables, batch, weight
        )
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), variables, sums

    def accumulated(params, variables, batch, weight, parts):
        # Strided, so that a batch sharded in contiguous blocks of rows is cut without
        # communication.
        def cut(array):
            rows = array.shape[0]
            return jnp.swapaxes(array.reshape(rows // parts, parts, *array.shape[1:]), 0, 1)

        def body(carry, micro):
            grads, variables, sums = carry
            new_grads, variables, new_sums = summed(params, variables, micro, weight)
            return (jax.tree.map(jnp.add, grads, new_grads), variables, sums + new_sums), None

        trained, _ = options.split(params)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
        start = (zeros, variables, jnp.zeros(len(sum_names(definition.auxiliary)), jnp.float32))
        return jax.lax.scan(body, start, jax.tree.map(cut, dict(batch)))[0]

    def gradient(params, variables, batch):
        parts = options.gradient_accumulation
        # Of the whole batch, so that it does not matter how micro-batches are filled.
        weight = labels_per_token(batch, options.meta_ids) if definition.auxiliary else 1.0
        if parts == 1:
            grads, variables, sums = summed(params, variables, batch, weight)
        else:
            grads, variables, sums = accumulated(params, variables, batch, weight, parts)
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
        trained, frozen = options.split(state.params)
        variables = _finish(definition, options, state, variables)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, trained)
        new_params = jax.tree.map(lambda p, u: (p + rate * u).astype(p.dtype), trained, updates)
        bad = 1 - finite.astype(jnp.int32)
        new = TrainState(
            step=state.step + 1,
            params=frozen | _select(finite, new_params, trained),
            variables=_select(finite, variables, state.variables),
            optimizer=_select(finite, optimizer_state, state.optimizer),
            skipped=state.skipped + bad,
            consecutive=(state.consecutive + 1) * bad,
        )
        tail = (norm, rate, new.skipped, new.consecutive, finite)
        return new, jnp.concatenate([sums, jnp.stack([jnp.asarray(x, jnp.float32) for x in tail])])

    return train_step


def _finish(
    definition: ModelDefinition, options: StepOptions, state: TrainState, variables: Arrays
) -> Arrays:
    """Variables after the step; those of modules without a trained parameter stay as they were."""
    new = definition.finish_step(state.params, variables)
    if options.trainable is None:
        return new

    def trained(name: str) -> bool:
        return any(p.startswith(name.rpartition(".")[0] + ".") for p in options.trainable)

    return {n: value if trained(n) else state.variables[n] for n, value in new.items()}


def _select(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def summarise(sums: np.ndarray, z_loss: float, auxiliary: Sequence[str] = ()) -> dict[str, float]:
    """Turns summed metrics into the reported ones.

    Args:
      sums: a vector that starts with `sum_names(auxiliary)`.
      z_loss: coefficient of the z-loss.
      auxiliary: metrics that layers report.

    Returns:
      "loss" (nats per token), "bits_per_byte", "z_loss" (as added to the objective, per token),
      "accuracy", "tokens", "bytes", and the layers' metrics per real token, summed over layers
      (experts': the mean). NaN where nothing was counted.
    """
    values = dict(zip(sum_names(auxiliary), map(float, sums), strict=False))
    tokens, size = values["tokens"], values["bytes"]
    per_token = 1.0 / tokens if tokens else float("nan")
    real = values.get(_REAL) or float("nan")
    return {
        "loss": values["loss"] * per_token,
        "bits_per_byte": values["loss"] / math.log(2.0) / size if size else float("nan"),
        "z_loss": z_loss * values["z_loss"] * per_token,
        "accuracy": values["correct"] * per_token,
        "tokens": int(tokens),
        "bytes": int(size),
        **{name: values[name] / real for name in auxiliary},
    }
