# SPDX-License-Identifier: Apache-2.0
"""An experiment's compiled half: model definition, mesh, shardings and the jitted functions."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from seqmix.models import HybridLM
from seqmix.parallel import (
    batch_sharding,
    make_mesh,
    optimizer_shardings,
    parameter_shardings,
    put_batch,
    replicated,
)
from seqmix.training.experiment import Experiment
from seqmix.training.state import ModelDefinition, TrainState
from seqmix.training.step import StepOptions, make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """What `build_program` makes of an experiment.

    Attributes:
      definition: the model, split.
      mesh: the devices.
      abstract: ShapeDtypeStructs of the state.
      shardings: where each of its arrays lies.
      batch: where the rows of a batch lie.
      initialise: () -> state, on the devices.
      train_step: (state, batch) -> (state, vector of `metric_names`); donates the state.
      eval_step: (params, variables, batch) -> vector of `sum_names`.
      batch_size: rows of every batch.
      trained: names of the parameters that the step changes, sorted.
    """

    definition: ModelDefinition
    mesh: Mesh
    abstract: TrainState
    shardings: TrainState
    batch: NamedSharding
    initialise: Callable[[], TrainState]
    train_step: Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, jax.Array]]
    eval_step: Callable[..., jax.Array]
    batch_size: int
    trained: tuple[str, ...]

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Places this process's rows on the devices, filled up with padding rows to the full batch.

        A short batch would compile the step again; rows of segment 0 count for nothing.
        """
        rows = self.batch_size // jax.process_count()
        missing = rows - len(batch["tokens"])
        if missing < 0:
            raise ValueError(f"batch: expected at most {rows} rows, got {rows - missing}")
        if missing:
            batch = {k: np.pad(v, ((0, missing), (0, 0))) for k, v in batch.items()}
        return put_batch(batch, self.batch)


def define_model(experiment: Experiment) -> ModelDefinition:
    """The experiment's model as the trainer sees it; parameters are drawn from `Trainer.seed`."""
    seed = experiment.trainer.seed
    return ModelDefinition(lambda: HybridLM(experiment.model, rngs=nnx.Rngs(seed)))


def select_parameters(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """Parameters whose name one of `Trainer.trainable`'s patterns finds a match in.

    Raises:
      ValueError: a pattern finds none; the message lists what there is.
    """
    names = sorted(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if re.search(pattern, name)]
        if not found:
            # Layers repeat themselves: their parts once are enough to correct a pattern by.
            parts = sorted({re.sub(r"\.\d+\b", "", name) for name in names})
            raise ValueError(
                f"Trainer.trainable: {pattern!r} matches none of the model's parameters, whose "
                f"names without numbers are {', '.join(parts)}"
            )
        chosen.update(found)
    return frozenset(chosen)


def is_stacked(name: str) -> bool:
    """Whether a parameter's first axis is the period axis of the scanned layers."""
    return "stack.periods." in name


def build_program(
    experiment: Experiment, byte_lengths: np.ndarray, devices: list[jax.Device] | None = None
) -> Program:
    """Builds everything that gets compiled; nothing is computed or compiled yet.

    Args:
      experiment: the run's config.
      byte_lengths: [tokenizer's vocabulary] bytes each token stands for.
      devices: of the mesh; default all.

    Raises:
      ValueError: settings that do not go together; the message names them.
    """
    trainer, model = experiment.trainer, experiment.model
    mesh = make_mesh(experiment.mesh, devices)
    micro = trainer.batch_size // trainer.gradient_accumulation
    if micro % mesh.size:
        raise ValueError(
            f"Trainer.batch_size / Trainer.gradient_accumulation must be a multiple of the number "
            f"of devices, {mesh.size}; got {trainer.batch_size} / {trainer.gradient_accumulation}"
        )
    if len(byte_lengths) > model.vocabulary:
        raise ValueError(
            f"HybridLM.vocabulary must be at least the tokenizer's {len(byte_lengths)}, "
            f"got {model.vocabulary}"
        )
    options = StepOptions(
        gradient_accumulation=trainer.gradient_accumulation,
        z_loss=trainer.z_loss,
        chunk_tokens=trainer.loss_chunk_tokens * mesh.size,
        byte_lengths=np.pad(byte_lengths, (0, model.vocabulary - len(byte_lengths))),
        meta_ids=model.meta_ids,
        hidden_sharding=batch_sharding(mesh) if mesh.size > 1 else None,
    )
    definition = define_model(experiment)
    if trainer.trainable:
        options = dataclasses.replace(
            options, trainable=select_parameters(definition.params, trainer.trainable)
        )
    # An optimizer sees the trained parameters alone: no decay and no moments of the others.
    masks = (options.split(mask)[0] for mask in (definition.decay, definition.muon))
    optimizer = experiment.optimizer.build(*masks)
    factor = experiment.schedule.build(trainer.steps)
    peak = experiment.optimizer.learning_rate

    def initialise() -> TrainState:
        params, variables = definition.initialise()
        zero = jnp.zeros((), jnp.int32)
        moments = optimizer.init(options.split(params)[0])
        return TrainState(zero, params, variables, moments, zero, zero)

    abstract = jax.eval_shape(initialise)
    shardings = state_shardings(mesh, abstract)
    everywhere = replicated(mesh)
    step = make_train_step(definition, optimizer, lambda count: peak * factor(count), options)
    return Program(
        definition=definition,
        mesh=mesh,
        abstract=abstract,
        shardings=shardings,
        batch=batch_sharding(mesh),
        initialise=jax.jit(initialise, out_shardings=shardings),
        train_step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere)),
        eval_step=jax.jit(make_eval_step(definition, options), out_shardings=everywhere),
        batch_size=trainer.batch_size,
        trained=tuple(sorted(options.split(definition.params)[0])),
    )


def state_shardings(mesh: Mesh, abstract: TrainState) -> TrainState:
    """The sharding of every array of a state: the optimizer's like the parameters."""
    stacked = {name: is_stacked(name) for name in abstract.params}
    params = parameter_shardings(mesh, abstract.params, stacked)
    everywhere: Any = replicated(mesh)
    return TrainState(
        step=everywhere,
        params=params,
        variables=dict.fromkeys(abstract.variables, everywhere),
        optimizer=optimizer_shardings(mesh, abstract.optimizer, params),
        skipped=everywhere,
        consecutive=everywhere,
    )
