"""The example program in docs/engine.md runs as printed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import make_model
from tests.paths import IMPORT_PATH, REPOSITORY


@pytest.mark.dist
def test_the_engine_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "engine.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    model = make_model(tmp_path / "model")
    port = str(random.randint(20000, 32000))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    done = subprocess.run(
        [*command, str(tmp_path / "example.py"), str(model)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("'grad_norm': ") == 2 and done.stdout.count("TokenValues(logprobs=[-") == 2
