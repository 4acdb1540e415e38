# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a progress bar on a terminal, plain lines elsewhere."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Display:
    """Shows messages, the run's progress and its records.

    Args:
      steps: steps of the whole run.
      step: steps done already.
      enabled: False shows nothing at all.
      console: where to; standard output by default.
    """

    def __init__(self, steps: int, step: int, *, enabled: bool, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._enabled = enabled
        self._steps = steps
        self._start = step
        self._progress: Progress | None = None

    def message(self, text: str) -> None:
        """Prints a line or more."""
        if self._enabled:
            self._console.print(text, markup=False)

    def start(self) -> None:
        """Opens the progress bar, if there is a terminal to draw it on."""
        if not (self._enabled and self._console.is_terminal):
            return
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(
            "training", total=self._steps, completed=self._start, metrics="compiling"
        )
        self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def record(self, step: int, split: str, values: Mapping[str, float | None], left: float | None):
        """Shows one record of metrics; `left` is the estimated time to the end in seconds."""
        text = _summary(values)
        if self._progress is not None and split == "train":
            self._progress.update(self._task, completed=step, metrics=text)
            return
        head = f"step {step}/{self._steps}" if split == "train" else f"step {step} {split}"
        tail = "" if left is None else f"  left {_clock(left)}"
        self.message(f"{head}  {text}{tail}")

    def stop(self) -> None:
        """Closes the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _summary(values: Mapping[str, float | None]) -> str:
    parts = [f"loss {values['loss']:.4f}", f"{values['bits_per_byte']:.4f} bits/byte"]
    # What layers report has a dot in its name.
    parts += [f"{name} {value:.4g}" for name, value in values.items() if "." in name]
    if values.get("tokens_per_second") is not None:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if values.get("mfu") is not None:
        parts.append(f"MFU {values['mfu']:.1%}")
    if values.get("skipped"):
        parts.append(f"{values['skipped']:.0f} steps skipped")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
