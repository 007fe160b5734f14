"""A file of roles gives each role its GPUs and its flags, or is refused with what to write instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swift_megatron_grpo.launch.__main__ import main, read
from swift_megatron_grpo.launch.capacity import refuse_too_few
from swift_megatron_grpo.launch.roles import Refused, Roles, environment_of, flags_of, roles_of

# as in ms-swift's examples
SEPARATE = """
rlhf_type: grpo
model: Qwen/Qwen2.5-VL-3B-Instruct
external_plugins: plugin.py
reward_funcs: [external_r1v_acc, format]
lr: 5e-5
temperature: 1.0
overlong_filter: false
use_vllm: true
vllm_mode: colocate
train:
  gpus: 4
  tuner_type: lora
  output_dir: output
rollout:
  gpus: 4
  vllm_tensor_parallel_size: 2
  vllm_gpu_memory_utilization: 0.8
  vllm_engine_kwargs: {max_num_batched_tokens: 8192}
  sleep_level: 1
"""


def roles(text: str, typed: str = "", **environ: str) -> Roles:
    file = yaml.safe_load(text) or {}
    return roles_of(file, flags_of(typed.split()), environ | environment_of(file))


def values(words: tuple[str, ...]) -> dict[str, Any]:
    return flags_of(words)


def test_roles_with_gpus_of_their_own_become_ranks_and_servers() -> None:
    found = roles(SEPARATE)
    assert (found.ranks, found.machines, found.servers, found.gpus_of_server) == (4, 1, 2, 2)
    assert values(found.trainer_flags) == {
        "vllm_server_timeout": "900", "rlhf_type": "grpo", "model": "Qwen/Qwen2.5-VL-3B-Instruct",
        "external_plugins": "plugin.py", "reward_funcs": ["external_r1v_acc", "format"], "lr": "5e-5",
        "temperature": "1.0", "overlong_filter": "false", "use_vllm": "true", "vllm_mode": "server",
        "sleep_level": "1", "tuner_type": "lora", "output_dir": "output",
    }  # fmt: skip
    assert values(found.server_flags) == {
        "model": "Qwen/Qwen2.5-VL-3B-Instruct", "external_plugins": "plugin.py", "vllm_tensor_parallel_size": "2",
        "vllm_gpu_memory_utilization": "0.8", "vllm_engine_kwargs": '{"max_num_batched_tokens": 8192}',
    }  # fmt: skip
    assert not found.use_ray


def test_roles_that_share_gpus_are_ranks_with_vllm() -> None:
    found = roles(SEPARATE + "colocate_groups: [[train, rollout]]\nnnodes: 2\n", "--use_ray")
    assert (found.ranks, found.ranks_of_machine, found.servers, found.server_flags) == (4, 2, 0, ())
    assert values(found.trainer_flags)["vllm_gpu_memory_utilization"] == "0.8"
    assert values(found.trainer_flags)["vllm_mode"] == "colocate"
    assert found.use_ray


def test_typed_flags_count_before_those_of_every_section() -> None:
    found = roles(
        SEPARATE, "--model other --output_dir=new --vllm-tensor-parallel-size 4 --use_ray False --resume auto"
    )
    assert values(found.trainer_flags)["output_dir"] == "new" and values(found.trainer_flags)["resume"] == "auto"
    assert values(found.server_flags)["model"] == "other"
    assert (found.servers, found.gpus_of_server, found.use_ray) == (1, 4, False)


def test_device_groups_of_ranks_say_the_same() -> None:
    text = """
    device_groups:
      nproc_per_node: 4
      trainers: {device: GPU, ranks: "list(range(0, 8))", workers: [train]}
      engines: {device: GPU, ranks: 2, workers: rollout}
    """
    found = roles(text)
    assert (found.ranks, found.machines, found.servers) == (8, 2, 2)
    both = roles('device_groups: {nproc_per_node: 4, all: {ranks: "range(4)", workers: [train, rollout]}}')
    assert (both.ranks, both.servers) == (4, 0)


def test_without_sections_torchruns_variables_count() -> None:
    assert roles("use_ray: true", NPROC_PER_NODE="8", NNODES="2").ranks == 16


def test_variables_of_the_file_are_text() -> None:
    assert environment_of({"ENV": {"USE_HF": 1, "DEBUG": True}}) == {"USE_HF": "1", "DEBUG": "true"}


DEVICES = '{"nproc_per_node": 1, "a": {"ranks": 1, "workers": "train"}}'
ROLES = "train: {gpus: 4}\nrollout: {gpus: 4}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "": "set gpus: 8 in the section train, or NPROC_PER_NODE=8",
        "train: {gpus: four}": "train: gpus 'four' is not a whole number of at least 0; use gpus: 1",
        "train: {gpus: -4}": "train: gpus -4 is not a whole number",
        "train: {gpus: 1.5}": "train: gpus 1.5 is not a whole number",
        "train: {gpus: true}": "train: gpus True is not a whole number",
        "train: {gpus: [4]}": r"train: gpus \[4\] is not a whole number",
        "train: {gpus: 99999999999999}": "train: gpus 99999999999999 is not a whole number",
        "train: {gpus: '\u0664'}": "is not a whole number",
        "train: {gpus: }": "train: gpus None is not a whole number",
        "train: 4": "train: 4 is not a section; write its settings below it, as in train: {gpus: 8}",
        "train: [gpus, 4]": "is not a section",
        "train: {gpus: 0}": "no GPUs for the ranks",
        "trian: {gpus: 4}": "trian: there is no such role; the roles are train and rollout",
        "1: 2": "1 is not the name of a flag",
        "train: {gpus: 4, --lr: 1}": "train: '--lr' is not the name of a flag",
        "null: 1": "None is not the name of a flag",
        "train: {gpus: 4}\nnnodes: 3": r"gpus 4 is not divisible by the 3 machines \(nnodes\); use gpus: 6",
        "train: {gpus: 4}\nnnodes: 0": "nnodes 0 is not a whole number of at least 1",
        "train: {gpus: 6, tensor_model_parallel_size: 4}": "divisible by the 4 of a copy of the model .*use gpus: 8",
        "train: {gpus: 4}\nrollout: {gpus: 3, vllm_tensor_parallel_size: 2}": "rollout: gpus 3 .*use gpus: 4",
        "train: {gpus: 4}\nrollout: {gpus: 4, port: 1}": "rollout: port 1: servers get addresses of their own",
        "train: {gpus: 4}\nrollout: {gpus: 2}\ncolocate_groups: [[train, rollout]]": "set gpus: 4 in both",
        ROLES + "colocate_groups: [train, rollout]": "write colocate_groups: .*, or leave it out",
        ROLES + "colocate_groups: [[train, reward]]": "'reward' is none of the roles train and rollout",
        ROLES + "colocate_groups: '[['": "is not JSON",
        ROLES + "vllm_server_base_url: http://a:1": "leave vllm_server_base_url out, or leave the section out",
        ROLES + "teacher: {gpus: 2}": "no teacher is started beside a run; start `vllm serve MODEL`",
        ROLES + "max_failures: 2": "max_failures 2 continues from checkpoints; set output_dir",
        ROLES + "use_ray: maybe": "use_ray 'maybe' is neither true nor false; use use_ray: true",
        ROLES + "ray_exp_name: [1]": "is not a name; use ray_exp_name: my-run",
        ROLES + "ENV: [A]": "ENV: .* is not a section",
        ROLES + "device_groups: {nproc_per_node: 8}": "both say where it runs",
        "device_groups: {a: {ranks: 1}}": "device_groups has no nproc_per_node",
        "device_groups: {nproc_per_node: 8, a: 3}": "a has no ranks; write device_groups: ",
        "device_groups: {nproc_per_node: 8, a: {ranks: 4, workers: [sampler]}}": "sampler is none of train, rollout",
        "device_groups: {nproc_per_node: 8, a: {ranks: '__import__(\"os\")', workers: train}}": "is no set of ranks",
        "device_groups: {nproc_per_node: 8, a: {ranks: [0, 1], workers: train}, b: {ranks: [1], workers: rollout}}":
            "rank 1 trains and generates; give both roles the same ranks",
        "device_groups: {nproc_per_node: 2, a: {ranks: 3, workers: train}}": "3 is not divisible by the 2 machines",
    }.items(),
)  # fmt: skip
def test_a_file_that_cannot_run_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        roles(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\n" + "\n".join(f"c{n}: &c{n} [{f'*c{n - 1}, ' * 9}*b]" for n in range(1, 9))
         .replace("*c0", "*b"), "its aliases have more than"),
        ("- a\n- b", "has no settings; write flags as NAME: VALUE"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system [id]", "a value is not what its YAML type says"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_settings_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(Refused, match=message):
        read(["--config", str(file)])
    with pytest.raises(Refused, match=message):
        read([str(file), "--lr", "1"])


def test_a_file_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match=r"--config none\.yaml: there is no such file"):
        read(["--config", "none.yaml"])


def cluster(gpus: list[int], text: str) -> None:
    refuse_too_few(roles(text), "GPU", [{"CPU": 64.0, "GPU": float(number)} for number in gpus])


@pytest.mark.parametrize(
    ("gpus", "text", "message"),
    [
        ([8, 8], "train: {gpus: 16}", r"no machine has 16 GPUs: the cluster has 16 GPUs \(8, 8 on its 2 .*nnodes: 2"),
        ([8, 4], "train: {gpus: 12}", "use nnodes: 2, which puts 6 ranks"),
        ([8], "train: {gpus: 6}\nrollout: {gpus: 4}", "6 GPUs of train and 4 of rollout are more than there are"),
        ([0], "train: {gpus: 1}", "the cluster has 0 GPUs"),
        ([], "train: {gpus: 1}", "the cluster has 0 GPUs"),
        (
            [4, 4],
            "train: {gpus: 2}\nrollout: {gpus: 6, vllm_tensor_parallel_size: 6}",
            "no machine has the 6 GPUs",
        ),
        ([4, 4], "train: {gpus: 3}\nrollout: {gpus: 4, vllm_tensor_parallel_size: 2}", ""),
        (
            [3, 3],
            "train: {gpus: 2}\nrollout: {gpus: 4, vllm_tensor_parallel_size: 2}",
            "2 times 2 of servers do not fit: .* use another nnodes",
        ),
        ([8, 8, 8], "train: {gpus: 16}\nnnodes: 2\nrollout: {gpus: 8}", ""),
    ],
)
def test_roles_that_do_not_fit_on_a_cluster_are_refused(gpus: list[int], text: str, message: str) -> None:
    if not message:
        cluster(gpus, text)
        return
    with pytest.raises(Refused, match=message):
        cluster(gpus, text)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "swift_megatron_grpo.launch.on_ray", raising=False)
    with pytest.raises(Refused, match=r'ray is not installed; run `pip install "\.\[ray\]"` in the clone, or set'):
        main(["--rlhf_type", "grpo", "--use_ray", "true", "--device_groups", DEVICES])


def test_a_restart_does_not_lose_the_checkpoint_of_another_run() -> None:
    text = "train: {gpus: 1}\noutput_dir: out\nmax_failures: 2\nresume: "
    with pytest.raises(Refused, match="would start with step 1; copy that folder into output_dir"):
        roles(text + "/runs/a/checkpoint-100")
    assert roles(text + "auto").max_failures == 2


@pytest.mark.parametrize("name", ["nnodes", "max_failures", "use_ray"])
def test_settings_of_the_run_are_not_lost_in_a_section(name: str) -> None:
    with pytest.raises(Refused, match=f"train: {name} is a setting of the whole run"):
        roles(f"output_dir: out\ntrain: {{gpus: 16, {name}: 2}}")


def test_a_variable_without_a_value_is_not_the_text_none() -> None:
    assert environment_of({"ENV": {"HF_TOKEN": None, "A": 1}}) == {"A": "1"}
