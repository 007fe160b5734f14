"""Run the members as processes of this machine: the ranks on its first GPUs, the servers on the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from swift_megatron_grpo.launch.child import Child
from swift_megatron_grpo.launch.roles import Refused, Roles
from swift_megatron_grpo.launch.start import start, variables_of_run
from swift_megatron_grpo.launch.supervision import End, StopRequest, Supervision, run

_HOST = "127.0.0.1"


def run_on_this_machine(roles: Roles, environ: Mapping[str, str]) -> End:
    """Run these roles on the GPUs that CUDA_VISIBLE_DEVICES names, or on the CPU."""
    needed = roles.ranks + roles.servers * roles.gpus_of_server
    devices = visible_devices(environ)
    if devices is not None and needed > len(devices):
        raise Refused(
            f"train and rollout need {needed} GPUs, and this machine has {len(devices)} ({','.join(devices)}); use "
            "smaller gpus in both, or --use_ray true on a cluster"
        )
    stop, variables = StopRequest(), variables_of_run(environ)

    def begin(resumes: bool) -> Supervision:
        left = list(devices or ())
        ranks = Child("machine 0", _HOST, {**environ, **_take(left, roles.ranks)})
        servers = [
            Child(f"rollout server {n}", _HOST, {**environ, **_take(left, roles.gpus_of_server)})
            for n in range(roles.servers)
        ]
        return start(roles.resumed() if resumes else roles, [ranks], servers, variables)

    return run(begin, roles.max_failures, stop)


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that this process may use, by name or number; None: torch is a build for the CPU."""
    if torch.version.cuda is None:
        return None
    named = environ.get("CUDA_VISIBLE_DEVICES")
    return [device for device in named.split(",") if device] if named is not None else _all()


def _all() -> list[str]:
    return [str(number) for number in range(torch.cuda.device_count())]


def _take(left: list[str], number: int) -> dict[str, str]:
    taken, left[:] = left[:number], left[number:]
    return {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}
