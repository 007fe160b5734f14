"""Stress scripts of runs with servers: killed servers and memory growth. tests/unit/stress covers their verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone]


def run_stress(module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    report_file = folder / "report.json"
    command = [sys.executable, "-m", f"tests.stress.{module}", "--json", str(report_file), "--work",
               str(folder / "work"), *arguments]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-6000:]
    report: dict[str, Any] = json.loads(report_file.read_text())
    return report


@pytest.mark.timeout(5000)
def test_twenty_killed_servers_lose_no_completion(tmp_path: Path) -> None:
    report = run_stress("kill_servers", tmp_path, "--kills", "20", "--steps", "40")
    assert report["good"] and len(report["kills"]) == 20
    assert report["result"]["trained"] == 640


@pytest.mark.timeout(3000)
def test_five_hundred_steps_take_no_more_memory_than_one_hundred(tmp_path: Path) -> None:
    report = run_stress("soak", tmp_path)
    assert max(report["trainer"]["growth"], report["server"]["growth"]) < 0.01
