"""The tiny run in place of a script's, with a server where the script has one or needs one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.check_script.rehearsal import make_rehearsal

TRAINER = """
export NPROC_PER_NODE=4
megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-4B --dataset org/rows --reward_funcs format \\
    --vllm_mode server --vllm_server_host 10.0.0.1 --multi_turn_scheduler gym_scheduler --max_turns 5
"""
SERVER = "swift rollout --model Qwen/Qwen3-4B --max_turns 2 &\n"


def test_a_server_of_another_script_gets_the_trainers_conversations(tmp_path: Path) -> None:
    rehearsal = make_rehearsal(TRAINER, tmp_path, ranks=2, steps=1, environment={})
    assert rehearsal.world_size == 4 and rehearsal.server is not None
    assert rehearsal.server["multi_turn_scheduler"] == ["gym_scheduler"] and rehearsal.server["max_turns"] == ["5"]


@pytest.mark.parametrize(
    ("flags", "of_server"),
    [
        ("--tuner_type lora --lora_rank 8 --vllm_enable_lora true", {"vllm_enable_lora": ["true"]}),
        ("--gym_env maze --use_gym_env true", {"gym_env": ["maze"], "use_gym_env": ["true"]}),
        ("--enable_thinking false --system Hello", {"enable_thinking": ["false"], "system": ["Hello"]}),
    ],
)
def test_a_server_of_another_script_has_the_flags_of_its_trainer(
    tmp_path: Path, flags: str, of_server: dict[str, list[str]]
) -> None:
    rehearsal = make_rehearsal(f"{TRAINER.strip()} {flags}", tmp_path, ranks=2, steps=1, environment={})
    assert rehearsal.server is not None and rehearsal.server.items() >= of_server.items()


def test_a_server_reports_experts_for_a_trainer_that_replays_them(tmp_path: Path) -> None:
    replays = TRAINER.strip() + " --router_replay_mode R3"
    own = SERVER.replace(" &", """ --vllm_engine_kwargs '{"enable_return_routed_experts": true}' &""")
    for script in (replays, own + replays):
        rehearsal = make_rehearsal(script, tmp_path, ranks=2, steps=1, environment={})
        assert rehearsal.server is not None
        assert json.loads(*rehearsal.server["vllm_engine_kwargs"])["enable_return_routed_experts"] is True


def test_a_hub_id_with_its_type_keeps_the_template_of_its_name(tmp_path: Path) -> None:
    script = TRAINER.replace("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507 --model_type qwen3")
    published = make_rehearsal(script, tmp_path, ranks=2, steps=1, environment={}).published
    assert published["template"] == ["qwen3_nothinking"] and published["model"] != ["Qwen/Qwen3-4B-Instruct-2507"]


def test_a_model_of_a_plugin_that_is_here_is_found(tmp_path: Path) -> None:
    plugin = tmp_path / "registers_a_model.py"
    plugin.write_text("""
from dataclasses import replace
from swift.model import MODEL_MAPPING
MODEL_MAPPING["registered_here"] = replace(MODEL_MAPPING["qwen3"], model_type="registered_here")
""")
    flags = f"my/model --model_type registered_here --template qwen3 --custom_register_path {plugin}"
    published = make_rehearsal(TRAINER.replace("Qwen/Qwen3-4B", flags), tmp_path, 2, 1, environment={}).published
    assert published["model_type"] == ["registered_here"] and published["external_plugins"] == [str(plugin)]


def test_a_server_of_the_script_keeps_its_flags(tmp_path: Path) -> None:
    rehearsal = make_rehearsal(SERVER + TRAINER, tmp_path, ranks=2, steps=1, environment={})
    assert rehearsal.server is not None and rehearsal.server["max_turns"] == ["2"]
    assert "multi_turn_scheduler" not in rehearsal.server and "vllm_server_host" not in rehearsal.reduced
