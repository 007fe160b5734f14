"""Command lines that are refused, with nothing left on disk, and the settings that follow from a valid one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.model import MODEL_MAPPING
from swift.rewards import orms

from swift_megatron_grpo.arguments.environment import check_reward_functions, check_weights, create_reward_functions
from swift_megatron_grpo.arguments.refused import NOT_YET, REFUSED_COMPOSITE, REFUSED_TEXT
from tests.forking.client import run_code
from tests.unit.model_config import QWEN3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "train.jsonl").write_text("{}")
    return folder


@pytest.fixture
def typed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A valid command line, on one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    return {
        "rlhf_type": "grpo",
        "model": str(model),
        "model_type": "qwen3",
        "template": "qwen3",
        "dataset": ["train.jsonl"],
        "reward_funcs": ["format"],
        "train_iters": 2,
        "output_dir": str(tmp_path / "out"),
    }


def _files() -> list[Path]:
    """Return what is in this folder, but for Python's caches of plugins that a test imports."""
    return sorted(path for path in Path.cwd().rglob("*") if "__pycache__" not in path.parts)


def refuse(typed: dict[str, Any], **changes: Any) -> str:
    """Return the error message for these flags, after a check that nothing was written."""
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    before = _files()
    with pytest.raises(ValueError) as caught:
        GRPOArguments(**typed | changes)
    assert _files() == before
    return str(caught.value)


# ---- flags


@pytest.mark.parametrize("flag", NOT_YET)
def test_unsupported_values_are_refused_by_name(flag: str, typed: dict[str, Any]) -> None:
    allowed = NOT_YET[flag].allowed
    value: Any = True if allowed[-1] is False else False if allowed == (True,) else ["other"]
    message = refuse(typed, **{flag: value})
    assert message.startswith(f"--{flag} {str(value).lower() if isinstance(value, bool) else 'other'}: ")
    assert NOT_YET[flag].why in message
    assert f"use --{flag} " in message or "leave it out" in message
    assert ("SWIFT_MEGATRON_GRPO=off" in message) == NOT_YET[flag].stock


def test_an_agent_that_cannot_run_is_refused(typed: dict[str, Any]) -> None:
    assert "use FILE.py:FUNCTION" in refuse(typed, agent="nobody")
    assert "takes the place of --gym_env lake" in refuse(typed, agent="true", gym_env="lake")
    behind_servers = {"vllm_mode": "server", "vllm_server_host": ["a"]}
    assert "give the flag to that, and use --vllm_server" in refuse(typed, agent="true", **behind_servers)


def test_all_problems_are_reported_at_once(typed: dict[str, Any]) -> None:
    message = refuse(typed, loss_type="ppo", global_batch_size=50, reward_funcs=["nothing"], train_iters=None)
    for part in ("--loss_type ppo", "--global_batch_size 48", "'nothing' in --reward_funcs", "--num_train_epochs"):
        assert part in message


# ---- batch sizes and layout


def test_batch_sizes_are_checked_against_the_launchers_world_size(
    typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = refuse(typed, micro_batch_size=3, global_batch_size=16, tensor_model_parallel_size=2)
    assert "micro batch size (3) times data parallel size (2); use --global_batch_size 24" in message
    assert "world size (4) must be divisible" in refuse(typed, context_parallel_size=3)


def test_other_rlhf_types_are_refused(typed: dict[str, Any]) -> None:
    assert "are for --rlhf_type grpo, not dpo" in refuse(typed, rlhf_type="dpo")


def test_a_single_completion_per_prompt_is_refused(typed: dict[str, Any]) -> None:
    assert "num_generations (1) must be at least 2" in refuse(typed, num_generations=1)


@pytest.mark.parametrize(
    ("world", "flags", "message"),
    [
        (
            "8",
            {"tensor_model_parallel_size": 8},
            "tensor_model_parallel_size (8) must divide num_attention_heads (4) of",
        ),
        ("8", {"tensor_model_parallel_size": 8}, "; use --tensor_model_parallel_size 1 or 2 or 4"),
        ("3", {"pipeline_model_parallel_size": 3}, "; use --pipeline_model_parallel_size 1, or set these flags"),
        ("2", {"expert_model_parallel_size": 4}, "needs experts, and"),
        ("2", {"expert_tensor_parallel_size": 4}, "; use --expert_tensor_parallel_size 1"),
        ("4", {"vllm_tensor_parallel_size": 3}, "; use --vllm_tensor_parallel_size 1 or 2 or 4"),
        ("1", {"vllm_tensor_parallel_size": 0}, "--vllm_tensor_parallel_size 0 must be at least 1"),
        ("1", {"tensor_model_parallel_size": 0}, "--tensor_model_parallel_size 0 must be at least 1"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    world: str, flags: dict[str, int], message: str, typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert message in refuse(typed, global_batch_size=48, **flags)


# ---- model, rewards, lengths, vLLM


def test_a_missing_model_is_refused(typed: dict[str, Any], model: Path) -> None:
    message = refuse(typed, model=str(model.parent / "tinny"))
    assert f"the folder {model.parent / 'tinny'} does not exist (next to it: tiny)" in message
    assert "no model is set; use --model" in refuse(typed, model=None)
    (model / "config.json").unlink()
    assert "has no config.json, so it is not a model" in refuse(typed)


def test_unknown_reward_functions_are_refused_with_close_names(typed: dict[str, Any]) -> None:
    message = refuse(typed, reward_funcs=["format", "acuracy"])
    assert "unknown name 'acuracy' in --reward_funcs; did you mean accuracy?" in message
    assert "soft_overlong" in message
    assert "no reward function is set" in refuse(typed, reward_funcs=[])
    assert "3 values for 1 reward functions" in refuse(typed, reward_weights=[1.0, 2.0, 3.0])


def test_reward_weights_that_train_nothing_are_refused(typed: dict[str, Any]) -> None:
    assert "--reward_weights 0: every reward would be 0" in refuse(typed, reward_weights=[0.0])
    message = refuse(typed, reward_weights=[float("nan")])
    assert message == "--reward_weights nan: weights must be finite numbers; use --reward_weights 1, or leave it out"


def test_numbers_out_of_range_are_refused(typed: dict[str, Any]) -> None:
    message = refuse(typed, temperature=0.0, max_length=0, lr=1e-6, min_lr=0.1, freeze_parameters_ratio=1.0)
    for part in ("--temperature 0 must", "--max_length 0 must", "--min_lr 0.1 must", "--freeze_parameters_ratio 1 "):
        assert part in message


def test_unknown_trackers_and_callbacks_are_refused(typed: dict[str, Any]) -> None:
    assert "unknown name 'wanbd' in --report_to; did you mean wandb" in refuse(typed, report_to=["none", "wanbd"])
    assert "unknown name 'nothing' in --callbacks" in refuse(typed, callbacks=["print", "nothing"])


def test_reward_functions_of_a_plugin_are_registered(typed: dict[str, Any], tmp_path: Path) -> None:
    plugin = tmp_path / "my_rewards.py"
    plugin.write_text("from swift.rewards import orms\norms['of_a_plugin'] = lambda args=None: None\n")
    message = refuse(typed, external_plugins=[str(plugin)], reward_funcs=["of_a_plugin"], loss_type="dapo")
    assert "of_a_plugin" not in message
    assert "none.py does not exist" in refuse(typed, external_plugins=[str(tmp_path / "none.py")])


def test_a_command_line_without_a_dataset_is_refused(typed: dict[str, Any]) -> None:
    assert "no dataset is set; use --dataset with a file or a hub id" in refuse(typed, dataset=[])


def test_a_folder_of_logs_is_not_the_package_of_its_name(typed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "swanlab").mkdir()  # in the current folder, which Python may import from
    message = refuse(typed, report_to=["tensorboard", "swanlab"])
    assert message == "--report_to swanlab: the package swanlab is not installed; pip install swanlab, or leave it out"


def test_an_empty_output_folder_and_one_that_cannot_be_made_are_refused(typed: dict[str, Any]) -> None:
    assert "--output_dir '' names no folder" in refuse(typed, output_dir="")
    for flag in ("output_dir", "rollout_dump", "tensorboard_dir"):
        assert f"--{flag} /proc/x/y: nothing can be written to /proc" in refuse(typed, **{flag: "/proc/x/y"})


def test_a_missing_file_of_the_system_prompt_is_refused(typed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("be brief")
    assert f"--system sistem.txt: the file {tmp_path / 'sistem.txt'} does not exist (next to it: system.txt)" in refuse(
        typed, system="sistem.txt"
    )


@pytest.mark.parametrize("name", sorted(orms))
def test_reward_functions_of_ms_swift_are_accepted(name: str) -> None:
    check_reward_functions([name], orms)


def test_what_a_reward_class_raises_names_the_function() -> None:
    def raising(args: Any) -> None:
        raise ValueError("no api key")

    orms["raises"] = raising
    try:
        with pytest.raises(ValueError, match="--reward_funcs raises: creating it raises ValueError: no api key"):
            create_reward_functions(SimpleNamespace(reward_funcs=["format", "raises"]))  # type: ignore[arg-type]
    finally:
        del orms["raises"]


def test_a_folder_without_weights_is_not_a_model_to_train(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=f"--model m: the folder {tmp_path} has no weights: .* converted to safetens"):
        check_weights("m", str(tmp_path))
    with pytest.raises(ValueError, match=f"--ref_model m: the folder {tmp_path} has no weights"):
        check_weights("m", str(tmp_path), "ref_model")
    (tmp_path / "model.safetensors").touch()
    check_weights("m", str(tmp_path))


def test_engine_settings_are_checked_before_ms_swift_repairs_them(typed: dict[str, Any]) -> None:
    assert "--vllm_engine_kwargs: the value is not JSON" in refuse(typed, vllm_engine_kwargs="{bad json")
    assert "quantization: use --rollout_quantization" in refuse(typed, vllm_engine_kwargs='{"quantization": "fp8"}')
    assert "--megatron_extra_kwargs: the value is not JSON" in refuse(typed, megatron_extra_kwargs="{bad json")


def test_training_processes_are_not_batch_invariant(typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT is set: the training processes" in refuse(typed)


def test_vllm_must_be_installed(typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from swift_megatron_grpo.arguments import environment

    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert "vLLM, which generates the completions, is not installed" in refuse(typed)


def test_a_reference_model_of_a_lora_run_is_refused(typed: dict[str, Any], model: Path) -> None:
    assert "--ref_model: the reference of a LoRA run" in refuse(typed, tuner_type="lora", ref_model=str(model))


def test_adapters_on_tensor_parallel_experts_are_refused(typed: dict[str, Any]) -> None:
    message = refuse(typed, tuner_type="lora", expert_tensor_parallel_size=2)
    assert "--expert_tensor_parallel_size 2: mcore-bridge does not support LoRA on tensor-parallel" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "need a frozen reference copy or a --teacher_model, and --beta is 0; leave them out"),
        (
            {"beta": 0.1, "tuner_type": "lora"},
            "the reference of a LoRA run is the model without its adapter; leave them",
        ),
    ],
)
def test_a_reference_layout_needs_a_frozen_copy(typed: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    assert message in refuse(typed, ref_context_parallel_size=1, **changes)


def test_a_reference_layout_must_fit_the_ranks_and_the_model(
    typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    sizes = {"beta": 0.1, "global_batch_size": 48, "num_generations": 8}
    message = refuse(typed, ref_pipeline_model_parallel_size=2, **sizes)
    assert "world size (3) must be divisible by" in message
    message = refuse(typed, ref_tensor_model_parallel_size=3, **sizes)
    assert "the reference copy (--ref_...): tensor_model_parallel_size (3) must divide num_attention_heads" in message


def test_asynchronous_generation_needs_servers(typed: dict[str, Any]) -> None:
    assert "use --vllm_mode server with `swift rollout`" in refuse(typed, async_generate=True)
    servers = {"vllm_mode": "server", "vllm_server_host": ["127.0.0.1"]}
    assert "may be ahead with --async_generate true; add that flag" in refuse(typed, **servers, max_staleness=1)


def test_at_least_one_iteration_is_required(typed: dict[str, Any]) -> None:
    assert "--num_iterations 0 must be at least 1; use --num_iterations 1" in refuse(typed, num_iterations=0)


# ---- checks that need the model's config


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_model_that_ms_swift_would_train_in_fp16_is_refused(dtype: str, typed: dict[str, Any], model: Path) -> None:
    typed["torch_dtype"] = dtype
    assert "use --torch_dtype bfloat16, or --fp16 false for fp32" in refuse(typed)


# ---- a valid command line


ACCEPTED = """
import json, os, sys
from copy import copy
from pathlib import Path
from swift_megatron_grpo.platforms.cpu import activate
activate()
from swift.utils import parse_args
from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.start_up_log import start_up_lines
from swift_megatron_grpo.settings.servers import Servers

def parse(*more):
    return parse_args(GRPOArguments, [*sys.argv[1:], *more])[0]

try:
    parse("--output_dir", "refused/deep", "--apply_wd_to_qk_layernorm", "true")  # refused late, by ms-swift
except ValueError as error:
    late_error = str(error)
assert not Path("refused").exists()

from swift_megatron_grpo.arguments.to_config import configure
full = parse("--output_dir", "out", "--micro_batch_size", "4", "--epsilon_high", "0.3", "--log_completions", "true")
noted = copy(full)
for flag, value in {"padding_free": False, "offload_bridge": True, "vllm_max_model_len": 500, "max_length": 100,
                    "expert_model_parallel_size": 2}.items():
    setattr(noted, flag, value)
lora = parse("--output_dir", "out", "--tuner_type", "lora", "--beta", "0", "--steps_per_generation", "2",
             "--bad_reward", "drop", "--reward_weights", "0.5", "--add_version", "false")
lora.save_args(lora.output_dir)

turns = parse("--output_dir", "out", "--vllm_mode", "server", "--vllm_server_base_url", "http://127.0.0.1:1",
              "--vllm_server_pass_dataset", "true", "--reward_weights", "1", "0.5")
where = sys.argv.index("--reward_funcs")
typed = sys.argv[1:where] + sys.argv[where + 2:]
by_servers = parse_args(GRPOArguments, [*typed, "--output_dir", "out", "--vllm_mode", "server",
                                        "--vllm_server_base_url", "http://127.0.0.1:1"])[0]
of_servers = repr(by_servers.of(Servers).turns)
by_servers.set_grading_of_servers(True)
without_grading = copy(turns)
turns.set_grading_of_servers(True)
try:
    without_grading.set_grading_of_servers(False)
except ValueError as error:
    grading_error = str(error)

def length(completions, **columns):
    return [len(text) for text in completions]

several = copy(full)
several.reward_funcs = ["format", "of_its_class", "format", "tokens", length, length, "format_2"]

from datasets import Dataset
from types import SimpleNamespace

template = SimpleNamespace(template_meta=SimpleNamespace(default_system=None), set_mode=lambda mode: None)

def init(rows, **values):
    for name, value in values.items():
        setattr(full, name, value)
    try:
        full.init_iters(*full.checked_datasets(Dataset.from_list(rows), None, template))
        return full.train_iters
    except ValueError as error:
        return str(error)

def row(text):
    return {"messages": [{"role": "user", "content": text}]}

print("RESULT" + json.dumps({
    "late error": late_error,
    "lines": start_up_lines(full),
    "notes": [line for line in start_up_lines(noted) if line not in start_up_lines(full)],
    "full": repr(configure(full)),
    "lora": repr(configure(lora)),
    "references": [configure(full).reference.model_dir, configure(lora).reference.model_dir],
    "reward names": turns.reward_names,
    "several names": several.reward_names,
    "only servers": [*by_servers.reward_names, of_servers],
    "grading error": grading_error,
    "turns": repr(configure(turns)),
    "saved": [json.load(open("out/args.json"))[name] for name in ("bad_reward", "check_model")],
    "plan": [full.generation_batch_size, full.steps_per_generation, lora.generation_batch_size],
    "iterations": init([row("a")] * 8, train_iters=None, num_train_epochs=2),
    "too few": init([row("a")] * 3, train_iters=None, num_train_epochs=1),
    "no messages": init([row("a"), {"messages": []}]),
}))
"""


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of ACCEPTED in a separate process, because successful parsing leaves a process group behind."""
    folder = tmp_path_factory.mktemp("accepted")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(QWEN3))
    (folder / "train.jsonl").write_text("{}")
    command = "--rlhf_type grpo --model tiny --model_type qwen3 --template qwen3 --dataset train.jsonl "
    command += "--reward_funcs format --train_iters 2 --ddp_backend gloo"
    printed = run_code("trainer", ACCEPTED, *command.split(), folder=folder, ranks=1)
    result: dict[str, Any] = json.loads(printed.split("RESULT")[1])
    return result


def test_a_refusal_by_ms_swift_leaves_nothing_on_disk(accepted: dict[str, Any]) -> None:
    assert "apply_wd_to_qk_layernorm" in accepted["late error"]


def test_servers_decide_whether_environments_grade(accepted: dict[str, Any]) -> None:
    """Reward weights are therefore counted after the servers have reported it, as in ms-swift."""
    assert accepted["reward names"] == ["format", "gym_reward"]
    assert "reward_weights has 2 values for 1 reward functions" in accepted["grading error"]
    assert "--vllm_server_pass_dataset true', scheduler=None, max_turns=None, gym_env=None)" in accepted["turns"]
    assert accepted["only servers"][0] == "gym_reward"  # no --reward_funcs, and no flag for turns either
    assert "RemoteTurnsConfig(requested_by=None, scheduler=None" in accepted["only servers"][1]
    assert "turns=None, max_staleness=" in accepted["turns"]  # no conversations in the training processes


def test_every_reward_function_has_a_name_of_its_own_in_the_logs(accepted: dict[str, Any]) -> None:
    """The typed one, also for two functions of one class. `tokens` is another column of completions.jsonl."""
    names = accepted["several names"]
    assert names == ["format", "of_its_class", "format_2", "tokens_2", "length", "length_2", "format_2_2"]


def test_sizes_that_only_ms_swift_refuses_pass_its_parsing(accepted: dict[str, Any]) -> None:
    assert accepted["plan"] == [16, 1, 32]
    assert "ms-swift's own trainer refuses that" in accepted["lines"][-1]


def test_flags_without_effect_and_cut_completions_are_noted(accepted: dict[str, Any]) -> None:
    padding, bridge, experts, length = (line for line in accepted["notes"] if line.startswith("--"))
    assert padding.startswith("--padding_free false: without effect, because sequences are packed")
    assert bridge.startswith("--offload_bridge true: without effect, because weights are sent")
    assert experts.startswith("--expert_model_parallel_size 2: without effect, because ")
    assert length.startswith("--vllm_max_model_len 500 is less than --max_length 100 and --max_completion_length 512")


def test_the_start_up_log_names_the_trainer_and_the_layout(accepted: dict[str, Any]) -> None:
    from swift_megatron_grpo import __version__

    first, *table, _ = accepted["lines"]
    assert first.startswith(f"swift_megatron_grpo {__version__} trains this run")
    assert "TP 1, PP 1, CP 1, EP 1, DP 1, world 1; vLLM TP 1" in first
    assert len(table) == 10


def test_the_settings_of_the_stages_equal_the_flags(accepted: dict[str, Any]) -> None:
    full, lora = accepted["full"], accepted["lora"]
    for part in (
        "epsilon=0.2, epsilon_high=0.3, importance_sampling_level='token'",
        "max_completion_length=512, beta=0.04, kl_estimator=None",
        "reward_names=('format',), reward_weights=(1.0,), scale_rewards='group', bad_reward='stop'",
        "vllm_gpu_memory_utilization=0.9, vllm_tensor_parallel_size=1, vllm_max_model_len=None, vllm_max_num_seqs=16",
        "torch_dtype=torch.bfloat16, seed=42",
        "CompletionLogging(log_completions=True",
    ):
        assert part in full
    for part in (
        "reward_weights=(0.5,)",
        "bad_reward='drop'",
        "max_num_seqs=32",
    ):
        assert part in lora
    assert accepted["references"] == ["tiny", None]
    assert accepted["saved"] == ["drop", False]  # no model of ModelScope


def test_the_datasets_are_checked_before_the_model_is_built(accepted: dict[str, Any]) -> None:
    assert accepted["iterations"] == 8  # 8 prompts * 8 completions * 2 epochs / 16
    assert "3 prompts are too few for one training step" in accepted["too few"]
    assert "row 1 has no messages" in accepted["no messages"]


@pytest.mark.parametrize("model_type", sorted({*REFUSED_COMPOSITE} & {*MODEL_MAPPING}))
def test_a_composite_type_without_a_test_is_refused_before_a_model_loads(
    model_type: str, typed: dict[str, Any], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(QWEN3 | {"model_type": model_type}))
    template = MODEL_MAPPING[model_type].template or "qwen3"  # some types have several
    message = refuse(typed, model_type=model_type, template=template)
    assert f"{model_type} is a model with an image, video or audio part that is not supported: " in message
    assert REFUSED_COMPOSITE[model_type] in message


def test_a_package_that_the_model_needs_is_named_before_it_loads(
    typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qwen_omni_utils", None)
    message = refuse(typed, model_type="qwen3_omni_moe", template="qwen3_omni")
    assert "ms-swift needs the package qwen_omni_utils" in message and "pip install" in message


@pytest.mark.parametrize("model_type", sorted({*REFUSED_TEXT} & {*MODEL_MAPPING}))
def test_a_text_type_without_a_test_is_refused_before_loading(
    model_type: str, typed: dict[str, Any], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(QWEN3 | {"model_type": model_type}))
    message = refuse(typed, model_type=model_type, template=MODEL_MAPPING[model_type].template or "qwen3")
    assert f"{model_type} is not supported: {REFUSED_TEXT[model_type]}; use a model of one of the types" in message
