# SPDX-License-Identifier: Apache-2.0
import dataclasses
import io
import json
import math

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqmix.training.display import Display
from seqmix.training.flops import model_flops_utilisation, peak_flops
from seqmix.training.metrics import MetricsWriter, plot_loss, read_metrics


def record(step):
    return {"loss": 5.0 - step, "bits_per_byte": 7.0 - step, "mfu": None}


def write(run_dir, start, stop):
    writer = MetricsWriter(run_dir, start)
    for step in range(start + 1, stop + 1):
        writer.write(step, "train", record(step))
    writer.close()


def test_records_after_the_resumed_step_are_replaced(tmp_path):
    write(tmp_path, 0, 5)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 6, "sp')  # killed while writing
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    write(tmp_path, 3, 4)
    found = list(read_metrics(tmp_path))
    assert found == [{"step": step, "split": "train", **record(step)} for step in (1, 2, 3, 4)]

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars] == [(s, 5.0 - s) for s in (1, 2, 3, 4)]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_a_record_is_never_repeated(tmp_path):
    write(tmp_path, 0, 3)
    writer = MetricsWriter(tmp_path, 3)
    writer.write(3, "train", {"loss": 9.0})
    writer.write(3, "validation", {"loss": 8.0})
    writer.close()
    found = [(r["step"], r["split"], r["loss"]) for r in read_metrics(tmp_path)]
    assert found[2:] == [(3, "train", 2.0), (3, "validation", 8.0)]


def test_what_is_not_finite_is_null(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, "train", {"loss": math.nan, "grad_norm": math.inf})
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 1,
        "split": "train",
        "loss": None,
        "grad_norm": None,
    }


def test_plot(tmp_path, monkeypatch):
    write(tmp_path, 0, 3)
    writer = MetricsWriter(tmp_path, 3)
    writer.write(3, "validation", record(3))
    writer.write(3, "bigram", {"bits_per_byte": 3.5})
    writer.close()
    from matplotlib.axes import Axes

    drawn = []
    plot, line = Axes.plot, Axes.axhline
    monkeypatch.setattr(Axes, "plot", lambda *a, **k: (drawn.append(k["label"]), plot(*a, **k))[1])
    monkeypatch.setattr(
        Axes, "axhline", lambda *a, **k: (drawn.append(k["label"]), line(*a, **k))[1]
    )
    path = plot_loss(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert drawn == ["train", "validation", "bigram baseline (3.500)"]


def shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=140, highlight=False)
    display = Display(100, 40, enabled=True, console=console)
    display.start()
    values = {"loss": 1.25, "bits_per_byte": 1.8, "tokens_per_second": 12345.6, "skipped": 2}
    display.advance(50)
    display.record(50, "train", values, 75.0)
    display.stop()
    return console.file.getvalue()


def test_plain_lines_without_a_terminal():
    assert shown(terminal=False) == (
        "step 50/100  loss 1.2500  1.8000 bits/byte  12,346 tokens/s  2 steps skipped  left 1:15\n"
    )


def test_a_bar_on_a_terminal():
    text = shown(terminal=True)
    for part in ("50/100", "loss 1.2500", "1.8000 bits/byte", "12,346 tokens/s", "left"):
        assert part in text


def test_disabled_display_is_silent():
    console = Console(file=io.StringIO())
    display = Display(10, 0, enabled=False, console=console)
    display.start()
    display.message("hello")
    display.record(1, "train", {"loss": 1.0, "bits_per_byte": 1.0}, None)
    display.stop()
    assert console.file.getvalue() == ""


@dataclasses.dataclass
class Chip:
    device_kind: str


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_model_flops_utilisation(kind, peak):
    assert peak_flops(Chip(kind)) == peak
    found = model_flops_utilisation(1e9, 2e5, [Chip(kind)] * 4)
    if peak is None:
        assert found is None
    else:
        assert found == pytest.approx(3 * 1e9 * 2e5 / (4 * peak))
