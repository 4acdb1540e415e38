# SPDX-License-Identifier: Apache-2.0
"""Training: loss, optimizers, steps, loop, checkpoints, metrics."""

from seqmix.training.checkpoint import Checkpointer, CheckpointError, CheckpointMismatchError
from seqmix.training.compilation import enable_compilation_cache
from seqmix.training.evaluation import LoadedRun, evaluate, load_run
from seqmix.training.experiment import (
    Experiment,
    ResumeError,
    TrainerConfig,
    check_resumable,
    load_experiment,
)
from seqmix.training.loop import NonFiniteError, TrainResult, train
from seqmix.training.loss import LossSums, chunked_cross_entropy
from seqmix.training.metrics import plot_loss, read_metrics
from seqmix.training.optimizer import AdamWConfig, MuonConfig
from seqmix.training.schedule import WarmupCosineConfig, WarmupLinearConfig, WSDConfig

__all__ = [
    "AdamWConfig",
    "CheckpointError",
    "CheckpointMismatchError",
    "Checkpointer",
    "Experiment",
    "LoadedRun",
    "LossSums",
    "MuonConfig",
    "NonFiniteError",
    "ResumeError",
    "TrainResult",
    "TrainerConfig",
    "WSDConfig",
    "WarmupCosineConfig",
    "WarmupLinearConfig",
    "check_resumable",
    "chunked_cross_entropy",
    "enable_compilation_cache",
    "evaluate",
    "load_experiment",
    "load_run",
    "plot_loss",
    "read_metrics",
    "train",
]
