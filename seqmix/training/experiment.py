# SPDX-License-Identifier: Apache-2.0
"""The root config of a run, and how a resumed run's config may differ from the saved one."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from seqmix import config
from seqmix.data import DataConfig
from seqmix.models import HybridLMConfig
from seqmix.parallel import MeshConfig
from seqmix.training.optimizer import AdamWConfig, MuonConfig
from seqmix.training.schedule import WarmupCosineConfig, WarmupLinearConfig, WSDConfig

CONFIG_FILE = "config.gin"


@config.configurable("Trainer")
@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """The training loop's settings.

    Attributes:
      steps: optimizer steps of the whole run; the schedule's length.
      batch_size: rows per step, over all devices and micro-batches.
      gradient_accumulation: micro-batches a step is cut into; changes memory, not the gradient
        (but `MoE.balance_over` = 'batch' is the balance of a micro-batch).
      eval_every: steps between evaluations, None for none at all; the end of the run has one too.
      eval_batches: batches of an evaluation, None for the whole validation split.
      log_every: steps between records of the training metrics.
      checkpoint_every: steps between checkpoints, None for the end of the run only.
      keep_last: newest checkpoints kept.
      keep_every: checkpoints at multiples of this step are kept for good; None for none.
      z_loss: coefficient of the z-loss, 0 for none.
      loss_chunk_tokens: tokens per device whose logits exist at once.
      max_consecutive_nonfinite: skipped steps in a row that stop the run.
      seed: of the parameters (`Data.seed` orders the data).
      init_from: run folder whose newest checkpoint gives the initial parameters; everything else
        starts afresh. A run that resumes goes on from its own checkpoints.
      init_new: regular expressions of parameters that `init_from`'s checkpoint may lack; they start
        as the model draws them.
      trainable: regular expressions of the parameters to train, each searched for in names such as
        'stack.periods.0.mixer.indexer.query.kernel'; the rest stays as it is. Empty: all.
      profile_start: step at which a profiler trace starts, None for none.
      profile_steps: steps in the trace.
      compilation_cache: keep compiled programs on disk (`seqmix.training.compilation`).
    """

    steps: int = 1000
    batch_size: int = 16
    gradient_accumulation: int = 1
    eval_every: int | None = 200
    eval_batches: int | None = None
    log_every: int = 10
    checkpoint_every: int | None = 200
    keep_last: int = 2
    keep_every: int | None = None
    z_loss: float = 1e-4
    loss_chunk_tokens: int = 4096
    max_consecutive_nonfinite: int = 10
    seed: int = 0
    init_from: str | None = None
    init_new: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    profile_start: int | None = None
    profile_steps: int = 5
    compilation_cache: bool = True

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("init_from", "init_new", "trainable"):
                continue
            least = 0 if field.name in ("z_loss", "seed", "profile_start") else 1
            if value is not None and value < least and not isinstance(value, bool):
                raise ValueError(f"Trainer.{field.name} must be >= {least}, got {value}")
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"Trainer.batch_size must be a multiple of Trainer.gradient_accumulation="
                f"{self.gradient_accumulation}, got {self.batch_size}"
            )
        for name in ("init_new", "trainable"):
            for pattern in getattr(self, name):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"Trainer.{name}: {pattern!r} is no regular expression: {error}"
                    ) from None
        if self.init_from == "":
            raise ValueError("Trainer.init_from must be a run folder or None, got ''")
        if self.init_new and self.init_from is None:
            raise ValueError("Trainer.init_new needs Trainer.init_from")


@config.configurable("Experiment")
@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that defines a run.

    Attributes:
      model: the language model.
      data: corpora, tokenizer and packing.
      optimizer: AdamW or Muon, with the peak learning rate.
      schedule: the learning rate's course.
      trainer: the loop.
      mesh: the devices' layout.
    """

    model: HybridLMConfig = dataclasses.field(default_factory=HybridLMConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: AdamWConfig | MuonConfig = dataclasses.field(default_factory=AdamWConfig)
    schedule: WarmupCosineConfig | WSDConfig | WarmupLinearConfig = dataclasses.field(
        default_factory=WarmupCosineConfig
    )
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def __post_init__(self):
        for name, mixer in self.model.mixers.items():
            if not getattr(mixer, "causal", True):
                raise ValueError(
                    f"HybridLM.pattern has {name!r}, which reads later tokens: training on next "
                    "tokens would show it its labels"
                )
        if self.model.meta_tokens != self.data.meta_tokens:
            raise ValueError(
                "HybridLM.meta_tokens and Data.meta_tokens must be equal, the tokens that every "
                f"document begins with, got {self.model.meta_tokens} and {self.data.meta_tokens}"
            )


class ResumeError(ValueError):
    """A run folder's config and the wanted one differ where a resumed run must not."""


# What may change between the parts of one run: neither parameters nor the order of the data depend
# on it. A longer or shorter run stretches the schedule, knowingly.
_MAY_CHANGE = {
    ("Trainer", name)
    for name in (
        "steps",
        "eval_every",
        "eval_batches",
        "log_every",
        "checkpoint_every",
        "keep_last",
        "keep_every",
        "max_consecutive_nonfinite",
        "profile_start",
        "profile_steps",
        "compilation_cache",
    )
} | {("Mesh", "data"), ("Mesh", "fsdp"), ("Data", "cache_dir"), ("Data", "prefetch")}


def load_experiment(run_dir: Path | str, overrides: Iterable[str] = ()) -> Experiment:
    """Builds the experiment saved in a run folder.

    Args:
      run_dir: a folder written by `train`.
      overrides: "Name.parameter=value" each, applied on top.

    Raises:
      FileNotFoundError: the folder holds no saved config.
      ConfigError: the saved text or an override does not build.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} is no run folder: it holds no {CONFIG_FILE}")
    return config.load([path], overrides).build(Experiment)


def check_resumable(saved: Experiment, wanted: Experiment, run_dir: Path | str) -> None:
    """Compares the configs of a run's two parts.

    Raises:
      ResumeError: names every setting that differs and may not, with both values.
    """
    before, after = (config.from_text(config.resolved(e)).bindings for e in (saved, wanted))
    lines = []
    for key in sorted(before.keys() | after.keys()):
        scope, name, parameter = key
        old, new = (_value(bindings, key) for bindings in (before, after))
        if old != new and (name, parameter) not in _MAY_CHANGE:
            path = f"{scope}/{name}" if scope else name
            lines.append(f"  {path}.{parameter} was {old}, is {new}")
    if lines:
        raise ResumeError(
            f"{run_dir} was trained with another config; resume it as it was, or take a new "
            "folder:\n" + "\n".join(lines)
        )


def _value(bindings, key) -> str:
    if key not in bindings:
        return "absent"
    value = bindings[key].value
    # gin's references show themselves as gin writes them, plain values as Python does.
    return repr(value) if isinstance(value, bool | int | float | str | None) else str(value)
