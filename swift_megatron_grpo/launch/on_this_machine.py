"""Run the members as processes of this machine: the ranks on its first GPUs, the servers on the next."""

from collections.abc import Mapping

from swift_megatron_grpo.launch.child import Child
from swift_megatron_grpo.launch.devices import take, visible_devices
from swift_megatron_grpo.launch.roles import Refused, Roles
from swift_megatron_grpo.launch.start import start, variables_of_restarts, variables_of_run
from swift_megatron_grpo.launch.supervision import End, StopRequest, Supervision, run

_HOST = "127.0.0.1"


def run_on_this_machine(roles: Roles, environ: Mapping[str, str]) -> End:
    """Run these roles on the GPUs that CUDA_VISIBLE_DEVICES names, or on the CPU."""
    if roles.machines > 1:
        raise Refused(
            f"nnodes {roles.machines}: this is one machine; start the same command on {roles.machines} with NNODES, "
            "NODE_RANK and MASTER_ADDR (docs/multi_node.md), use --use_ray true on a cluster, or nnodes: 1"
        )
    needed = roles.ranks + roles.servers * roles.gpus_of_server
    devices = visible_devices(environ)
    if devices is not None and needed > len(devices):
        raise Refused(
            f"train and rollout need {needed} GPUs, and this machine has {len(devices)} ({','.join(devices)}); use "
            "smaller gpus in both, or --use_ray true on a cluster"
        )
    stop, variables, again = StopRequest(), variables_of_run(environ), variables_of_restarts(roles)

    def begin(resumes: bool) -> Supervision:
        left = list(devices or ())
        ranks = Child("machine 0", _HOST, {**environ, **take(left, roles.ranks)})
        servers = [
            Child(f"rollout server {n}", _HOST, {**environ, **take(left, roles.gpus_of_server)})
            for n in range(roles.servers)
        ]
        if resumes:
            return start(roles.resumed(), [ranks], servers, {**variables, **again})
        return start(roles, [ranks], servers, variables)

    return run(begin, roles.max_failures, stop)
