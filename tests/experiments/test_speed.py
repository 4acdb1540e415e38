# SPDX-License-Identifier: Apache-2.0
"""The scripts that measure speed on a GPU, at tiny sizes: what they count, keep and write."""

import importlib
import json
import re
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

SPEED = Path(__file__).resolve().parents[2] / "experiments" / "speed"


@pytest.fixture
def module(monkeypatch):
    """Imports a script of experiments/speed."""
    monkeypatch.syspath_prepend(str(SPEED))
    return importlib.import_module


@pytest.fixture
def command(module, monkeypatch):
    """Runs a script with arguments."""

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module(name).main()

    return call


def test_a_timed_loop_calls_as_often_as_it_says_and_keeps_its_work_inside(module):
    timing = module("timing")
    x = jnp.full((8, 8), 2.0)
    loop = timing.compile_loop(lambda x: (x @ x, x + 1), x, turns=5)
    assert float(loop.compiled(x)) == 5 * (32 + 3)
    text = loop.compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert re.search(r" dot\(|dot_fusion|fusion\(", text)
    assert " dot(" not in entry and "while(" in entry


def test_time_is_of_one_call(module, monkeypatch):
    timing = module("timing")
    monkeypatch.setattr(timing, "WARM_UP", 0.0)
    calls = []

    def compiled(x):
        calls.append(x)
        time.sleep(0.03)
        return x

    loop = timing.Loop(compiled, turns=10, temporary_gib=0.0, results_gib=0.0, seconds=0.0)
    assert timing.milliseconds(loop, 1.0) == pytest.approx(3.0, rel=0.2)
    assert len(calls) == 1 + timing.LOOPS


def test_a_program_that_does_not_fit_is_not_started(module, monkeypatch):
    timing = module("timing")

    class Device:
        def memory_stats(self):
            return {"bytes_limit": 3 * timing.GIB, "bytes_in_use": 2 * timing.GIB}

    monkeypatch.setattr(timing.jax, "devices", lambda: [Device()])
    timing.check_room(timing.Loop(None, 1, 0.5, 0.4, 0.0))
    with pytest.raises(MemoryError, match=r"needs 1\.5 GiB"):
        timing.check_room(timing.Loop(None, 1, 0.5, 1.0, 0.0))


def test_a_profile_names_what_ran(module):
    timing = module("timing")
    x = jnp.ones((64, 64))
    loop = timing.compile_loop(lambda x: jnp.sin(x) @ x, x, turns=2)
    loop.compiled(x)
    assert timing.kernel_times(loop, x) == {}  # no GPU took part
    assert timing.kernel_times(loop, x, planes="/host:", lines="", most=2)


def test_floors_are_those_of_the_bytes(module):
    rows = {row.name: row for row in module("kernel_rows").GROUPS["peers"]}
    expected = {
        "simple_gla B8 T4096 H16 D128": (0.126, 0.347),
        "gated_delta_rule B1 T32768 H16 D128": (0.127, 0.349),
        "gated_delta_rule B8 T4096 H32 D64": (0.128, 0.352),
        "ssd B8 T4096 H1/32 K128 V64": (0.068, 0.172),
    }
    for name, floor in expected.items():
        assert rows[name].floor == pytest.approx(floor, abs=6e-4)


def test_a_row_of_several_groups_keeps_what_is_known(module):
    rows, found = module("kernel_rows"), module("kernel_report")._rows()
    swept = {row.name for name in ("heads", "lengths") for row in rows.GROUPS[name]}
    both = [row for row in rows.GROUPS["peers"] if row.name in swept]
    assert both
    assert all(found[row.name].known == row.known != (None, None) for row in both)


def test_sweeps_keep_tokens_or_length(module):
    rows = module("kernel_rows")
    assert {row.batch * row.time for row in rows.GROUPS["lengths"]} == {262_144}
    assert {row.time for row in rows.GROUPS["heads"]} == {4096}
    assert {row.batch * row.values for row in rows.GROUPS["heads"]} == set(rows.HEADS)
    for row in rows.GROUPS["packed"]:
        ids = rows.segments(row)
        assert ids.shape == (row.batch, row.time)
        assert len(set(ids[0].tolist())) == 16 and (jnp.diff(ids[0]) >= 0).all()


def tiny(rows, mixer="simple_gla", **changes):
    """A row that a CPU takes in no time."""
    keys = 1 if mixer == "ssd" else 2
    return rows.Row(mixer, 2, 32, keys, 2, 8, 8)._replace(**changes)


@pytest.mark.parametrize(
    "mixer",
    [
        "ssd",
        pytest.param("gated_delta_rule", marks=pytest.mark.slow),
        pytest.param("delta_rule", marks=pytest.mark.slow),
        pytest.param("linear_attention", marks=pytest.mark.slow),
    ],
)
def test_a_form_is_checked_against_the_recurrence(mixer, module):
    kernels, rows = module("kernels"), module("kernel_rows")
    errors = kernels.check(tiny(rows, mixer, documents=3), impl="chunked")()
    assert {"out", "state", "d_x" if mixer == "ssd" else "d_v"} < errors.keys()
    assert max(errors.values()) < 2e-2  # bfloat16 throughout, against float32


def test_an_error_is_seen(module, monkeypatch):
    kernels, rows = module("kernels"), module("kernel_rows")
    right = rows.ours

    def wrong(row, impl):
        call = right(row, impl)
        if impl == "recurrent":
            return call
        return lambda *args: (1.1 * call(*args)[0], call(*args)[1])

    monkeypatch.setattr(rows, "ours", wrong)
    errors = kernels.check(tiny(rows), impl="chunked")()
    assert errors["out"] == pytest.approx(0.1, abs=0.01)
    assert errors["state"] < 0.02


@pytest.fixture
def tiny_groups(module, monkeypatch):
    """The groups of kernels.py with tiny rows."""
    rows = module("kernel_rows")
    two = (tiny(rows), tiny(rows, batch=1, time=16))
    for name in rows.GROUPS:
        monkeypatch.setitem(rows.GROUPS, name, two)
    monkeypatch.setattr(module("timing"), "WARM_UP", 0.0)
    monkeypatch.setattr(module("timing"), "LEAST", 0.0)
    return two


def read(folder):
    found = json.loads((folder / "kernels.json").read_text())
    return found["runs"], {row["row"]: row for row in found["rows"]}


def test_runs_add_up_and_a_failure_loses_nothing(
    tiny_groups, command, module, tmp_path, monkeypatch
):
    real = module("kernels").measure

    def measure(row, name, alone, profile):
        if name == "pallas":
            return real(row, name, alone, profile)
        return lambda: {"fwd_ms": 1.0, "fwdbwd_ms": 3.0 * row.batch}

    monkeypatch.setattr(module("kernels"), "measure", measure)
    first, second = (row.name for row in tiny_groups)
    command("kernels", f"--out={tmp_path}", "--forms", "chunked", "--groups", "lengths")
    runs, rows = read(tmp_path)
    before = rows[second]["chunked"]
    assert len(runs) == 1 and rows.keys() == {first, second}
    assert before == {"fwd_ms": 1.0, "fwdbwd_ms": 3.0, "run": 0}

    # There is no kernel on this machine: an error, and the run says so.
    with pytest.raises(SystemExit, match="errors above"):
        command("kernels", f"--out={tmp_path}", "--forms", "pallas", "--rows", "B2")
    runs, rows = read(tmp_path)
    assert len(runs) == 2
    assert "ValueError" in rows[first]["pallas"]["error"] and rows[first]["pallas"]["run"] == 1
    assert rows[second] == rows[second] | {"chunked": before}
    assert "fails" in (tmp_path / "kernels.md").read_text()

    other = tmp_path / "other"
    merged = ("--groups", "--merge", tmp_path / "kernels.json")
    command("kernels", f"--out={other}", *merged)
    assert read(other) == (runs, rows)
    for name in ("kernels", "kernels_lengths", "kernels_heads"):
        assert (other / f"{name}.png").stat().st_size > 10_000


def test_gradients_alone_are_timed_for_the_peers_rows(tiny_groups, module):
    kernels = module("kernels")
    found = kernels.measure(tiny_groups[0], "recurrent", alone=True, profile=False)()
    assert {"fwd_ms", "fwdbwd_ms", "gradients_ms", "temp_gib"} <= found.keys()


def test_the_slow_form_comes_last(tiny_groups, module):
    for checks in (True, False):
        forms = ["chunked", "pallas"]
        work = module("kernels").plan(list(tiny_groups), forms, checks, profile=False)
        first = ["errors", "pallas"] if checks else ["pallas"]
        assert [key for _, key, _ in work] == [*first, *first, "chunked", "chunked"]


def test_no_work_is_begun_that_would_end_too_late(module):
    kernels, kept = module("kernels"), []

    def work():
        time.sleep(0.05)
        return {}

    row = tiny(module("kernel_rows"))
    pieces = [(row, str(n), work) for n in range(40)]
    end = time.perf_counter() + 0.5
    left = kernels.execute(pieces, lambda *found: kept.append(found), jobs=1, end=end)
    assert 0 < left < 40 and len(kept) == 40 - left
    assert time.perf_counter() < end + 0.2


PROGRAM = """HloModule m

%fused (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %n = bf16[4,8]{1,0} negate(%p)
}

%dear (a: (bf16[4,8])) -> bf16[4,8] {
  %a = (bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%a), index=0
  %y = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %z = bf16[4,8]{1,0} fusion(%y), kind=kLoop, calls=%fused
}

%cheap (b: (bf16[4,8])) -> bf16[4,8] {
  %b = (bf16[4,8]{1,0}) parameter(0)
  %u = bf16[4,8]{1,0} get-tuple-element(%b), index=0
  ROOT %v = bf16[4,8]{1,0} fusion(%u), kind=kLoop, calls=%fused
}

ENTRY %main (q: bf16[4,8], s: pred[]) -> (bf16[4,8], f32[2]) {
  %q = bf16[4,8]{1,0} parameter(0)
  %s = pred[] parameter(1)
  %t = (bf16[4,8]{1,0}) tuple(%q)
  %c = bf16[4,8]{1,0} conditional(%s, %t, %t), true_computation=%dear, false_computation=%cheap
  ROOT %r = (bf16[4,8]{1,0}, f32[2]{0}) custom-call(%c, %q), custom_call_target="k"
}
"""


def test_kernels_and_bytes_of_a_program(module):
    # The cheaper branch moves 2 arrays of 64 bytes, the call 3 and 8 bytes.
    assert module("gpu_hlo").traffic(PROGRAM) == (2, 5 * 64 + 8)


def test_fusions_against_the_floor(module, command, tmp_path, monkeypatch):
    fusions = module("fusions")
    cases = (
        fusions.Case("convolution", 32, fusions.silu, packed=True),
        fusions.Case("norm", 32, fusions.head_norm_sigmoid, 2),
        fusions.Case("wrong", 32, lambda width: 1 / 0),
    )
    monkeypatch.setattr(fusions, "CASES", cases)
    monkeypatch.setattr(fusions, "HEAD", 8)
    command("fusions", f"--out={tmp_path}", "--rows=1", "--time=256")
    rows = json.loads((tmp_path / "fusions.json").read_text())["rows"]
    assert len(rows) == 6 and all("error" in row for row in rows[4:])
    array = 256 * 32 * 2
    assert [row["bytes"] // array for row in rows[:4]] == [2, 5, 3, 8]
    for row in rows[:4]:
        assert row["bytes_moved"] >= row["bytes"] and row["kernels"] > 0
        assert row["of_floor"] == pytest.approx(row["ms"] / row["floor_ms"])
    assert (tmp_path / "fusions.md").read_text().count("ZeroDivisionError") == 2


def test_documents_fill_a_row(module):
    ids = module("fusions").documents(2, 544)
    counts = jnp.bincount(ids[0], length=17)
    assert counts.tolist() == [0, *(4 * n for n in range(1, 17))]


TINY_MODEL = (
    "HybridLM.width=16",
    "HybridLM.layers=1",
    "HybridLM.pattern='mamba2'",
    "HybridLM.vocabulary=257",
    "HybridLM.remat='none'",
    "Mamba2.head_width=8",
    "Mamba2.state_size=8",
    "FeedForward.hidden=16",
    "Data.sequence_length=32",
    "Trainer.batch_size=2",
)


@pytest.mark.slow
def test_training_steps_of_two_forms(command, module, tmp_path, monkeypatch):
    train_step = module("train_step")
    monkeypatch.setattr(train_step, "MODELS", {"tiny": train_step.Model("Mamba2", TINY_MODEL)})
    command("train_step", f"--out={tmp_path}", "--forms", "chunked", "pallas", "--steps=2")
    command("train_step", f"--out={tmp_path}", "--forms", "recurrent", "--steps=2")
    rows = json.loads((tmp_path / "train_step.json").read_text())["rows"]
    by_form = {row["form"]: row for row in rows}
    assert "impl='pallas' cannot run" in by_form["pallas"]["error"]
    assert by_form["chunked"]["tokens_per_step"] == 64
    for field in ("first_loss", "last_loss"):
        assert by_form["chunked"][field] == pytest.approx(by_form["recurrent"][field], rel=1e-4)
    assert by_form["chunked"]["last_loss"] < by_form["chunked"]["first_loss"]
    assert "fails" not in (tmp_path / "train_step.md").read_text()


def test_models_have_their_size(module):
    train_step = module("train_step")
    for name, model in train_step.MODELS.items():
        experiment = train_step.load(model, "chunked")
        count = train_step.parameters(experiment) / 1e9
        assert count == pytest.approx(float(re.search(r"([\d.]+)B", name)[1]), abs=0.05)
        batch = train_step.make_batch(experiment, documents=4)
        assert batch["segment_ids"].max() == 4 and batch["positions"].min() == 0
        assert {v.dtype for v in batch.values()} == {jnp.int32.dtype}


def test_innermost_loops_of_machine_code(module):
    """A loop in a loop, a wait on a barrier, and what lies behind the kernel's end."""
    code = module("hopper_code")
    line = "        /*{:04x}*/                   {} ;".format
    body = [line(16 * i, "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24") for i in range(60)]
    body += [line(16 * i, "@P0 FMUL R1, R2, R3") for i in range(60)]
    wait = [".L_x_2:", line(0, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1]")]
    wait += [line(0, "@!P0 BRA `(.L_x_2)")]
    text = [".L_x_0:", line(0, "MOV R1, R2"), ".L_x_1:", *body, *wait, line(0, "@P1 BRA `(.L_x_1)")]
    text += [line(0, "BRA `(.L_x_0)"), line(0, "EXIT"), line(0, "@P0 BRA `(.L_x_1)")]
    (found,) = code.loops("\n".join(text))
    assert found.instructions == 123
    assert (found.counts["HGMMA"], found.counts["FMUL"], found.counts["SYNCS"]) == (60, 60, 1)
