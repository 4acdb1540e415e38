# SPDX-License-Identifier: Apache-2.0
"""The training loop: data, steps, evaluation, checkpoints, stopping and resuming."""

import contextlib
import dataclasses
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqmix import config, data
from seqmix.training.checkpoint import Checkpointer, check_facts, has_checkpoint
from seqmix.training.compilation import enable_compilation_cache
from seqmix.training.display import Display
from seqmix.training.evaluation import (
    CHECKPOINTS,
    TOKENIZER,
    check_tokenizer,
    run_evaluation,
    validation_data,
)
from seqmix.training.experiment import (
    CONFIG_FILE,
    Experiment,
    check_resumable,
    load_experiment,
)
from seqmix.training.flops import model_flops_utilisation
from seqmix.training.initial import read_source
from seqmix.training.metrics import MetricsWriter, plot_loss
from seqmix.training.program import Program, build_program
from seqmix.training.state import TrainState
from seqmix.training.step import metric_names, summarise
from seqmix.training.stopping import StopRequest, catch_signals

# Steps whose metrics may be under way: the host prepares the next step while the device works on
# these.
_LAG = 2


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
      run_dir: the run folder.
      step: steps done.
      stopped: None at the end of the run, else what asked it to stop ("SIGTERM").
      train: the last record of training metrics, {} when no step ran.
      validation: the last evaluation, None without evaluation.
      bigram: bits per byte of the bigram baseline on the validation split, None without evaluation.
    """

    run_dir: Path
    step: int
    stopped: str | None
    train: dict[str, float | None]
    validation: dict[str, float | None] | None
    bigram: float | None


def train(experiment: Experiment, run_dir: Path | str, *, progress: bool = True) -> TrainResult:
    """Trains, or goes on training where the run folder's newest checkpoint stands.

    Args:
      experiment: the run's config.
      run_dir: folder of config, metrics, checkpoints, tokenizer and plot; created when missing.
      progress: show messages and a progress bar on standard output.

    Raises:
      ResumeError: the folder's run has another config.
      CheckpointError: a save failed.
      NonFiniteError: too many steps were skipped in a row.
      ValueError: settings that do not go together.
      DataError: the data cannot be used.
    """
    if experiment.trainer.compilation_cache:
        enable_compilation_cache()
    run_dir = Path(run_dir).absolute()
    if has_checkpoint(run_dir / CHECKPOINTS) and (run_dir / CONFIG_FILE).is_file():
        check_resumable(load_experiment(run_dir), experiment, run_dir)
    with catch_signals() as stop, contextlib.ExitStack() as stack:
        return _Run(experiment, run_dir, progress, stop, stack).run()


class _Run:
    """One call of `train`: what it holds open, and its steps in order."""

    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        progress: bool,
        stop: StopRequest,
        stack: contextlib.ExitStack,
    ):
        self.experiment, self.trainer = experiment, experiment.trainer
        self.run_dir, self.stop = run_dir, stop
        self.primary = jax.process_index() == 0
        dataset = data.build(
            experiment.data,
            split="train",
            batch_size=self.trainer.batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            vocabulary=experiment.model.vocabulary,
        )
        self.program: Program = build_program(experiment, dataset.tokenizer.byte_lengths())
        self.validation_data = None
        if self.trainer.eval_every is not None:
            self.validation_data = validation_data(experiment)
        self._check_tokenizer(dataset.tokenizer)
        self._check_source(dataset.tokenizer)
        self.checkpointer = Checkpointer(
            run_dir / CHECKPOINTS,
            keep_last=self.trainer.keep_last,
            keep_every=self.trainer.keep_every,
        )
        stack.callback(self.checkpointer.close)
        self.batches = iter(dataset)
        stack.callback(self.batches.close)
        self.origin: str | None = None
        self.step, self.state = self._start()
        # Only now: a resume that was refused leaves the folder as it was.
        self._save_folder(dataset.tokenizer)
        self.metrics = None
        if self.primary:
            self.metrics = MetricsWriter(run_dir, self.step)
            stack.callback(self.metrics.close)
        self.display = Display(self.trainer.steps, self.step, enabled=progress and self.primary)
        stack.callback(self.display.stop)
        self.profiling = False
        stack.callback(self._stop_profile)
        self.pending: deque[tuple[int, jax.Array]] = deque()
        self.train_record: dict[str, float | None] = {}
        self.validation_record: dict[str, float | None] | None = None
        self.evaluated: int | None = None
        self.rate = _Rate()

    def run(self) -> TrainResult:
        """Runs the loop to its end or to a request to stop."""
        trainer = self.trainer
        bigram = self._announce()
        self.display.start()
        while self.step < trainer.steps and not self.stop.reached(self.step):
            self._profile()
            batch = self.program.put(next(self.batches))
            self.state, vector = self.program.train_step(self.state, batch)
            self.step += 1
            self.pending.append((self.step, vector))
            self._drain(_LAG)
            self.checkpointer.poll()
            if _due(self.step, trainer.eval_every):
                self._evaluate()
            if _due(self.step, trainer.checkpoint_every):
                self._save()
        self._drain(0)
        if self.step >= trainer.steps and self.validation_data is not None:
            self._evaluate()
        self._save()
        self.checkpointer.wait()
        self.display.stop()
        return self._finish(bigram)

    def _start(self) -> tuple[int, TrainState]:
        latest = self.checkpointer.latest_step()
        if latest is None:
            return 0, self._initial()
        where = f"{self.run_dir}, checkpoint {latest}"
        facts = self.checkpointer.facts(latest)
        check_facts(facts, self._facts(), where)
        if facts.get("untrained"):
            self.origin = "parameters as imported, the optimizer starts afresh"
            source = read_source(self.program, self.run_dir, ())
            return latest, source.replace(self.program.initialise())
        state, position = self.checkpointer.restore(
            latest, self.program.abstract, self.program.shardings
        )
        self.batches.set_state(position)
        return latest, state

    def _initial(self) -> TrainState:
        """A fresh state, with another run's parameters where the config says so."""
        if self.trainer.init_from is None:
            return self.program.initialise()
        # Read first: what does not fit shows before anything is compiled.
        source = read_source(self.program, self.trainer.init_from, self.trainer.init_new)
        self.origin = f"parameters of {self.trainer.init_from}, checkpoint {source.step}"
        if source.missing:
            self.origin += f"; drawn anew: {', '.join(source.missing)}"
        return source.replace(self.program.initialise())

    def _facts(self) -> dict[str, Any]:
        return run_facts(self.experiment)

    def _check_tokenizer(self, tokenizer: data.Tokenizer):
        if has_checkpoint(self.run_dir / CHECKPOINTS):
            check_tokenizer(self.run_dir, tokenizer)

    def _check_source(self, tokenizer: data.Tokenizer):
        source = self.trainer.init_from
        if source is None or has_checkpoint(self.run_dir / CHECKPOINTS):
            return  # a run that resumes goes on from its own checkpoints
        if Path(source).resolve() == self.run_dir.resolve():
            raise ValueError(
                f"Trainer.init_from = {source!r} is the run's own folder, which has no checkpoint; "
                "name another run"
            )
        if not has_checkpoint(Path(source) / CHECKPOINTS):
            raise ValueError(f"Trainer.init_from = {source!r} holds no checkpoint")
        check_tokenizer(source, tokenizer)

    def _save_folder(self, tokenizer: data.Tokenizer):
        if not self.primary:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        fresh = self.run_dir / f"{CONFIG_FILE}.tmp"
        fresh.write_text(config.resolved(self.experiment), encoding="utf-8")
        fresh.replace(self.run_dir / CONFIG_FILE)
        tokenizer.save(self.run_dir / TOKENIZER)

    def _announce(self) -> float | None:
        """Prints config, size and baseline; returns the baseline."""
        say = self.display.message
        say(config.resolved(self.experiment))
        count = sum(int(np.prod(value.shape)) for value in self.program.abstract.params.values())
        devices = self.program.mesh.devices.flatten()
        inactive = self.experiment.model.inactive_parameters
        active = f" ({count - inactive:,} of them for a token)" if inactive else ""
        say(f"{count:,} parameters{active} on {len(devices)} x {devices[0].device_kind}")
        say(f"run folder {self.run_dir}")
        trained = self.program.trained
        if len(trained) < len(self.program.abstract.params):
            size = sum(int(np.prod(self.program.abstract.params[name].shape)) for name in trained)
            say(f"{size:,} of them are trained: {', '.join(trained)}")
        if self.origin is not None:
            say(self.origin)
        if self.step:
            say(f"resumed at step {self.step}")
        if self.validation_data is None:
            return None
        bigram = data.bigram_baseline(self.experiment.data)
        say(f"bigram baseline: {bigram:.4f} bits/byte")
        if self.metrics is not None and not self.metrics.has("bigram"):
            self.metrics.write(self.step, "bigram", {"bits_per_byte": bigram})
        return bigram

    def _drain(self, keep: int):
        """Fetches metrics of all but the newest `keep` steps."""
        while len(self.pending) > keep:
            step, vector = self.pending.popleft()
            self._handle(step, np.asarray(vector))

    def _handle(self, step: int, vector: np.ndarray):
        auxiliary = self.program.definition.auxiliary
        values = dict(zip(metric_names(auxiliary), map(float, vector), strict=True))
        self.rate.add(values["tokens"])
        self.display.advance(step)
        if values["consecutive"] >= self.trainer.max_consecutive_nonfinite:
            raise NonFiniteError(
                f"step {step}: loss or gradient not finite for {values['consecutive']:.0f} steps "
                f"in a row (Trainer.max_consecutive_nonfinite); parameters are those of step "
                f"{step - int(values['consecutive'])}"
            )
        if not values["finite"]:
            logging.getLogger(__name__).warning("step %d skipped: not finite", step)
        if not _due(step, self.trainer.log_every) and step != self.trainer.steps:
            return
        record: dict[str, float | None] = {
            **summarise(vector, self.trainer.z_loss, auxiliary),
            "grad_norm": values["grad_norm"],
            "learning_rate": values["learning_rate"],
            "skipped": int(values["skipped"]),
        }
        speed, per_step = self.rate.take()
        record["tokens_per_second"] = speed
        record["mfu"] = self._utilisation(speed, values)
        left = None if per_step is None else per_step * (self.trainer.steps - step)
        self.train_record = record
        self._write(step, "train", record, left)

    def _utilisation(self, speed: float | None, values: dict[str, float]) -> float | None:
        if speed is None or not values["tokens"]:
            return None
        context = values["context"] / values["tokens"]
        flops = self.experiment.model.flops_per_token(context)
        return model_flops_utilisation(flops, speed, list(self.program.mesh.devices.flatten()))

    def _write(self, step: int, split: str, record: dict[str, float | None], left=None):
        if self.metrics is not None:
            self.metrics.write(step, split, record)
        self.display.record(step, split, record, left)

    def _evaluate(self):
        self._drain(0)
        if self.evaluated == self.step:
            return
        with self.rate.paused():
            record = run_evaluation(
                self.program,
                self.state.params,
                self.state.variables,
                self.validation_data,
                self.trainer.eval_batches,
                self.trainer.z_loss,
            )
        self.evaluated, self.validation_record = self.step, record
        self._write(self.step, "validation", record)

    def _save(self):
        self._drain(0)
        with self.rate.paused():
            if self.metrics is not None:
                self.metrics.flush()
            self.checkpointer.save(self.step, self.state, self.batches.get_state(), self._facts())

    def _profile(self):
        first = self.trainer.profile_start
        if first is not None and self.step == first:
            self._drain(0)
            jax.profiler.start_trace(str(self.run_dir / "profile"))
            self.profiling = True
        elif first is not None and self.step == first + self.trainer.profile_steps:
            self._drain(0)
            self._stop_profile()

    def _stop_profile(self):
        if self.profiling:
            self.profiling = False
            jax.profiler.stop_trace()

    def _finish(self, bigram: float | None) -> TrainResult:
        stopped = self.stop.reason if self.step < self.trainer.steps else None
        if self.metrics is not None:
            self.metrics.flush()
            plot_loss(self.run_dir)
        say = self.display.message
        if stopped:
            say(f"stopped by {stopped} at step {self.step}; saved, and resumes from {self.run_dir}")
        elif self.validation_record is not None:
            model = self.validation_record["bits_per_byte"]
            say(f"model {model:.4f} bits/byte, bigram {bigram:.4f} bits/byte")
        return TrainResult(
            self.run_dir, self.step, stopped, self.train_record, self.validation_record, bigram
        )


def run_facts(experiment: Experiment) -> dict[str, Any]:
    """The settings that a checkpoint must share with the run that reads it, by name."""
    stacking = ("pattern", "layers", "leading", "trailing", "scan")
    facts = {f"HybridLM.{name}": getattr(experiment.model, name) for name in stacking}
    return {**facts, "Trainer.seed": experiment.trainer.seed}


class _Rate:
    """Tokens per second and seconds per step, without pauses and the first step's compilation."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._tokens = 0.0
        self._steps = 0

    def add(self, tokens: float):
        if self._since is None:
            self._since = time.perf_counter()
            return
        self._tokens += tokens
        self._steps += 1

    def take(self) -> tuple[float | None, float | None]:
        if self._since is None or not self._steps:
            return None, None
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        rates = self._tokens / seconds, seconds / self._steps
        self._since, self._tokens, self._steps = now, 0.0, 0
        return rates

    @contextlib.contextmanager
    def paused(self):
        begin = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - begin


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
