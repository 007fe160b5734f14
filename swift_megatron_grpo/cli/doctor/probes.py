"""Processes that import torch, and all that a rank imports. Their errors become findings."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from swift_megatron_grpo.cli.command_line import Finding, ok, problem

_TORCH = """
import json, torch
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
if facts["available"]:
    count = torch.cuda.device_count()
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
    facts["hopper"] = torch.cuda.get_device_capability()[0] == 9
    facts["free_gib"] = [round(torch.cuda.mem_get_info(i)[0] / 2**30, 1) for i in range(count)]
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print("FACTS " + json.dumps(facts))
"""
# What a rank imports, in its order; on a machine without a GPU with the stand-ins.
_TRAINER = """
import torch
if not torch.cuda.is_available():
    from swift_megatron_grpo.platforms.cpu import activate
    activate()
from swift_megatron_grpo.plugin.register import register
register()
import swift_megatron_grpo.trainer.grpo_trainer
import vllm
import megatron.core
print("IMPORTED " + megatron.core.__version__)
"""


@dataclass(frozen=True)
class TorchFacts:
    """Versions and GPUs that torch reports; `error` if it cannot be imported."""

    torch: str = ""
    cuda: str | None = None
    available: bool = False
    hopper: bool = False
    gpus: tuple[str, ...] = ()
    free_gib: tuple[float, ...] = ()
    nccl: str = ""
    error: str = ""


def probe_torch() -> TorchFacts:
    """Import torch in another process."""
    printed, error = _run(_TORCH, "FACTS ", timeout=300)
    if error:
        return TorchFacts(error=error)
    facts: dict[str, Any] = json.loads(printed)
    for name in ("gpus", "free_gib"):
        facts[name] = tuple(facts.get(name, ()))
    return TorchFacts(**facts)


def check_imports() -> Finding:
    """Import everything that a rank imports, in another process; this takes 20 to 60 s."""
    printed, error = _run(_TRAINER, "IMPORTED ", timeout=600)
    if error:
        command = "python -c 'import swift_megatron_grpo.trainer.grpo_trainer, vllm'"
        return problem("imports of a rank", error, f"install what the line names; a traceback: {command}")
    return ok("imports of a rank", f"succeed, megatron.core {printed}")


def _run(code: str, mark: str, timeout: float) -> tuple[str, str]:
    """Return what the code prints after the mark, or the last line of its error."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "", f"did not end within {timeout:g} s"
    for line in done.stdout.splitlines():
        if line.startswith(mark):
            return line.removeprefix(mark), ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "", (lines[-1] if lines else f"ended with exit code {done.returncode}")[:300]
