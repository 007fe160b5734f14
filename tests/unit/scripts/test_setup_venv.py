"""Make .venv with the Python that scripts/setup_venv.sh finds; what it installs is what all tests run on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PATH, PYENV, UV = "bin/", ".pyenv/versions/{}.9/bin/", ".local/share/uv/python/cpython-{}.9-linux-x86_64-gnu/bin/"
MADE = 7  # the exit code of `-m venv` below, so that nothing is installed


def setup(
    folder: Path, complete: list[str], incomplete: list[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script in a clone, where interpreters are files that only tell their path when a venv is made."""
    clone = folder / "a clone"
    shutil.copytree(REPOSITORY / "requirements", clone / "requirements")
    shutil.copytree(REPOSITORY / "scripts", clone / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in complete + incomplete:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        venv = f'[ "$1" = -c ] || {{ echo "made with {name}"; exit {MADE}; }}'
        file.write_text("#!/bin/sh\n" + (venv if name in complete else "exit 1") + "\n")
        file.chmod(0o755)
    path = f"{folder}/bin:{os.defpath}"
    return subprocess.run(
        ["bash", clone / "scripts" / "setup_venv.sh"],
        env={"HOME": str(folder), "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def paths(*pairs: tuple[str, str]) -> list[str]:
    return [place.format(version) + f"python{version}" for place, version in pairs]


@pytest.mark.parametrize(
    ("complete", "incomplete", "taken"),
    [
        ([(PATH, "3.11"), (PATH, "3.12"), (PYENV, "3.12")], [], (PATH, "3.12")),
        ([(PATH, "3.11"), (PYENV, "3.12"), (UV, "3.12")], [], (PYENV, "3.12")),
        ([(PATH, "3.11"), (UV, "3.12")], [], (UV, "3.12")),
        ([(PATH, "3.11"), (PYENV, "3.12")], [(PATH, "3.12")], (PYENV, "3.12")),
        ([(PATH, "3.11"), (PYENV, "3.11")], [(PATH, "3.12"), (PYENV, "3.12"), (UV, "3.12")], (PATH, "3.11")),
        ([(PYENV, "3.11")], [(PATH, "3.12"), (PATH, "3.11")], (PYENV, "3.11")),
    ],
    ids=["PATH", "pyenv", "uv", "an incomplete one on PATH", "no 3.12", "no 3.12, pyenv"],
)
def test_a_complete_3_12_is_taken_where_there_is_one_otherwise_a_3_11(
    tmp_path: Path, complete: list[tuple[str, str]], incomplete: list[tuple[str, str]], taken: tuple[str, str]
) -> None:
    done = setup(tmp_path, paths(*complete), paths(*incomplete))
    assert (done.returncode, done.stdout.splitlines()) == (MADE, [f"made with {paths(taken)[0]}"]), done.stderr


def test_a_named_python_is_taken_whatever_else_there_is(tmp_path: Path) -> None:
    done = setup(tmp_path, ["bin/python3.12", "mine/python"], [], PYTHON=f"{tmp_path}/mine/python")
    assert (done.returncode, done.stdout) == (MADE, "made with mine/python\n"), done.stderr


def test_a_named_python_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    done = setup(tmp_path, ["bin/python3.12"], ["mine/python"], PYTHON=f"{tmp_path}/mine/python")
    assert done.returncode == 1 and not (tmp_path / "a clone" / ".venv").exists()
    assert f"({tmp_path}/mine/python); name one with PYTHON=" in done.stderr


def test_without_a_home_the_path_is_searched(tmp_path: Path) -> None:
    done = setup(tmp_path, ["bin/python3.12"], [], HOME="")
    assert (done.returncode, done.stdout) == (MADE, "made with bin/python3.12\n"), done.stderr
