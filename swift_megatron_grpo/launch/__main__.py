"""`megatron rlhf` of a file with roles: `python -m swift_megatron_grpo.launch [FILE] ARGUMENTS`."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.launch.on_machines import run_on_machines, site_of
from swift_megatron_grpo.launch.on_this_machine import run_on_this_machine
from swift_megatron_grpo.launch.roles import Refused, Roles, environment_of, flags_of, roles_of
from swift_megatron_grpo.launch.safe_yaml import MOST, parse_yaml
from swift_megatron_grpo.launch.supervision import End
from swift_megatron_grpo.plugin.command_line import CONFIG_FILES, asks_for_check

_SERVER_OF_CHECK = "http://127.0.0.1:8000"  # a check of the flags asks no server


def main(words: Sequence[str]) -> int:
    file, typed = read(words)
    for name, value in environment_of(file).items():
        os.environ.setdefault(name, value)
    roles = roles_of(file, typed, os.environ)
    if asks_for_check(roles.trainer_flags):
        _become_check(roles)
    end = _run(roles)
    sys.stdout.flush()  # Ray prints what the members say; the line below is the last one
    if end.line:
        print(f"swift_megatron_grpo: {end.line}", file=sys.stderr, flush=True)
    return end.code


def _run(roles: Roles) -> End:
    if roles.use_ray:
        return _run_on_ray(roles)
    site = site_of(os.environ)
    return run_on_this_machine(roles, os.environ) if site is None else run_on_machines(roles, site, os.environ)


def _run_on_ray(roles: Roles) -> End:
    try:
        from swift_megatron_grpo.launch.on_ray import run_on_ray  # not at the top: ray is an extra
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise Refused(
            'use_ray true: ray is not installed; run `pip install ".[ray]"` in the clone, or set use_ray false, '
            "which starts torchrun and servers without Ray"
        ) from None
    return run_on_ray(roles, os.environ, "CPU" if torch.version.cuda is None else "GPU")


def read(words: Sequence[str]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the settings of the file, and the flags that were typed."""
    path = words[0] if words and words[0].endswith(CONFIG_FILES) else None
    typed = flags_of(words[1:] if path else words)
    path = typed.pop("config", path)
    if path is None:
        return {}, typed
    if not isinstance(path, str) or not Path(path).is_file():
        raise Refused(f"--config {path}: there is no such file; name one file of YAML with the roles of the run")
    if Path(path).stat().st_size > MOST:
        raise Refused(f"--config {path} has more than {MOST:,} bytes, so it is no file of settings")
    try:
        file = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refused(f"--config {path}: {error}") from None
    if not isinstance(file, dict):
        raise Refused(f"--config {path} has no settings; write flags as NAME: VALUE, one in each line")
    return file, typed


def _become_check(roles: Roles) -> None:
    """Replace this process with the check of the trainer's flags."""
    server = ["--vllm_server_base_url", _SERVER_OF_CHECK] if roles.servers else []
    sizes = {"NPROC_PER_NODE": str(roles.ranks_of_machine), "NNODES": str(roles.machines)}
    words = [sys.executable, "-P", "-m", "swift_megatron_grpo.cli", "check", *roles.trainer_flags, *server]
    sys.stdout.flush()
    os.execve(sys.executable, words, {**os.environ, **sizes})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
