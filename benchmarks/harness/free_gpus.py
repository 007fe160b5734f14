"""Nothing is measured on a GPU whose memory another process holds, such as what is left of a run that was killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

LIMIT_GB = 2.0  # a process that waits for its turn may have a CUDA context
PATIENCE = 30.0  # seconds; the memory of a process that has ended returns slowly


def wait_until_free(devices: Sequence[str]) -> None:
    """Wait for the memory of these GPUs, named by number; raise SystemExit if it is not returned."""
    for device in devices:
        deadline = time.monotonic() + PATIENCE
        while (used := used_gb(device)) > LIMIT_GB:
            if time.monotonic() > deadline:
                raise SystemExit(f"bench: {used:.1f} GB of GPU {device} are in use by {holders(device)}; end it, or "
                                 f"choose another GPU with CUDA_VISIBLE_DEVICES")  # fmt: skip
            time.sleep(0.5)


def used_gb(device: str) -> float:
    return float(_query(device, "gpu=memory.used")) * 2**20 / 1e9


def holders(device: str) -> str:
    """Return the processes that use a GPU, in words."""
    pids = _query(device, "compute-apps=pid").split()
    return f"process {', '.join(pids)}" if pids else "another process"


def _query(device: str, what: str) -> str:
    command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits", "-i", device]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
