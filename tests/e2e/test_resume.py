"""A run resumed from a checkpoint computes the same numbers as an uninterrupted one.

With --resume auto, the command that was killed continues when it is started again.
"""

from __future__ import annotations

import filecmp
import math
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.support.runs import CANNED, PLUGINS, REWARDS, Finished, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
TENSOR_PARALLEL = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]


@pytest.mark.slow  # each save of optimizer states starts processes that import everything
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--torch_dtype", "bfloat16", *TENSOR_PARALLEL]),
        (2, ["--torch_dtype", "float32", "--fp16", "false"]),
        (1, ["--torch_dtype", "bfloat16", "--tuner_type", "lora"]),
    ],
    ids=["bf16-tp2", "fp32-dp2", "lora"],
)
def test_a_resumed_run_matches_an_uninterrupted_one(
    tmp_path: Path, dense: Path, dataset: Path, ranks: int, flags: list[str]
) -> None:
    flags = [*flags, "--train_iters", "4", "--seed_completions", "true", "--no_save_optim", "false",
             "--no_save_rng", "false"]  # fmt: skip
    whole = megatron_rlhf(dense, dataset, tmp_path / "whole", ranks, flags)
    checkpoint = "--mcore_adapter" if "lora" in flags else "--mcore_model"
    flags += ["--finetune", "false", checkpoint, str(whole.folder / "checkpoint-2")]
    resumed = megatron_rlhf(dense, dataset, tmp_path / "resumed", ranks, flags)
    assert resumed.code == 0, resumed.output[-4000:]
    assert len(whole.log) == 4 and len(resumed.log) == 2
    for step, expected in zip(resumed.log, whole.log[2:], strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length", "learning_rate"):
            assert step[name] == expected[name], name


@pytest.mark.slow  # the tests of --resume auto cover the same, but for the flags that name a checkpoint
def test_resuming_in_place_keeps_the_checkpoint_and_logs_each_step_once(
    tmp_path: Path, dense: Path, dataset: Path
) -> None:
    """A run of five steps ends; a second run resumes in the same folder from step 3, in the middle of a rollout."""
    flags = ["--save_total_limit", "2", "--save_steps", "1", "--steps_per_generation", "2", "--log_completions", "true",
             "--seed_completions", "true", "--no_save_optim", "false", "--no_save_rng", "false"]  # fmt: skip
    folder = tmp_path / "run"
    first = megatron_rlhf(dense, dataset, folder, 1, [*flags, "--train_iters", "5", "--save_total_limit", "9"])
    assert first.code == 0, first.output[-4000:]
    source = folder / "checkpoint-3"
    resume = ["--finetune", "false", "--mcore_model", str(source), "--train_iters", "7"]
    resumed = megatron_rlhf(dense, dataset, folder, 1, [*flags, *resume])
    assert resumed.code == 0, resumed.output[-4000:]
    kept = sorted(path.name for path in folder.glob("checkpoint-*[0-9]"))
    assert kept == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]  # the limit of 2, and the one resumed from
    assert [step["iteration"] for step in resumed.log] == [f"{i}/5" for i in (1, 2, 3)] + [
        f"{i}/7" for i in (4, 5, 6, 7)
    ]
    rows = read_json_lines(folder / "completions.jsonl")
    assert [row["rollout"] for row in rows] == [rollout for rollout in range(4) for _ in range(16)]


# ---- --resume auto: two steps on each rollout, and a checkpoint after step 3, in the middle of the second one

STOPS = PLUGINS / "stops.py"
AUTO = ["--resume", "auto", "--save_steps", "3", "--steps_per_generation", "2", "--train_iters", "6",
        "--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--no_save_optim", "false",
        "--log_completions", "true", "--external_plugins", str(REWARDS), str(STOPS)]  # fmt: skip
NEVER = "step 99, rank 0, train"


def run_auto(
    inputs: tuple[Path, Path], folder: Path, flags: list[str], stop: str = NEVER, signal: str = "", ranks: int = 1
) -> Finished:
    environment = {"STOP": stop, "SIGNAL": signal or "SIGKILL", API_KEY_VARIABLE: KEY}
    return megatron_rlhf(*inputs, folder, ranks, [*AUTO, *flags], environment, kills_ranks=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of logging.jsonl without times, and without the check of a sync that did not take place."""
    steps = [row for row in read_json_lines(folder / "logging.jsonl") if "loss" in row]
    ignored = ("sync_check/", "time/", "speed/", "memory", "train_speed", "elapsed", "remaining")
    return [{key: value for key, value in row.items() if not key.startswith(ignored)} for row in steps]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*[0-9]"))


def check_equal(broken: Path, whole: Path) -> None:
    """Compare the logs of steps and of completions, each of which is there once, and the last weights bit by bit."""
    assert rows(broken) == rows(whole)
    steps = len(rows(whole))
    assert [row["iteration"] for row in rows(broken)] == [f"{step}/{steps}" for step in range(1, steps + 1)]
    assert read_json_lines(broken / "completions.jsonl") == read_json_lines(whole / "completions.jsonl")
    last = f"checkpoint-{steps}"
    weights = list((whole / last).glob("*.safetensors"))
    assert weights and all(filecmp.cmp(path, broken / last / path.name, shallow=False) for path in weights)


@pytest.fixture(scope="module")
def inputs(dense: Path, dataset: Path) -> tuple[Path, Path]:
    return dense, dataset


def test_killed_and_stopped_runs_continue_to_the_same_digits(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """The same command continues both.

    Killed after step 5, stopped by Ctrl-C in step 5, which ends the step in the middle of the last rollout.
    """
    whole, folder = tmp_path / "whole", tmp_path / "broken"
    unbroken = run_auto(inputs, whole, ["--rollout_dump", str(tmp_path / "whole-dump")])
    assert unbroken.code == 0, unbroken.output[-4000:]
    assert "so the run starts with step 1" in unbroken.output
    dump = ["--rollout_dump", str(tmp_path / "dump")]
    killed = run_auto(inputs, folder, dump, "step 6, rank 0, train")
    assert killed.code != 0 and [row["iteration"] for row in rows(folder)] == [f"{step}/6" for step in range(1, 6)]

    each = [*dump, "--save_steps", "1", "--save_total_limit", "2"]
    stopped = run_auto(inputs, folder, each, "step 2, rank 0, train", "SIGINT")
    assert stopped.code != 0, stopped.output[-4000:]
    assert saved(folder) == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]  # two, and the one continued from
    assert f"the run continues from step 3, in {folder}/checkpoint-3" in stopped.output
    assert "rollout 2: 16 of 16 completions are taken from" in stopped.output
    assert "stopped by SIGINT after step 5 of 6" in stopped.output
    assert "To continue, use the same command again" in stopped.output

    ended = run_auto(inputs, folder, [*dump, "--save_total_limit", "2"])
    assert ended.code == 0, ended.output[-4000:]
    assert saved(folder) == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    check_equal(folder, whole)
    for path in (tmp_path / "whole-dump").glob("rollout-*"):
        assert (tmp_path / "dump" / path.name).read_bytes() == path.read_bytes()

    again = run_auto(inputs, folder, dump)
    assert again.code == 0 and "is the last step of this run, 6 of 6" in again.output
    assert "model_config" not in again.output  # which ms-swift logs when it builds the model


@pytest.mark.nightly
def test_a_lora_run_killed_in_generation_continues_in_its_version_folder(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Each of the two ranks has the old log-probs of its own completions, which the checkpoint gathers."""
    lora = ["--tuner_type", "lora", "--beta", "0.04"]
    whole = run_auto(inputs, tmp_path / "whole", lora, ranks=2)
    assert whole.code == 0, whole.output[-4000:]
    lora += ["--add_version", "true", "--save_total_limit", "2"]
    run_auto(inputs, tmp_path / "broken", lora, "step 5, rank 0, generation", ranks=2)
    ended = run_auto(inputs, tmp_path / "broken", lora, ranks=2)
    assert ended.code == 0, ended.output[-4000:]
    (folder,) = (tmp_path / "broken").iterdir()
    check_equal(folder, whole.folder)
    assert saved(folder) == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.nightly
def test_completions_of_a_rollout_killed_halfway_are_not_generated_again(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    """The server generates one group at a time. Before the first checkpoint, the dump alone is continued."""
    server = RolloutServer(inputs[0], tmp_path / "server.txt", ["--vllm_max_num_seqs", "4"]).start().wait()
    flags = ["--vllm_mode", "server", "--vllm_server_base_url", server.url, "--train_iters", "4"]
    try:
        whole = run_auto(inputs, tmp_path / "whole", flags)
        assert whole.code == 0, whole.output[-4000:]
        flags += ["--rollout_dump", str(tmp_path / "dump")]
        run_auto(inputs, tmp_path / "broken", flags, "step 3, rank 0, append")
        finished = (tmp_path / "dump" / "rollout-000001.partial").read_bytes()
        ended = run_auto(inputs, tmp_path / "broken", flags)
    finally:
        server.stop()
    assert ended.code == 0, ended.output[-4000:]
    count = len(finished.splitlines())
    assert count in (4, 8, 12) and f"rollout 1: {count} of 16 completions are taken from" in ended.output
    assert "rollout 0: 16 of 16 completions are taken from" in ended.output
    lines = (tmp_path / "dump" / "rollout-000001.jsonl").read_bytes().splitlines()
    assert set(finished.splitlines()) < set(lines) and len(lines) == 16
    assert not list((tmp_path / "dump").glob("*.partial"))
    check_equal(tmp_path / "broken", tmp_path / "whole")


def test_a_run_that_is_made_longer_learns_at_the_rates_of_its_flags(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """Its checkpoint was saved at the end of a schedule, at a learning rate of 0."""
    flags = [*CANNED, "--resume", "auto", "--no_save_optim", "false"]
    ended = megatron_rlhf(*inputs, tmp_path / "run", 1, [*flags, "--train_iters", "2"])
    assert ended.code == 0 and ended.log[-1]["learning_rate"] == 0, ended.output[-4000:]
    longer = megatron_rlhf(*inputs, tmp_path / "run", 1, [*flags, "--train_iters", "4", "--lr", "5e-4"])
    assert longer.code == 0, longer.output[-4000:]
    after = [5e-4 * (1 + math.cos(math.pi * step / 4)) / 2 for step in (3, 4)]
    assert [step["learning_rate"] for step in longer.log[2:]] == pytest.approx(after, abs=1e-8)
