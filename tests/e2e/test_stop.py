"""A run that receives SIGTERM stops with a checkpoint, wherever it is, and continues from there."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.generation.protocol.messages import Routes
from tests.support.ends import alive_after, check_server_ends
from tests.support.runs import CANNED, PLUGINS, REWARDS, Finished, megatron_command, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
SAVED = ["--no_save_optim", "false", "--no_save_rng", "false", "--save_steps", "100"]
CAUSE = "received SIGTERM: the run stops after the current step and saves a checkpoint, within"


def last_line(run: Finished) -> str:
    lines = [line for line in run.output.splitlines() if line.strip() and not line.startswith("rank ")]
    return lines[-1]  # the fork server's leader, in torchrun's place, adds a line that begins with "rank"


def check_stopped(run: Finished, step: int) -> str:
    """Check a run that has stopped; return the flags that continue it."""
    assert run.output.count(CAUSE) == 1 and "Traceback" not in run.output, run.output[-4000:]
    assert [path.name for path in run.folder.glob("checkpoint-*[0-9]")] == [f"checkpoint-{step}"]
    line = last_line(run)
    assert line.startswith(f"swift_megatron_grpo: stopped by SIGTERM after step {step} of "), run.output[-4000:]
    return line.partition("use the same command with ")[2]


@pytest.mark.nightly
def test_a_signal_to_the_command_stops_all_processes(folder: Path, dense: Path, dataset: Path) -> None:
    """The run then continues from its checkpoint.

    The real command: `megatron rlhf` becomes torchrun, which starts two ranks.
    """
    started: list[psutil.Process] = []
    ended: list[float] = []

    def signal_command(line: str) -> None:
        if "3/1000" in line and not started:
            # the `megatron` script has become torchrun
            (command,) = [child for child in psutil.Process().children() if "rlhf" in child.cmdline()]
            assert len(command.children()) == 2
            started.extend([command, *command.children(recursive=True)])
            command.terminate()
            ended.append(time.monotonic())

    flags = [*CANNED, *SAVED, "--train_iters", "1000"]
    run = megatron_command(dense, dataset, folder / "command", 2, flags, on_line=signal_command)
    assert run.code == 143 and time.monotonic() - ended[0] < 30
    step = int(re.findall(r"after step (\d+) of 1000", run.output)[-1])
    resume = check_stopped(run, step).split()
    assert resume == ["--finetune", "false", "--mcore_model", str(run.folder / f"checkpoint-{step}")]
    assert alive_after(2, started) == []
    flags += [*resume, "--train_iters", str(step + 1), "--logging_steps", "1000"]
    more = megatron_rlhf(dense, dataset, folder / "more", 2, flags)
    assert more.code == 0, more.output[-4000:]
    assert [line["iteration"] for line in more.log] == [f"{step + 1}/{step + 1}"]


def stop(inputs: tuple[Path, Path, Path], name: str, when: str, flags: list[str], **environment: str) -> Finished:
    """Run without saving the optimizer's state, which takes longer than the graces of these tests."""
    folder, model, dataset = inputs
    plugins = ["--external_plugins", str(REWARDS), str(PLUGINS / "stops.py"), "--save_steps", "100"]
    return megatron_rlhf(model, dataset, folder / name, 2, [*plugins, "--train_iters", "1000", *flags],
                         {"STOP": when, **environment}, timeout=180)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(folder: Path, dense: Path, dataset: Path) -> tuple[Path, Path, Path]:
    return folder, dense, dataset


def test_a_signal_to_one_rank_stops_all_after_the_step(inputs: tuple[Path, Path, Path]) -> None:
    run = stop(inputs, "train", "step 2, rank 1, train", ["--logging_steps", "1000"])
    assert run.code != 0
    check_stopped(run, 2)
    assert [line["iteration"] for line in run.log] == ["1/1000", "2/1000"]


@pytest.mark.nightly
def test_all_ranks_of_an_engine_give_up_a_generation_that_takes_too_long(
    inputs: tuple[Path, Path, Path],
) -> None:
    """Both ranks run one engine, whose steps have collectives: ranks that left it at different steps would hang."""
    slow = ["--stop_grace", "20", "--vllm_tensor_parallel_size", "2", "--max_completion_length", "120"]
    began = time.monotonic()
    run = stop(inputs, "generation", "step 2, rank 1, generation", slow)
    check_stopped(run, 1)
    assert not list(run.folder.glob("stuck-*.txt")) and time.monotonic() - began < 60


@pytest.mark.nightly
def test_a_reward_function_that_takes_too_long_is_given_up(inputs: tuple[Path, Path, Path]) -> None:
    run = stop(inputs, "reward", "step 2, rank 0, reward", ["--reward_funcs", "judges", "--stop_grace", "16"])
    check_stopped(run, 1)


@pytest.mark.nightly
def test_a_second_signal_ends_the_run_at_once(inputs: tuple[Path, Path, Path]) -> None:
    run = stop(inputs, "twice", "step 2, rank 0, generation", [], AGAIN="1")
    assert run.output.count(CAUSE) == 1 and "received a second signal, SIGTERM, and ends at once" in run.output
    assert not list(run.folder.glob("checkpoint-*"))


def test_a_run_without_training_states_that_nothing_was_saved(inputs: tuple[Path, Path, Path]) -> None:
    dump = ["--rollout_only", "true", "--rollout_dump", str(inputs[0] / "dump")]
    run = stop(inputs, "only", "step 1, rank 0, generation", dump)
    assert not list(run.folder.glob("checkpoint-*"))
    assert "; nothing was saved, because no weights have changed" in last_line(run)


@pytest.mark.nightly
def test_a_run_ahead_of_training_stops_and_continues_with_the_same_prompts(
    inputs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """While one rollout is trained, the next one is in flight on a server, which is free for the next run at once."""
    folder, dense, dataset = inputs
    server = RolloutServer(dense, tmp_path / "server.txt").start().wait()
    flags = ["--vllm_mode", "server", "--vllm_server_base_url", server.url, "--async_generate", "true",
             "--log_completions", "true", "--torch_dtype", "float32", "--fp16", "false"]  # fmt: skip
    try:
        stopped = stop(inputs, "ahead", "step 2, rank 1, train", flags, **{API_KEY_VARIABLE: KEY})
        check_stopped(stopped, 2)
        assert server.request("GET", Routes.STATUS)["run"] is None  # the lease was released
        again = [*flags, "--train_iters", "3"]
        whole = megatron_rlhf(dense, dataset, folder / "whole", 2, again, {API_KEY_VARIABLE: KEY}, timeout=180)
        assert whole.code == 0, whole.output[-4000:]
    finally:
        server.stop()
    assert prompts(stopped) == prompts(whole)[: len(prompts(stopped))]
    assert {rollout for rollout, _ in prompts(stopped)} == {0, 1}  # the third was in flight, and is not counted


def prompts(run: Finished) -> list[tuple[int, str]]:
    rows = read_json_lines(run.folder / "completions.jsonl")
    return [(row["rollout"], str(row["prompt"])) for row in rows]


def test_ctrl_c_ends_a_rollout_server_with_all_of_its_processes(
    inputs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Ctrl-C sends SIGINT to its process group. See test_rollout_command.py for SIGTERM."""
    server = RolloutServer(inputs[1], tmp_path / "server.txt").start().wait()
    check_server_ends(server, signal.SIGINT, from_terminal=True)
