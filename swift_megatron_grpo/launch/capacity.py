"""Refuse roles that do not fit on the machines of a cluster."""

from collections.abc import Mapping, Sequence

from swift_megatron_grpo.launch.roles import Refused, Roles


def refuse_too_few(roles: Roles, device: str, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse roles that do not fit on the machines of a cluster, whoever uses them now."""
    sizes = sorted((int(node.get(device, 0)) for node in nodes), reverse=True)
    has = f"the cluster has {sum(sizes)} {device}s ({', '.join(map(str, sizes))} on its {len(sizes)} machines)"
    largest, of_machine = max(sizes, default=0), roles.ranks_of_machine
    if roles.ranks + roles.servers * roles.gpus_of_server > sum(sizes):
        servers = f" and {roles.servers * roles.gpus_of_server} of rollout" if roles.servers else ""
        raise Refused(
            f"{roles.ranks} {device}s of train{servers} are more than there are: {has}; use smaller gpus in train and "
            "rollout, or add machines with `ray start --address`"
        )
    if of_machine > largest:
        least = next(count for count in range(1, roles.ranks + 1) if -(-roles.ranks // count) <= largest)
        fitting = next((n for n in range(least, roles.ranks + 1) if roles.ranks % n == 0), roles.ranks)
        raise Refused(
            f"train: no machine has {of_machine} {device}s: {has}; use nnodes: {fitting}, which puts "
            f"{roles.ranks // fitting} ranks on a machine"
        )
    if roles.servers and roles.gpus_of_server > largest:
        raise Refused(
            f"rollout: no machine has the {roles.gpus_of_server} {device}s of a server: {has}; use smaller "
            "vllm_tensor_parallel_size and vllm_data_parallel_size"
        )
    if not _fit(sizes, [of_machine] * roles.machines + [roles.gpus_of_server] * roles.servers):
        raise Refused(
            f"{roles.machines} times {of_machine} ranks and {roles.servers} times {roles.gpus_of_server} of servers "
            f"do not fit: {has}; use another nnodes, or smaller servers"
        )


def _fit(rooms: Sequence[int], bundles: Sequence[int]) -> bool:
    """Return True if each bundle finds a machine, the largest first, each on the fullest one that has room for it."""
    left = list(rooms)
    for bundle in sorted(bundles, reverse=True):
        fitting = [machine for machine, room in enumerate(left) if room >= bundle]
        if not fitting:
            return False
        left[min(fitting, key=lambda machine: left[machine])] -= bundle
    return True
