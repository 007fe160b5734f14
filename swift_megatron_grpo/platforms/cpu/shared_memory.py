"""Names of the memory that vLLM's tensor-parallel ranks share on a CPU.

vLLM names it after the port of an engine's processes, which the ranks of a torchrun do not have. So two runs at a time
had one name, and the memory of a killed run kept every later one from starting ("create shm in SHMManager failed").
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path("/dev/shm")


def name_after_the_first_rank(cpu_communicator: Any) -> None:
    """Put the process of a group's first rank in front of the name, and remove the memory of processes that ended."""
    owner = cpu_communicator._CPUSHMDistributed
    make_group_name = owner.make_group_name

    def make_own_name(communicator: Any) -> str:
        first = torch.tensor(os.getpid())
        dist.broadcast(first, src=communicator.ranks[0], group=communicator.device_group)
        remove_memory_of_ended_processes(FOLDER)
        return f"{first.item()}{make_group_name(communicator).lstrip('/')}"  # it begins with slashes: env://

    owner.make_group_name = staticmethod(make_own_name)


def remove_memory_of_ended_processes(folder: Path) -> None:
    for memory in folder.glob("*-tp:*-cpushm_*"):
        process = memory.name.partition("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            memory.unlink(missing_ok=True)
