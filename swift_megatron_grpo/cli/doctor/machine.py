"""Checks the machine: GPUs and their driver, NCCL, compiler, disk, shared memory, ports and the host's name."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from swift_megatron_grpo.cli.command_line import Finding, note, ok, problem
from swift_megatron_grpo.cli.doctor.probes import TorchFacts

_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DISK, _LITTLE_DISK = 1 * _GIB, 20 * _GIB
_LEAST_SHARED = 128 * 2**20  # a container has 64 MiB by default, and NCCL wants 10 MiB or more per pair of GPUs
_TORCHRUN_PORT, _ROLLOUT_PORT = 29500, 8000


def check_machine(facts: TorchFacts, output: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Check everything but packages."""
    folder = output.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    driver = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else None
    return [
        ok("system", f"{platform.platform()}, {os.cpu_count()} cores"),
        *check_gpus(facts, driver),
        check_compiler(shutil.which("cc") or shutil.which("gcc"), facts.available),
        check_disk(output, shutil.disk_usage(existing).free),
        check_shared_memory(shutil.disk_usage("/dev/shm").total, len(facts.gpus)),
        check_master_port(environment),
        check_rollout_port(is_free(_ROLLOUT_PORT)),
        check_host_name(environment),
    ]


def check_gpus(facts: TorchFacts, driver: str | None) -> list[Finding]:
    """Compare what the kernel's driver reports with what torch sees."""
    if facts.error:
        return [problem("torch", facts.error, "install torch for this machine: https://pytorch.org/get-started")]
    build = f"{facts.torch}, built for {'CPU' if facts.cuda is None else f'CUDA {facts.cuda}'}"
    if facts.available:
        gpus = ", ".join(f"{name} ({free:g} GiB free)" for name, free in zip(facts.gpus, facts.free_gib, strict=True))
        return [ok("torch", build), ok("driver", driver or "unknown"), ok("GPUs", gpus), ok("NCCL", facts.nccl)]
    if driver is None:
        return [ok("torch", build), ok("GPUs", "none: this machine runs the CPU platform")]
    reason = "torch is a CPU build" if facts.cuda is None else f"the driver may be too old for CUDA {facts.cuda}"
    advice = "install torch's build for the CUDA version that nvidia-smi prints; check CUDA_VISIBLE_DEVICES"
    return [ok("torch", build), ok("driver", driver), problem("GPUs", f"torch sees none: {reason}", advice)]


def check_compiler(path: str | None, has_gpu: bool) -> Finding:
    """Check for a C compiler, which Triton calls in every run on a GPU."""
    if path is not None:
        return ok("C compiler", path)
    if has_gpu:
        return problem("C compiler", "cc is not installed; Triton's kernels need it", "apt-get install gcc")
    return note("C compiler", "cc is not installed", "only a run on a GPU needs it")


def check_disk(folder: Path, free: int) -> Finding:
    """Check the disk of --output_dir. A checkpoint with optimizer state takes 14 bytes per weight in bf16."""
    found = f"{free / _GIB:.0f} GiB free in {folder}"
    if free < _LEAST_DISK:
        return problem("disk", found, "free some, or use another --output_dir")
    if free < _LITTLE_DISK:
        advice = "a checkpoint with optimizer state takes 14 bytes per weight; --no_save_optim true 2"
        return note("disk", found, advice)
    return ok("disk", found)


def check_shared_memory(total: int, gpus: int) -> Finding:
    """Check /dev/shm, through which NCCL connects the GPUs of a machine."""
    found = f"{total / 2**20:.0f} MiB"
    if total >= _LEAST_SHARED:
        return ok("/dev/shm", found)
    advice = "start the container with --shm-size 16g or --ipc host"
    return problem("/dev/shm", f"{found}; NCCL needs more", advice) if gpus > 1 else note("/dev/shm", found, advice)


def check_master_port(environment: Mapping[str, str]) -> Finding:
    """Check the port at which torchrun's ranks meet."""
    port = int(environment.get("MASTER_PORT", _TORCHRUN_PORT))
    if is_free(port):
        return ok("port of torchrun", f"{port} is free")
    advice = f"set MASTER_PORT to another one, for example {free_port()}"
    return problem("port of torchrun", f"{port} is in use", advice)


def check_rollout_port(free: bool) -> Finding:
    if free:
        return ok("port of rollout", f"{_ROLLOUT_PORT} is free")
    return note("port of rollout", f"{_ROLLOUT_PORT} is in use", f"swift rollout --port {free_port()}")


def check_host_name(environment: Mapping[str, str]) -> Finding:
    """Check that the host's name has an address, which gloo looks up unless an interface is named."""
    name = socket.gethostname()
    interface = environment.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ok("host", f"{name}, gloo uses {interface}")
    try:
        return ok("host", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        advice = "set GLOO_SOCKET_IFNAME=lo, or add the name to /etc/hosts"
        return problem("host", f"the name {name} has no address", advice)


def is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
