"""The program in docs/cpu_platform.md runs as printed, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forking.client import run_script
from tests.paths import REPOSITORY


@pytest.mark.dist
def test_the_example_of_the_cpu_platform_runs(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "cpu_platform.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "tiny.py").write_text(code)
    printed = run_script(tmp_path / "tiny.py", ranks=2)
    [shown] = re.findall(r"```\n(rank 0.*?)```", page, re.DOTALL)
    # without a buffer, a line of one rank may be printed between a line of the other and its end
    assert sorted(re.findall(r"rank \d: loss [\d.]+, gradient [\d.]{6}", printed)) == shown.splitlines()
