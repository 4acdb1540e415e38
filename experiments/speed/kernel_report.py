# SPDX-License-Identifier: Apache-2.0
"""What `kernels.py` writes: results that add up over runs, a table, plots."""

import json
import math
import pathlib
from typing import Any

from kernel_rows import GROUPS, HEADS, LENGTHS, SWEPT, Row

FORMS = ("pallas", "peer", "chunked")
COLOURS = {"pallas": "#0072b2", "peer": "#e69f00", "chunked": "#999999"}
NAMES = {"pallas": "seqmix kernels", "peer": "jax-linear-attention", "chunked": "seqmix in XLA"}
PASSES = (("forward", "fwd_ms", 0), ("forward and backward", "fwdbwd_ms", 1))


def _rows() -> dict[str, Row]:
    """All rows by name; of a name that several groups have, the first group's."""
    found: dict[str, Row] = {}
    for group in GROUPS.values():
        for row in group:
            found.setdefault(row.name, row)
    return found


class Results:
    """The JSON file of a folder: what is measured again replaces what is there.

    Attributes:
      runs: facts of each run (date, versions, device); results name theirs by number.
      rows: by name, {'errors': {...}, form: {...}}.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.runs: list[dict[str, Any]] = []
        self.rows: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "kernels.json").exists():
            self.merge(folder / "kernels.json")

    def merge(self, path: pathlib.Path) -> None:
        """Takes over another file's results."""
        found = json.loads(path.read_text())
        # Before there were several runs, the file was of one.
        runs = found.get("runs") or [{k: v for k, v in found.items() if k != "rows"}]
        first = len(self.runs)
        self.runs += runs
        for row in found["rows"]:
            mine = self.rows.setdefault(row["row"], {})
            for key, value in row.items():
                if isinstance(value, dict):
                    mine[key] = value | {"run": first + value.get("run", 0)}

    def put(self, row: Row, key: str, value: dict[str, Any]) -> None:
        """Adds what the last run found of a row, and writes the files.

        A form that fails keeps numbers that it had, beside the error.
        """
        mine = self.rows.setdefault(row.name, {})
        before = mine.get(key, {})
        value = value | {"run": len(self.runs) - 1}
        if "error" in value and "fwd_ms" in before:
            value = before | {"failed_later": value["error"]}
        mine[key] = value
        self.write()

    def write(self) -> None:
        """Writes kernels.json and kernels.md."""
        used = sorted({v["run"] for _, found in self.ordered() for v in found.values()})
        number = {old: new for new, old in enumerate(used)}
        rows = [
            {"row": row.name, "floor": [round(f, 4) for f in row.floor]}
            | {key: value | {"run": number[value["run"]]} for key, value in found.items()}
            for row, found in self.ordered()
        ]
        facts = {"runs": [self.runs[i] for i in used], "rows": rows}
        (self.folder / "kernels.json").write_text(json.dumps(facts, indent=1) + "\n")
        (self.folder / "kernels.md").write_text(table(facts))

    def ordered(self) -> list[tuple[Row, dict[str, Any]]]:
        """The rows as GROUPS has them; rows that are no longer measured are left out."""
        return [(row, self.rows[name]) for name, row in _rows().items() if name in self.rows]


def worst(errors: dict[str, Any]) -> float:
    """The greatest error of a row; NaN where one is NaN or none was measured."""
    found = [e for name, e in errors.items() if name not in ("run", "error")]
    if "error" in errors or not found or any(math.isnan(e) for e in found):
        return float("nan")
    return max(found)


def table(facts: dict[str, Any]) -> str:
    """A Markdown page, forward / forward + backward in ms."""
    lines, rows = [], _rows()
    for run in facts["runs"]:
        versions = [f"{k} {v}" for k, v in run.items() if k in ("jax", "jax-linear-attention")]
        ceilings = [f"{k} {v}" for k, v in run.get("ceilings", {}).items()]
        head = ", ".join([run["device"], run["date"], *versions, *ceilings])
        lines.append(f"- {head}: {run['method']}")
    heads = ["row", "floor", *FORMS, "pallas / floor", "gradients: pallas", "peer", "known"]
    heads.append("worst error")
    lines += ["", "Forward / forward and backward, ms; known: forward / gradients.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in facts["rows"]:
        name = row["row"]
        cells = [name, _pair(*row["floor"]), *(_cell(row.get(form)) for form in FORMS)]
        pallas = row.get("pallas", {})
        times = [pallas.get(field) for _, field, _ in PASSES]
        ratios = [t and t / f for t, f in zip(times, row["floor"], strict=True)]
        cells.append(_pair(*ratios, digits=1) if any(ratios) else "")
        cells += [_number(row.get(form, {}).get("gradients_ms")) for form in ("pallas", "peer")]
        known = rows[name].known
        cells.append(_pair(*known) if any(known) else "")
        cells.append(f"{worst(row['errors']):.1e}" if "errors" in row else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _pair(first: float | None, second: float | None, digits: int = 3) -> str:
    return " / ".join(_number(v, digits) or "–" for v in (first, second))


def _cell(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    if "fwd_ms" in found or "fwdbwd_ms" in found:
        return _pair(found.get("fwd_ms"), found.get("fwdbwd_ms"))
    return "no room" if "MemoryError" in found["error"] else "fails"


def draw(results: Results) -> None:
    """Writes the plots of the groups of which something was measured."""
    import matplotlib

    matplotlib.use("Agg")
    rows = {row.name: found for row, found in results.ordered()}
    device = results.runs[-1]["device"] if results.runs else ""
    _bars(rows, ("peers", "packed"), device, results.folder / "kernels.png")
    _lines(rows, "lengths", "tokens a row", device, results.folder / "kernels_lengths.png")
    _lines(rows, "heads", "rows x heads", device, results.folder / "kernels_heads.png")


def _bars(rows, groups, device: str, path: pathlib.Path) -> None:
    """Bars of the rows of groups, with the memory floor as a tick on each."""
    import matplotlib.pyplot as plt

    shown = {r.name: r for g in groups for r in GROUPS[g] if r.name in rows}
    names = list(shown)
    if not names:
        return
    size = (11, 0.42 * len(names) + 1.3)
    figure, panels = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for axes, (title, field, which) in zip(panels, PASSES, strict=True):
        for i, form in enumerate(FORMS):
            times = [rows[n].get(form, {}).get(field, math.nan) for n in names]
            places = [n + (i - 1) * 0.27 for n in range(len(names))]
            axes.barh(places, times, 0.27, label=NAMES[form], color=COLOURS[form])
        for n, row in enumerate(shown.values()):
            floor = row.floor[which]
            label = "memory floor" if n == 0 else None
            axes.plot([floor] * 2, [n - 0.42, n + 0.42], color="black", lw=1.4, label=label)
        axes.set(title=title, xscale="log", xlabel="ms")
        _plain(axes.xaxis)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    _finish(figure, panels[0], device, path)


def _points(rows, group: str, mixer: str):
    """(x, row) of a swept group."""
    for row in GROUPS[group]:
        if row.mixer == mixer and row.name in rows:
            yield (row.time if group == "lengths" else row.batch * row.values), row


def _lines(rows, group: str, label: str, device: str, path: pathlib.Path) -> None:
    """Time over a swept number, a column a mixer, forward above forward and backward."""
    import matplotlib.pyplot as plt

    if not any(True for mixer in SWEPT for _ in _points(rows, group, mixer)):
        return
    figure, panels = plt.subplots(2, 3, figsize=(11, 6.2), sharex="col", layout="constrained")
    ticks = sorted(LENGTHS if group == "lengths" else HEADS)
    for column, mixer in enumerate(SWEPT):
        points = sorted(_points(rows, group, mixer), key=lambda p: p[0])
        for axes, (title, field, which) in zip(panels[:, column], PASSES, strict=True):
            for form in FORMS:
                found = [(x, rows[r.name].get(form, {}).get(field)) for x, r in points]
                found = [(x, y) for x, y in found if y is not None]
                if found:
                    style = {"color": COLOURS[form], "marker": "o", "ms": 4}
                    axes.plot(*zip(*found, strict=True), label=NAMES[form], **style)
            floors = [(x, r.floor[which]) for x, r in points]
            if floors:
                axes.plot(*zip(*floors, strict=True), "k--", lw=1, label="memory floor")
            axes.set(xscale="log", yscale="log", title=f"{mixer}, {title}")
            axes.title.set_fontsize(9)
            axes.set_xticks(ticks, [_short(t) for t in ticks])
            axes.minorticks_off()
            _plain(axes.yaxis)
            axes.grid(alpha=0.25)
        panels[1, column].set_xlabel(label)
    for axes in panels[:, 0]:
        axes.set_ylabel("ms")
    _finish(figure, panels[0, 0], device, path)


def _plain(axis) -> None:
    """Numbers as they are spoken, at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)


def _finish(figure, axes, device: str, path: pathlib.Path) -> None:
    import matplotlib.pyplot as plt

    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    figure.suptitle(f"{device}, bfloat16", fontsize=10)
    figure.savefig(path, dpi=140)
    plt.close(figure)
