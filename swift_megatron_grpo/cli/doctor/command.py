"""Check the packages and the machine before a run.

swift-megatron-grpo doctor                   takes about a minute
swift-megatron-grpo doctor --skip_imports    takes a few seconds

The exit code is 1 if a run would fail. Attach the output to a bug report.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo import SWITCH, __version__
from swift_megatron_grpo.cli.command_line import Finding, note, ok, print_section, print_verdict, problem
from swift_megatron_grpo.cli.doctor.packages import check_packages

_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DISK, _LITTLE_DISK = 1 * _GIB, 20 * _GIB
_LEAST_SHARED = 128 * 2**20  # a container has 64 MiB by default, and NCCL wants 10 MiB or more per pair of GPUs
_TORCHRUN_PORT, _ROLLOUT_PORT = 29500, 8000
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_dir", type=Path, default=Path("megatron_output"), help="that of the run; default: megatron_output"
    )
    parser.add_argument("--skip_imports", action="store_true", help="do not import what a rank imports")


def run(options: argparse.Namespace) -> int:
    switch = os.environ.get(SWITCH, "on")
    print(f"swift_megatron_grpo {__version__}, Python {platform.python_version()}, {SWITCH}={switch}")
    facts = probe_torch()
    findings = print_section("machine", check_machine(facts, options.output_dir, os.environ))
    findings += print_section("packages", check_packages(facts.available, facts.hopper))
    skipped = note("imports of a rank", "not tried", "run it without --skip_imports, which takes 20 to 60 s")
    findings += print_section("imports", [skipped if options.skip_imports else check_imports()])
    return print_verdict(findings)


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
