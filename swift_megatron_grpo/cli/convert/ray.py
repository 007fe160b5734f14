"""The table of ms-swift's Ray pipeline, whose YAML has the flags of `megatron rlhf`, some of them by role.

Here torchrun starts the ranks, and one command has the flags of all roles.
"""

from collections.abc import Mapping
from typing import Any

from swift_megatron_grpo.cli.convert.tables import ByHand, Flags, Needless, Table, Together, choice, whole

_ROLES = ("rollout.", "train.")  # what both set is the trainer's


def _merged(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of all roles under their names; as in ms-swift, those of a role count before the common ones."""
    of_roles = {}
    for role in _ROLES:
        for key, value in settings.items():
            if key.startswith(role) and key != f"{role}gpus":
                of_roles[key.removeprefix(role)] = value
    common = {key: value for key, value in settings.items() if not key.startswith(_ROLES) or key == "train.gpus"}
    servers = {} if _shares_gpus(settings) else {"rollout.gpus": settings.get("rollout.gpus")}
    return common | of_roles | servers


def _shares_gpus(settings: Mapping[str, Any]) -> bool:
    groups = settings.get("colocate_groups")
    return isinstance(groups, list) and any({"train", "rollout"} <= set(map(str, group)) for group in groups)


def _ranks(gpus: Any, nodes: Any = 1, groups: Any = None) -> Flags:
    nodes = whole(nodes)
    mode = "colocate" if _shares_gpus({"colocate_groups": groups}) else "server"
    return {"NPROC_PER_NODE": whole(gpus) // nodes, "NNODES": nodes if nodes > 1 else None, "vllm_mode": mode}


RAY = Table(
    "ms-swift's Ray pipeline",
    ("train.gpus", "rollout.gpus"),
    {
        "rlhf_type": choice({"grpo": {}}, "only GRPO is trained by this package"),
        "use_ray": Needless("torchrun starts the ranks"),
        "rollout.gpus": ByHand("start `swift rollout` on other GPUs; its address is --vllm_server_base_url"),
        "teacher.*": ByHand("start `vllm serve` on other GPUs; its address is --teacher_model_server"),
        "*.*": ByHand("write the flag as JSON"),
    },
    defaults={},
    together=(
        Together(_ranks, "NPROC_PER_NODE NNODES vllm_mode", gpus="train.gpus", nodes="nnodes",
                 groups="colocate_groups"),
    ),
    prepare=_merged,
    shares_flags=True,
)  # fmt: skip
