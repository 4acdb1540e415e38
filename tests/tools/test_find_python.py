# SPDX-License-Identifier: Apache-2.0
"""The search for an interpreter, among stand-ins that answer as one of a version would."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "find_python.sh"


@pytest.fixture
def machine(tmp_path):
    """A machine with the few programs that the script needs, and no Python."""
    (tmp_path / "bin").mkdir()
    for program in ("sh", "ls", "grep", "sort", "cat"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program))
    return tmp_path


def add(path, version=None):
    """Adds a stand-in; without a version one that does not run, like a pyenv shim of nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = "false" if version is None else f'[ -z "$2" ] || [ "$2" = {version} ]'
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def find(machine, *arguments, **environment):
    return subprocess.run(
        [SCRIPT, *arguments],
        env={"PATH": str(machine / "bin"), "HOME": str(machine), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_newest_tested_version_comes_first(machine):
    add(machine / "bin" / "python3", "3.12")
    twelve = add(machine / "bin" / "python3.12", "3.12")
    assert find(machine).stdout.strip() == twelve
    thirteen = add(machine / "bin" / "python3.13", "3.13")
    assert find(machine).stdout.strip() == thirteen
    assert find(machine, "3.12").stdout.strip() == twelve


def test_python3_is_taken_where_it_is_new_enough(machine):
    plain = add(machine / "bin" / "python3", "3.12")
    add(machine / "bin" / "python3.13")  # does not run
    assert find(machine).stdout.strip() == plain


def test_pyenv_is_asked_last_for_its_newest(machine):
    versions = machine / ".pyenv" / "versions"
    for version in ("3.12.11", "3.13.2", "3.13.11"):
        add(versions / version / "bin" / "python", version[:4])
    add(versions / "3.13.12" / "bin" / "python")  # does not run
    assert find(machine).stdout.strip() == str(versions / "3.13.11" / "bin" / "python")
    assert find(machine, "3.12").stdout.strip() == str(versions / "3.12.11" / "bin" / "python")
    elsewhere = add(machine / "other" / "versions" / "3.12.1" / "bin" / "python", "3.12")
    assert find(machine, PYENV_ROOT=str(machine / "other")).stdout.strip() == elsewhere


def test_a_newer_python3_is_the_last_resort(machine):
    plain = add(machine / "bin" / "python3", "3.14")
    result = find(machine)
    assert result.stdout.strip() == plain
    assert "untested" in result.stderr


def test_the_users_choice_comes_before_all(machine):
    add(machine / "bin" / "python3.13", "3.13")
    mine = add(machine / "mine", "3.12")
    assert find(machine, PYTHON=mine).stdout.strip() == mine


def test_a_wrong_choice_is_an_error(machine):
    add(machine / "bin" / "python3.13", "3.13")
    result = find(machine, PYTHON=str(machine / "nothing"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"PYTHON={machine / 'nothing'} does not run" in result.stderr


def test_without_any_it_says_what_is_missing(machine):
    result = find(machine)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "needs Python 3.12 or newer with the venv module, and found none" in result.stderr
    assert find(machine, "3.12").returncode == 1
