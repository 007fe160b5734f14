"""Conversations with an environment: its messages are not trained, and its rewards are the reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.forking.client import free_port
from tests.paths import REPOSITORY
from tests.support.hf_check import check_with_transformers
from tests.support.runs import (
    ON_CPU,
    PLUGINS,
    REWARDS,
    SMALL_CACHE,
    Finished,
    forked_ranks,
    make_dataset,
    megatron_rlhf,
    read_json_lines,
)
from tests.support.servers import HOST

pytestmark = pytest.mark.e2e
TEMPLATE = REPOSITORY / "templates" / "multi_turn.sh"
SMALL = ["--model_type", "qwen3", "--template", "qwen3", "--torch_dtype", "float32", "--fp16", "false",
         "--check_model", "false", "--add_version", "false", "--ddp_backend", "gloo", "--recompute_granularity", "none",
         "--attention_backend", "auto", "--dataset_num_proc", "1", "--load_from_cache_file", "false",
         "--dataloader_num_workers", "0", "--vllm_enforce_eager", "true", "--vllm_gpu_memory_utilization", "0.3",
         "--sleep_level", "0", "--offload_model", "false", "--offload_optimizer", "false", "--no_save_optim", "true",
         "--no_save_rng", "true", "--save_steps", "100", "--train_iters", "2",
         "--num_generations", "4", "--global_batch_size", "8", "--lr", "1e-3", "--max_length", "128",
         "--max_completion_length", "12", "--vllm_max_model_len", "256",
         "--max_tokens_per_micro_batch", "256"]  # fmt: skip


def run_template(model: Path, dataset: Path, folder: Path, flags: list[str], *where: str, **more: str) -> Finished:
    environment = {**os.environ, "MODEL": str(model), "DATASET": str(dataset), "OUTPUT": str(folder),
                   "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1",
                   "MASTER_PORT": str(free_port()), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                   **more}  # fmt: skip
    done = subprocess.run([str(TEMPLATE), *where, *SMALL, *flags], env=environment, text=True, timeout=400,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    folder.with_suffix(".txt").write_text(done.stdout)
    return Finished(done.returncode, done.stdout, folder)


def run_template_forked(model: Path, dataset: Path, folder: Path, flags: list[str]) -> Finished:
    """Run the template with a fake `megatron`, first on the path, and forked ranks with the arguments it received."""
    fake, received = folder.with_suffix(".bin") / "megatron", folder.with_suffix(".arguments")
    fake.parent.mkdir()
    fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$NPROC_PER_NODE" "$@" >"{received}"\n')
    fake.chmod(0o755)
    template = run_template(model, dataset, folder, flags, PATH=f"{fake.parent}:{os.environ['PATH']}")
    assert template.code == 0, template.output
    ranks, command, *arguments = received.read_text().removesuffix("\0").split("\0")
    assert command == "rlhf"
    return forked_ranks(arguments, folder, int(ranks), {})


@pytest.mark.thorough
def test_the_template_trains_on_conversations(tmp_path: Path, dense: Path) -> None:
    """One engine spans both ranks, and the environment draws random numbers, which must not differ between ranks."""
    dataset = make_dataset(tmp_path / "data.jsonl", rows=4)
    plugins = [str(REPOSITORY / "templates" / "plugins" / "spelling.py"), str(PLUGINS / "turns_reward.py")]
    flags = ["--vllm_tensor_parallel_size", "2", "--rollout_dump", str(tmp_path / "rollouts"), "--clip_grad", "100",
             "--external_plugins", *plugins, "--reward_funcs", "turns",
             *SMALL_CACHE]  # fmt: skip
    run = (run_template_forked if ON_CPU else run_template)(dense, dataset, tmp_path / "run", flags)
    assert run.code == 0, run.output[-4000:]
    first, second = run.log
    # vLLM's log-prob of each sampled token in its turn matches the trainer's in the whole conversation.
    assert first["rollout/k3_kl"] < 1e-9 and second["rollout/k3_kl"] < 1e-9
    assert first["num_turns"] == 3 and first["rewards/gym_reward/mean"] > 0 and first["rewards/turns/mean"] == 3

    dumped = tmp_path / "rollouts" / "rollout-000000.jsonl"
    rows = read_json_lines(dumped)
    for row in rows:
        assert len(row["sampled"]) == len(row["completion_ids"]) and sum(row["sampled"]) == len(row["logprobs"]) <= 36
        words = bytes(
            ids for ids, sampled in zip(row["completion_ids"], row["sampled"], strict=True) if not sampled and ids < 256
        )
        assert len(row["conversation"]) == 6 and len(words) > 0
        assert row["rewards"] == [3, row["infos"]["total_reward"]]

    check_with_transformers(first, dense, dumped)


@pytest.mark.nightly
def test_every_round_of_thinking_tips_is_trained_in_its_own_context(folder: Path, dense: Path) -> None:
    """The template drops the empty thoughts of earlier rounds, so a second round is a second sequence."""
    dataset, dumped = folder / "solved.jsonl", folder / "rounds"
    rows = [{"messages": [{"role": "user", "content": f"{i}+{i}?"}], "solution": f"${2 * i}$", "letters": "abc",
             "chat_template_kwargs": {"enable_thinking": i % 2 == 0}} for i in range(4)]  # fmt: skip
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--torch_dtype", "float32", "--fp16", "false", "--multi_turn_scheduler", "thinking_tips_scheduler",
             "--stop_words", *"abcdefghijklmn", "--micro_batch_size", "1", "--train_iters", "2", "--clip_grad", "100",
             "--save_steps", "100", "--external_plugins", str(REWARDS)]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "rounds-run", 2, [*flags, "--rollout_dump", str(dumped)])
    assert run.code == 0, run.output[-4000:]
    rollout = dumped / "rollout-000000.jsonl"
    dump = read_json_lines(rollout)
    of_two = [row for row in dump if row["infos"]["num_turns"] == 2]
    assert of_two and any(len(row["earlier"]) == 1 for row in of_two) and len(dump) == 8
    assert run.log[0]["num_sequences"] == pytest.approx(1 + sum(len(row.get("earlier", [])) for row in dump) / 8)
    assert run.log[0]["rollout/k3_kl"] < 1e-9
    check_with_transformers(run.log[0], dense, rollout)
    thoughts = {row["prompt_id"]: "think" in json.dumps(row["conversation"][-1]) for row in dump}
    assert {*thoughts.values()} == {True, False}  # chat_template_kwargs of the rows

    again = megatron_rlhf(dense, dataset, folder / "rounds-again", 2, [*flags, "--rollout_replay", str(dumped)])
    assert again.code == 0, again.output[-4000:]
    names = ("loss", "grad_norm", "reward", "num_sequences")
    assert [[step[name] for name in names] for step in again.log] == [
        [step[name] for name in names] for step in run.log
    ]


def test_tools_and_thoughts_are_written_as_flags_and_rows_say(folder: Path, dense: Path) -> None:
    """Conversations of ms-swift's scheduler for OpenEnv. Its environments block in threads, and are closed."""
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
    rows = [{"messages": [{"role": "user", "content": "replaced"}], "tools": json.dumps([tool]),
             "env_config": {"base_url": f"http://{i}", "reset_kwargs": {"number": i}},
             "chat_template_kwargs": {"enable_thinking": True} if i % 2 else {}} for i in range(4)]  # fmt: skip
    (folder / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dumped, closed = folder / "tools-rollouts", folder / "closed.txt"
    flags = ["--torch_dtype", "float32", "--fp16", "false", "--multi_turn_scheduler", "openenv_scheduler",
             "--use_gym_env", "true", "--agent_template", "mistral", "--enable_thinking", "false", "--max_turns", "5",
             "--train_iters", "1", "--clip_grad", "100", "--save_steps", "100", "--vllm_max_model_len", "1024",
             "--max_tokens_per_micro_batch", "1024", "--rollout_dump", str(dumped),
             "--external_plugins", str(PLUGINS / "open_environment.py"), str(REWARDS),
             "--reward_funcs", "turns_of_environment"]  # fmt: skip
    environment = {"CLOSED": str(closed)}
    run = megatron_rlhf(dense, folder / "tools.jsonl", folder / "tools", 2, flags, environment, rewards=False)
    assert run.code == 0, run.output[-4000:]
    [step] = run.log[:1]
    assert step["rollout/k3_kl"] < 1e-9 and step["num_turns"] == 2 and step["rewards/turns_of_environment/mean"] == 2
    dump = read_json_lines(dumped / "rollout-000000.jsonl")
    tokenizer, begun = AutoTokenizer.from_pretrained(dense), []
    for row in dump:
        number = int(json.loads(row["conversation"][-4]["content"])["question"])
        prompt = tokenizer.decode(row["prompt_ids"])
        assert "[AVAILABLE_TOOLS]" in prompt and '"name": "add"' in prompt  # of --agent_template, not the model's own
        assert prompt.endswith("</think>\n\n") == (number % 2 == 0)  # --enable_thinking, except for rows with their own
        assert [message["role"] for message in row["conversation"][-4:]] == ["user", "assistant"] * 2
        assert sum(row["infos"]["step_rewards"]) == row["infos"]["total_reward"] == row["rewards"][-1]
        inserted = [t for t, sampled in zip(row["completion_ids"], row["sampled"], strict=True) if not sampled]
        assert '{"turn": 1}' in tokenizer.decode(inserted)
        begun.append(number)
    assert {number % 2 for number in begun} == {0, 1} and len(begun) == 8
    assert sorted(closed.read_text().split()) == [f"http://{number}" for number in sorted(begun)]
    check_with_transformers(step, dense, dumped / "rollout-000000.jsonl")


def test_a_scheduler_that_fails_ends_the_run_on_all_ranks_of_the_engine(
    folder: Path, dense: Path, dataset: Path
) -> None:
    flags = ["--external_plugins", str(PLUGINS / "failing_scheduler.py"), str(REWARDS), "--sync_check", "off",
             "--multi_turn_scheduler", "failing", "--max_turns", "3", "--vllm_tensor_parallel_size", "2"]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "failing", 2, flags, timeout=150)
    assert run.code != 0
    message = "RuntimeError: the scheduler Failing, or its tool, raised SystemExit: the tool is not there"
    assert f"generating completions failed on rank 0: {message}" in run.output, run.output[-3000:]


@pytest.mark.slow
def test_the_template_trains_with_a_server(tmp_path: Path, dense: Path) -> None:
    dataset = make_dataset(tmp_path / "data.jsonl", rows=4)
    server = "--model_type qwen3 --template qwen3 --torch_dtype float32 --vllm_enforce_eager true "
    server += "--vllm_gpu_memory_utilization 0.3 --vllm_max_model_len 256"
    run = run_template(dense, dataset, tmp_path / "run", ["--vllm_server_timeout", "200"], "server",
                       SERVER_GPUS="", TRAIN_GPUS="", SERVER=f"http://{HOST}:{free_port()}",
                       SERVER_FLAGS=server)  # fmt: skip
    assert run.code == 0, run.output[-4000:]
    for step in run.log:
        assert step["rollout/k3_kl"] < 1e-9 and step["num_turns"] == 3 and step["rewards/gym_reward/mean"] > 0
