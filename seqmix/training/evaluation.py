# SPDX-License-Identifier: Apache-2.0
"""Evaluation, and loading a trained model from its run folder."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from seqmix import data
from seqmix.models import HybridLM
from seqmix.training.checkpoint import Checkpointer
from seqmix.training.compilation import enable_compilation_cache
from seqmix.training.experiment import Experiment, ResumeError, load_experiment
from seqmix.training.program import Program, build_program, define_model
from seqmix.training.state import Arrays
from seqmix.training.step import summarise

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"


def validation_data(experiment: Experiment) -> data.PackedDataset:
    """The validation split in this process's batches; one pass, the same under every seed."""
    return data.build(
        experiment.data,
        split="validation",
        batch_size=experiment.trainer.batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        vocabulary=experiment.model.vocabulary,
    )


def check_tokenizer(run_dir: Path | str, tokenizer: data.Tokenizer) -> None:
    """Raises ResumeError unless `tokenizer` is the one that the run was trained with."""
    folder = Path(run_dir) / TOKENIZER
    if folder.exists() and data.load_tokenizer(folder).fingerprint != tokenizer.fingerprint:
        raise ResumeError(
            f"{folder} is not the tokenizer that the config and its data now give: the run's model "
            "would read other tokens (name the saved one with TokenizerFile, or restore the data)"
        )


def run_evaluation(
    program: Program,
    params: Arrays,
    variables: Arrays,
    batches: Iterable[Mapping[str, np.ndarray]],
    limit: int | None,
    z_loss: float,
) -> dict[str, float]:
    """Runs the model over batches.

    Args:
      program: the compiled experiment.
      params, variables: the model.
      batches: full or short batches.
      limit: at most this many, None for all.
      z_loss: coefficient, for the reported z-loss.

    Returns:
      See `seqmix.training.step.summarise`.
    """
    sums, pending = np.zeros(()), []
    iterator = iter(batches)
    try:
        for batch in itertools.islice(iterator, limit):
            pending.append(program.eval_step(params, variables, program.put(batch)))
            if len(pending) > 2:  # enough to keep the device busy, and no more in memory
                sums = sums + np.asarray(pending.pop(0), np.float64)
        for vector in pending:
            sums = sums + np.asarray(vector, np.float64)
    finally:
        if hasattr(iterator, "close"):
            iterator.close()
    if not sums.shape:
        raise ValueError("the validation split gave no batch")
    return summarise(sums, z_loss, program.definition.auxiliary)


def evaluate(
    experiment: Experiment | None,
    run_dir: Path | str,
    *,
    step: int | None = None,
    batches: int | None = None,
) -> dict[str, Any]:
    """Evaluates a run's checkpoint on the validation split.

    Args:
      experiment: the config to evaluate under (data, mesh, batch size); None for the run's own.
      run_dir: a folder written by `train`.
      step: which checkpoint, None for the newest.
      batches: at most this many, None for the whole split.

    Returns:
      "step", and see `seqmix.training.step.summarise`.

    Raises:
      FileNotFoundError: no run folder, or no checkpoint in it.
      CheckpointMismatchError: the config's model is not the checkpoint's.
    """
    experiment = experiment or load_experiment(run_dir)
    if experiment.trainer.compilation_cache:
        enable_compilation_cache()
    dataset = validation_data(experiment)
    check_tokenizer(run_dir, dataset.tokenizer)
    program = build_program(experiment, dataset.tokenizer.byte_lengths())
    with open_checkpoints(run_dir, step) as (checkpointer, chosen):
        like, shardings = program.abstract, program.shardings
        params = checkpointer.restore_params(chosen, like.params, shardings.params)
        variables = checkpointer.restore_variables(chosen, like.variables, shardings.variables)
    result = run_evaluation(program, params, variables, dataset, batches, experiment.trainer.z_loss)
    return {"step": chosen, **result}


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A trained model and what it was trained with."""

    model: HybridLM
    experiment: Experiment
    tokenizer: data.Tokenizer
    step: int


def load_run(run_dir: Path | str, *, step: int | None = None) -> LoadedRun:
    """Loads a run's model onto one device, for inference.

    Args:
      run_dir: a folder written by `train`.
      step: which checkpoint, None for the newest.

    Raises:
      FileNotFoundError: no run folder, or no checkpoint in it.
    """
    experiment = load_experiment(run_dir)
    definition = define_model(experiment)
    here = SingleDeviceSharding(jax.local_devices()[0])
    with open_checkpoints(run_dir, step) as (checkpointer, chosen):
        params, variables = (
            restore(chosen, like, dict.fromkeys(like, here))
            for restore, like in (
                (checkpointer.restore_params, definition.params),
                (checkpointer.restore_variables, definition.variables),
            )
        )
    tokenizer = data.load_tokenizer(Path(run_dir) / TOKENIZER)
    return LoadedRun(definition.merge(params, variables), experiment, tokenizer, chosen)


@contextlib.contextmanager
def open_checkpoints(
    run_dir: Path | str, step: int | None = None
) -> Iterator[tuple[Checkpointer, int]]:
    """A run's checkpoints for reading, and the chosen step.

    Args:
      run_dir: a folder written by `train`.
      step: which checkpoint, None for the newest.

    Raises:
      FileNotFoundError: no such checkpoint.
    """
    checkpointer = Checkpointer(Path(run_dir) / CHECKPOINTS, read_only=True)
    try:
        steps = checkpointer.steps()
        if step is None and steps:
            step = steps[-1]
        if step not in steps:
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(f"{wanted} in {checkpointer.directory}; found {steps}")
        yield checkpointer, step
    finally:
        checkpointer.close()
