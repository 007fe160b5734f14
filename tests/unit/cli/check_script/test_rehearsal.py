"""The tiny run in place of a script's, with a server where the script has one or needs one."""

from __future__ import annotations

from pathlib import Path

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


def test_a_server_of_the_script_keeps_its_flags(tmp_path: Path) -> None:
    rehearsal = make_rehearsal(SERVER + TRAINER, tmp_path, ranks=2, steps=1, environment={})
    assert rehearsal.server is not None and rehearsal.server["max_turns"] == ["2"]
    assert "multi_turn_scheduler" not in rehearsal.server and "vllm_server_host" not in rehearsal.reduced
