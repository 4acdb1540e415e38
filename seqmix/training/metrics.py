# SPDX-License-Identifier: Apache-2.0
"""Metrics on disk: JSON lines, TensorBoard events and a plot of the loss."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"


def read_metrics(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    """Yields the records of a run, in order; a last line cut short by a kill is left out."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


class MetricsWriter:
    """Appends records to `metrics.jsonl` and `tensorboard/` of a run folder.

    Args:
      run_dir: created when missing.
      step: the step the run goes on from; what was recorded after it belongs to a part of the run
        that is being repeated, and is removed.
    """

    def __init__(self, run_dir: Path | str, step: int):
        self._path = Path(run_dir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_metrics(run_dir) if record["step"] <= step]
        # Written beside and renamed: a kill in between loses nothing.
        fresh = self._path.with_suffix(".tmp")
        fresh.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(fresh, self._path)
        self._last = {record["split"]: record["step"] for record in kept}
        self._file = self._path.open("a", encoding="utf-8")
        self._events = _EventWriter(self._path.parent / "tensorboard", step)

    def write(self, step: int, split: str, values: Mapping[str, float | int | None]) -> None:
        """Adds one record: {"step", "split", **values}; what is not finite becomes null.

        A record of that step and split that is there already, from before a resume, stays.
        """
        if self._last.get(split, -1) >= step:
            return
        self._last[split] = step
        clean = {name: _finite(value) for name, value in values.items()}
        self._file.write(_line({"step": step, "split": split, **clean}))
        scalars = {f"{split}/{k}": v for k, v in clean.items() if v is not None}
        self._events.scalars(step, scalars)

    def has(self, split: str) -> bool:
        """Whether the run has a record of that split."""
        return split in self._last

    def flush(self) -> None:
        """Hands everything to the disk, so that a checkpoint never knows more than the metrics."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        self.flush()
        self._file.close()
        self._events.close()


class _EventWriter:
    """TensorBoard's event file, through its own record writer; TensorFlow is not needed."""

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{os.getpid()}.{step}"
        self._records = RecordWriter((folder / name).open("ab"))
        self._add(event_pb2.Event(file_version="brain.Event:2", wall_time=time.time()))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # TensorBoard drops earlier files' events from this step on: they are about to be repeated.
        self._add(event_pb2.Event(session_log=start, step=step + 1, wall_time=time.time()))

    def scalars(self, step: int, values: Mapping[str, float]):
        summary = summary_pb2.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._add(event_pb2.Event(summary=summary, step=step, wall_time=time.time()))

    def _add(self, event: Any):
        self._records.write(event.SerializeToString())

    def flush(self):
        self._records.flush()

    def close(self):
        self._records.close()


def _finite(value: float | int | None) -> float | int | None:
    return None if value is None or not math.isfinite(value) else value


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def plot_loss(run_dir: Path | str) -> Path:
    """Draws bits per byte over steps, with the bigram baseline, from the JSON lines.

    Returns:
      The PNG's path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {"train": [], "validation": [], "bigram": []}
    for record in read_metrics(run_dir):
        if record.get("bits_per_byte") is not None and record["split"] in curves:
            curves[record["split"]].append((record["step"], record["bits_per_byte"]))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for split, style in (("train", {"alpha": 0.6}), ("validation", {"marker": "o"})):
        if curves[split]:
            axes.plot(*zip(*curves[split], strict=True), label=split, **style)
    if curves["bigram"]:
        value = curves["bigram"][-1][1]
        axes.axhline(value, color="gray", linestyle="--", label=f"bigram baseline ({value:.3f})")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    path = Path(run_dir) / PLOT_FILE
    FigureCanvasAgg(figure).print_png(path)
    return path
