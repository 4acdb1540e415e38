# SPDX-License-Identifier: Apache-2.0
"""Starting a run from the parameters of another (`Trainer.init_from`)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqmix.training.checkpoint import CheckpointMismatchError
from seqmix.training.evaluation import open_checkpoints
from seqmix.training.program import Program
from seqmix.training.state import Arrays, TrainState

_SHOWN = 8


class Source(NamedTuple):
    """What a run starts from.

    Attributes:
      params, variables: {name: array} of the other run, on the devices. Fixed numbers (random
        projections) come along: what it learned belongs to them.
      step: of its checkpoint.
      missing: parameters of the model that the checkpoint lacks.
    """

    params: Arrays
    variables: Arrays
    step: int
    missing: tuple[str, ...]

    def replace(self, state: TrainState) -> TrainState:
        """A fresh state with these arrays instead of its own."""
        return state._replace(
            params=state.params | self.params, variables=state.variables | self.variables
        )


def read_source(program: Program, run_dir: Path | str, new: Sequence[str]) -> Source:
    """Reads another run's newest checkpoint for the model of a program.

    Args:
      program: the compiled experiment.
      run_dir: the other run's folder.
      new: regular expressions of parameters that the checkpoint may lack.

    Raises:
      FileNotFoundError: no run folder, or no checkpoint in it.
      CheckpointMismatchError: names what the checkpoint lacks, has on top, or has in another shape.
    """
    wanted = program.abstract.params
    with open_checkpoints(run_dir) as (checkpointer, step):
        saved = checkpointer.shapes(step, "params")
        missing = sorted(set(wanted) - set(saved))
        _check(f"Trainer.init_from: checkpoint {step} of {run_dir}", wanted, saved, missing, new)
        kept = {name: value for name, value in wanted.items() if name in saved}
        params = checkpointer.restore_params(step, kept, program.shardings.params)
        saved = checkpointer.shapes(step, "training")
        fixed = {
            name: value
            for name, value in program.abstract.variables.items()
            if saved.get(f"variables/{name}") == value.shape
        }
        variables = checkpointer.restore_variables(step, fixed, program.shardings.variables)
    return Source(params, variables, step, tuple(missing))


def _check(where, wanted, saved, missing, new):
    faults = []
    refused = [name for name in missing if not any(re.search(pattern, name) for pattern in new)]
    if refused:
        faults.append(f"it lacks {_some(refused)}, which Trainer.init_new does not allow")
    if extra := sorted(set(saved) - set(wanted)):
        faults.append(f"the model has no {_some(extra)}")
    for name in sorted(set(saved) & set(wanted)):
        if saved[name] != tuple(wanted[name].shape):
            faults.append(f"{name!r} has shape {saved[name]}, the model's {wanted[name].shape}")
    if faults:
        shown = faults[:_SHOWN] + ([f"{len(faults) - _SHOWN} more"] if faults[_SHOWN:] else [])
        raise CheckpointMismatchError(f"{where}: " + "; ".join(shown))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
