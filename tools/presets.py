# SPDX-License-Identifier: Apache-2.0
"""Writes the table of `configs/presets`: each preset's parameters beside the published model's.

    python tools/presets.py

What is published is in `configs/presets/published.json`; a second count, by transformers, in
`configs/presets/counted.json` (see `preset_counts.py`).
"""

import json
from pathlib import Path

from seqmix import config, models
from seqmix.models import HybridLMConfig
from seqmix.training import Experiment

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "presets"
TABLE = FOLDER / "README.md"
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}

HEAD = """# Presets

Published models as configs of this framework's parts. `seqmix inspect --gin_file=...` prints the
layers of one, and `tiny/` has a twin of each that trains on bytes in a minute:

```sh
seqmix inspect --gin_file=configs/presets/jamba.gin
seqmix train --gin_file=configs/presets/tiny/jamba.gin
```

`parameters` is what `seqmix inspect` counts. `transformers` is the count of that library's model of
the published config, built without memory: `=` where it is the same, layer by layer (with a shared
transformer, in all). `active` leaves out embedding, head and the experts that a token does not go
to, as the published numbers do. Written by `python tools/presets.py`.

"""


def names() -> list[str]:
    """The presets, in the table's order."""
    return list(json.loads((FOLDER / "published.json").read_text()))


def model(path: Path) -> HybridLMConfig:
    """The model of a preset or a tiny twin."""
    return config.load([path]).build(Experiment).model


def is_rounded(count: int, published: str) -> bool:
    """Whether the published text is this count, rounded to the digits it has ('8.03B')."""
    if published[-1] not in UNITS:
        return int(published.replace(",", "")) == count
    digits = len(published[:-1].partition(".")[2])
    return round(count / UNITS[published[-1]], digits) == float(published[:-1])


def render() -> str:
    """The text of the table.

    Raises:
      ValueError: a count is not that of transformers, or not the published one and
        `published.json` does not say why.
    """
    published = json.loads((FOLDER / "published.json").read_text())
    counted = json.loads((FOLDER / "counted.json").read_text())
    columns = ["preset", "model", "parameters", "published", "transformers", "active", "published"]
    rows, notes = [columns, ["---", "---", "--:", "--:", "--:", "--:", "--:"]], []
    for name, entry in published.items():
        report = models.inspect(model(FOLDER / f"{name}.gin"))
        _check(name, report, counted.get(name))
        outside = report.embedding_parameters + report.head_parameters
        active = report.active - outside if report.active < report.parameters else None
        claims = [(report.parameters, entry["published"])]
        if active is not None:
            claims.append((active, entry["active"]))
        mark = ""
        if "why" in entry:
            notes.append(entry["why"])
            mark = f" [{len(notes)}]"
        elif not all(is_rounded(*claim) for claim in claims):
            raise ValueError(f"{name}: counted, published: {claims}; say why in published.json")
        rows.append(
            [
                f"[{name}]({name}.gin)",
                entry["model"],
                f"{report.parameters:,}",
                entry["published"] + mark,
                "=" if name in counted else "",
                "" if active is None else f"{active / 1e9:.2f}B",
                entry.get("active", ""),
            ]
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    sources = "\n".join(
        f"- {name}: {entry['published']}, {entry['where']}" for name, entry in published.items()
    )
    numbered = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return f"{HEAD}{table}\n\nWhere the numbers differ:\n\n{numbered}\n\nSources:\n\n{sources}\n"


def _check(name: str, report: models.Report, counted: dict | None) -> None:
    """Raises ValueError unless a report has the parameters that transformers counted."""
    if counted is None:
        return
    layers = [size for size, run in counted["layers"] for _ in range(run)]
    ours = [row.parameters for row in report.layers]
    if report.parameters != counted["total"]:
        raise ValueError(f"{name}: {report.parameters} parameters, not {counted['total']}")
    # Shared weights are counted with the first layer that uses them there, apart here.
    if not report.shared_parameters and ours != layers:
        different = [
            i for i, pair in enumerate(zip(ours, layers, strict=True)) if len(set(pair)) > 1
        ]
        raise ValueError(f"{name}: the parameters of layers {different} differ")


if __name__ == "__main__":
    TABLE.write_text(render())
    print(TABLE)
