"""Start the members of a run, wherever they are: first their addresses, then their commands."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE, read_api_key
from swift_megatron_grpo.launch.commands import rollout, torchrun, url_of
from swift_megatron_grpo.launch.member import Member
from swift_megatron_grpo.launch.roles import Roles
from swift_megatron_grpo.launch.supervision import Supervision
from swift_megatron_grpo.output.checkpoints.newest import AFTER_VARIABLE, last_save
from swift_megatron_grpo.plugin.command_line import parse_flag

# Variables that belong to a machine or to what schedules on it, and not to the run.
_OF_MACHINE = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "TERM", "TMPDIR", "HOSTNAME",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "NNODES", "NODE_RANK", "NPROC_PER_NODE",
    "MASTER_ADDR", "MASTER_PORT", "_",
}  # fmt: skip
_OF_SCHEDULERS = ("RAY_", "SLURM_", "SSH_", "XDG_", "KUBERNETES_")


def variables_of_run(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every member gets, with a key for the servers if the user has set none."""
    of_run = {
        name: value
        for name, value in environ.items()
        if name not in _OF_MACHINE and not name.startswith(_OF_SCHEDULERS)
    }
    return of_run if read_api_key(environ) else {**of_run, API_KEY_VARIABLE: secrets.token_hex(32)}


def variables_of_restarts(roles: Roles) -> dict[str, str]:
    """Return what a start after a failure gets in addition: when the last checkpoint of earlier runs was saved."""
    flags = roles.trainer_flags
    output_dir = parse_flag(flags, "output_dir")
    if not roles.max_failures or output_dir is None or parse_flag(flags, "resume") == "auto":
        return {}
    return {AFTER_VARIABLE: repr(last_save(Path(output_dir).expanduser().absolute()))}


def start(
    roles: Roles, trainers: Sequence[Member], servers: Sequence[Member], variables: Mapping[str, str]
) -> Supervision:
    """Start all members. The store of torchrun is on the machine of rank 0."""
    folder = os.getcwd()
    address, port = trainers[0].place()
    places = [server.place() for server in servers]
    urls = [url_of(*place) for place in places]
    flags = roles.trainer_flags + (("--vllm_server_base_url", *urls) if urls else ())
    for machine, trainer in enumerate(trainers):
        words = torchrun(flags, roles.ranks_of_machine, roles.machines, machine, address, port)
        trainer.start(words, variables, folder, None)
    for server, (host, own_port), url in zip(servers, places, urls, strict=True):
        server.start(rollout(roles.server_flags, host, own_port), variables, folder, f"{url}/health")
    return Supervision(trainers, servers, flags)
