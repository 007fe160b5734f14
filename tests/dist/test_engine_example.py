"""The example program in docs/engine.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forking.client import run_script
from tests.paths import REPOSITORY
from tests.support.runs import make_model


@pytest.mark.dist
def test_the_engine_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "engine.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    model = make_model(tmp_path / "model")
    printed = run_script(tmp_path / "example.py", model, ranks=2)  # which imports Megatron and this package itself
    assert printed.count("'grad_norm': ") == 2 and printed.count("TokenValues(logprobs=[-") == 2
