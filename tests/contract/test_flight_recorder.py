"""torch's flight recorder is enabled by default and contains what runtime/deadlines/watchdog.py reads from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import REPOSITORY

PROGRAM = """
import sys
import torch.distributed as dist
from swift_megatron_grpo.runtime.deadlines.watchdog import describe_collectives

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
dist.barrier()
print(describe_collectives())
dist.destroy_process_group()
"""


def test_a_collective_is_recorded(tmp_path: Path) -> None:
    """Runs in a separate process, because the recorder belongs to the whole process."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert "gloo:barrier of [] in group 0 default_pg" in done.stdout
