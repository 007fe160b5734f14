"""A file of ms-swift's Ray pipeline means the same here, and the flags that servers get exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from swift.ray.megatron.driver_utils import parse_ray_yaml

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.generation.server.arguments import GRPORolloutArguments
from swift_megatron_grpo.launch import roles
from tests.unit.launch.test_roles import SEPARATE


def names(arguments: type) -> set[str]:
    return {field.name for field in dataclasses.fields(arguments)}


def test_flags_for_servers_are_flags_of_servers() -> None:
    assert names(GRPORolloutArguments) >= roles._OF_BOTH | roles._OF_SERVER
    assert names(GRPOArguments) >= roles._OF_BOTH | set(roles._OF_TRAINER)


def test_flags_of_servers_alone_are_not_the_trainers() -> None:
    alone = {name for name in names(GRPORolloutArguments) - names(GRPOArguments) if roles._is_of_server(name)}
    assert alone >= roles._OF_SERVER - {"agent"} | {"vllm_data_parallel_size"}


@pytest.mark.parametrize("more", ["", "colocate_groups: [[train, rollout]]\nnnodes: 2\n"])
def test_roles_have_the_gpus_that_ms_swift_reads(more: str, tmp_path: Path) -> None:
    file = tmp_path / "ray.yaml"
    file.write_text(SEPARATE + more)
    config, _, _ = parse_ray_yaml(str(file))
    found = roles.roles_of(yaml.safe_load(SEPARATE + more), {}, {})
    assert (found.ranks, found.machines) == (config.train_gpus, config.nnodes)
    separate = 0 if config.colocate_groups else config.rollout_gpus
    assert found.servers * found.gpus_of_server == separate
