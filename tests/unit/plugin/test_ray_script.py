"""A script for Ray starts under torchrun if train and rollout share their devices; otherwise Ray runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo.plugin.ray_script import start_without_ray

COLOCATED = """
rlhf_type: grpo
model: org/model
reward_funcs: [accuracy, format]
columns: {problem: query}
sleep_level: 1
offload_model: true
colocate_groups: [[train, rollout]]
train:
  gpus: 4
  tuner_type: lora
rollout:
  gpus: 4
  vllm_tensor_parallel_size: 2
"""


def launch(folder: Path, config: str, *flags: str) -> tuple[list[str], dict[str, str], str | None]:
    path = folder / "run.yaml"
    path.write_text(config)
    argv, environ = ["/bin/megatron", "rlhf", *(flags or ("--use_ray", "true")), "--config", str(path)], {"A": "1"}
    return argv, environ, start_without_ray(argv, environ)


def test_roles_on_one_set_of_devices_become_ranks_of_torchrun(tmp_path: Path) -> None:
    argv, environ, note = launch(tmp_path, COLOCATED)
    assert argv == [
        "/bin/megatron", "rlhf", "--rlhf_type", "grpo", "--model", "org/model", "--reward_funcs", "accuracy", "format",
        "--columns", '{"problem": "query"}', "--sleep_level", "1", "--offload_model", "True", "--tuner_type", "lora",
        "--vllm_tensor_parallel_size", "2", "--vllm_mode", "colocate",
    ]  # fmt: skip
    assert environ == {"A": "1", "NPROC_PER_NODE": "4"}
    assert note is not None and "under torchrun on 4 ranks" in note


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("colocate_groups: [[train, rollout]]", ""),
        ("colocate_groups: [[train, rollout]]", "colocate_groups: [[train, teacher]]"),
        ("gpus: 4\n  vllm", "gpus: 2\n  vllm"),
        ("sleep_level: 1", "nnodes: 2"),
        ("sleep_level: 1", "teacher: {gpus: 1}"),
        ("rlhf_type: grpo", "rlhf_type: gkd"),
    ],
)
def test_other_scripts_stay_with_ray(old: str, new: str, tmp_path: Path) -> None:
    argv, environ, note = launch(tmp_path, COLOCATED.replace(old, new))
    assert note is None and environ == {"A": "1"} and argv[2:4] == ["--use_ray", "true"]


def test_a_script_without_ray_is_left_alone(tmp_path: Path) -> None:
    argv, _, note = launch(tmp_path, COLOCATED, "--use_ray", "false")
    assert note is None and argv[2] == "--use_ray"
