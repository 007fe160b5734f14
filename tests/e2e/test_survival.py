"""The two scripts that put a run with servers through what long runs meet. They judge; their judgement is tested in
tests/unit/stress/test_survival_scripts.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone]


def story_of(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    results = folder / "results.json"
    command = [sys.executable, str(REPOSITORY / "scripts" / script), "--json", str(results), "--work",
               str(folder / "work"), *arguments]  # fmt: skip
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-6000:]
    told: dict[str, Any] = json.loads(results.read_text())
    return told


@pytest.mark.timeout(5000)
def test_twenty_killed_servers_cost_nothing_but_time(tmp_path: Path) -> None:
    told = story_of("kill_servers.py", tmp_path, "--kills", "20", "--steps", "40")
    assert told["good"] and len(told["kills"]) == 20
    assert told["result"]["trained"] == 640


@pytest.mark.timeout(3000)
def test_five_hundred_steps_take_no_more_memory_than_one_hundred(tmp_path: Path) -> None:
    told = story_of("soak.py", tmp_path)
    assert max(told["trainer"]["growth"], told["server"]["growth"]) < 0.01
