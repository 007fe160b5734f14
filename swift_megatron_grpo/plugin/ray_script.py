"""Start a script that is written for Ray under torchrun, if all of its roles share one set of devices.

`megatron rlhf --use_ray true --config run.yaml` has roles (train, rollout, teacher) with devices of their own, unless
`colocate_groups` joins them. Train and rollout on the same devices are what `--vllm_mode colocate` is.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from swift_megatron_grpo.plugin.command_line import parse_flag, uses_ray

_ROLES = ("train", "rollout")
_OF_RAY = ("colocate_groups", "nnodes", "gpus", "use_ray", "teacher")


def start_without_ray(argv: list[str], environ: MutableMapping[str, str]) -> str | None:
    """Replace the command line of a run on one set of devices by that for torchrun, and return a note for the user.

    Returns None, and changes nothing, if the roles have separate devices: ms-swift's Ray pipeline then runs them.
    """
    config = _config(argv)
    if config is None:
        return None
    ranks = _ranks_on_one_set(config)
    if config.get("rlhf_type") != "grpo" or ranks is None:
        return None
    flags = {name: value for name, value in config.items() if name not in (*_ROLES, *_OF_RAY)}
    for role in _ROLES:
        flags |= {name: value for name, value in (config.get(role) or {}).items() if name not in _OF_RAY}
    flags["vllm_mode"] = "colocate"
    argv[2:] = [word for name, value in flags.items() if value is not None for word in (f"--{name}", *_typed(value))]
    environ["NPROC_PER_NODE"] = str(ranks)
    return (
        f"swift-megatron-grpo: --use_ray true: train and rollout share one set of devices, so the run starts under "
        f"torchrun on {ranks} ranks of this machine, with --vllm_mode colocate"
    )


def _config(argv: Sequence[str]) -> dict[str, Any] | None:
    path = parse_flag(argv, "config")
    if not uses_ray(argv) or path is None or not Path(path).is_file():
        return None
    import yaml

    loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else None


def _ranks_on_one_set(config: dict[str, Any]) -> int | None:
    """Return the devices that train and rollout share; None if they do not, or if there are other roles or machines."""
    groups = [set(group) for group in config.get("colocate_groups") or []]
    devices = {int((config.get(role) or {}).get("gpus", 0)) for role in _ROLES}
    if not any(set(_ROLES) <= group for group in groups) or len(devices) != 1 or 0 in devices:
        return None
    if config.get("teacher") or int(config.get("nnodes", 1)) > 1:
        return None
    return devices.pop()


def _typed(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]
