"""Rollouts are generated while the previous one is trained: real `swift rollout` processes and real trainers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas
import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.generation.protocol.messages import Routes
from tests.support.runs import PLUGINS, REWARDS, Finished, make_dataset, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
EXACT = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true"]
AHEAD = ["--async_generate", "true"]
IN_FLIGHT = [*AHEAD, "--max_staleness", "2", "--seed_completions", "false", "--in_flight_weight_updates", "true"]


@pytest.fixture(scope="module")
def server(folder: Path, dense: Path) -> Iterator[RolloutServer]:
    # Few at once, so that also on a busy machine completions are being generated when weights arrive.
    running = RolloutServer(dense, folder / "server.txt", ["--vllm_max_num_seqs", "2"]).start().wait()
    yield running
    running.stop()


def train(
    dense: Path,
    dataset: Path,
    folder: Path,
    server: RolloutServer,
    flags: list[str],
    environment: dict[str, str] | None = None,
    on_line: Callable[[str], object] | None = None,
) -> Finished:
    all_flags = [*EXACT, "--vllm_mode", "server", "--vllm_server_base_url", server.url, *flags]
    variables = {API_KEY_VARIABLE: KEY, **(environment or {})}
    run = megatron_rlhf(dense, dataset, folder, 2, all_flags, variables, on_line=on_line)
    assert run.code == 0, run.output[-4000:]
    return run


def numbers(run: Finished, *more: str) -> list[list[float | None]]:
    """Return the compared numbers of every step; rewards are logged only where a rollout begins."""
    names = ("loss", "grad_norm", "reward", "completions/mean_length", *more)
    return [[step.get(name) for name in names] for step in run.log]


def versions(rollouts: Path) -> list[set[int]]:
    """Return the versions of the weights that generated each rollout."""
    files = sorted(rollouts.glob("rollout-*.jsonl"))
    return [set(pandas.read_json(file, lines=True).weights_version) for file in files]


def test_at_staleness_0_the_run_is_bitwise_equal_to_a_synchronous_one(
    folder: Path, dense: Path, dataset: Path, server: RolloutServer
) -> None:
    flags = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--steps_per_generation", "2",
             "--train_iters", "6", "--save_steps", "6", "--tuner_type", "lora", "--lr", "1e-2"]  # fmt: skip
    runs = [
        train(dense, dataset, folder / "synchronous", server, flags),
        train(dense, dataset, folder / "staleness 0", server,
              [*flags, *AHEAD, "--max_staleness", "0", "--in_flight_weight_updates", "true"]),
    ]  # fmt: skip
    synchronous, ahead = (numbers(run) for run in runs)
    assert ahead == synchronous and len(synchronous) == 6
    saved, saved_ahead = ((run.last_checkpoint / "adapter_model.safetensors").read_bytes() for run in runs)
    assert saved_ahead == saved and len(saved) > 10_000
    assert all(step["rollout/k3_kl"] < 1e-7 for step in runs[0].log[::2])  # the server has the merged adapter


def test_one_rollout_ahead_has_staleness_1_and_can_be_replayed(
    folder: Path, dense: Path, dataset: Path, server: RolloutServer
) -> None:
    """The run has no rollout correction, and evaluations in the middle of a rollout.

    The dump records which weights generated, so a replay has the same old policy and the same numbers.
    """
    rollouts, validation = folder / "rollouts", make_dataset(folder / "validation.jsonl", rows=4)
    flags = ["--steps_per_generation", "2", "--train_iters", "8", "--save_steps", "100", "--lr", "3e-3"]
    run = train(dense, dataset, folder / "one ahead", server,
                [*flags, *AHEAD, "--log_completions", "true", "--rollout_dump", str(rollouts),
                 "--val_dataset", str(validation), "--eval_steps", "3", "--eval_iters", "1"])  # fmt: skip
    staleness = [step["rollout/staleness"] for step in run.log if "rollout/staleness" in step]
    assert staleness == [0, 1, 1, 1]
    assert all("time/generation" in step for step in run.log[::2])
    # the last evaluation ran next to a rollout that had begun already
    assert versions(rollouts) == [{0}, {0}, {2}, {4}]
    logged = read_json_lines(run.folder / "completions.jsonl")
    assert [row["gen_step"] for row in logged] == [0] * 32 + [2] * 16 + [4] * 16
    evaluated = [line for line in map(json.loads, (run.folder / "logging.jsonl").open()) if "eval_reward" in line]
    assert len(evaluated) >= 2
    # at the first step on a rollout the policy has moved since generation, except in the very first rollout
    first_steps = [step["actor/approxkl"] for step in run.log[::2]]
    assert first_steps[0] == 0 and all(value > 0 for value in first_steps[1:])
    assert "time/old_logprobs" in run.log[0] and not any("time/old_logprobs" in step for step in run.log[1:])
    assert server.request("GET", Routes.STATUS)["weights_version"] in (4, 6, 8)

    replay = megatron_rlhf(dense, dataset, folder / "replay", 2, [*EXACT, *flags, "--rollout_replay", str(rollouts)])
    assert replay.code == 0, replay.output[-4000:]
    assert numbers(replay, "actor/approxkl") == numbers(run, "actor/approxkl")


def test_weights_in_flight_reach_completions_that_are_being_generated(
    folder: Path, dense: Path, dataset: Path, server: RolloutServer
) -> None:
    """Completions have tokens of several versions, none of them too stale, and a replay has the same numbers."""
    rollouts = folder / "rollouts in flight"
    flags = ["--train_iters", "8", "--save_steps", "100", "--lr", "3e-3", "--max_completion_length", "200"]
    run = train(dense, dataset, folder / "in flight", server, [*flags, *IN_FLIGHT, "--rollout_dump", str(rollouts)])
    assert len(run.log) == 8 and 0 < max(step["rollout/staleness_max"] for step in run.log) <= 2
    dumped = [read_json_lines(file) for file in sorted(rollouts.glob("rollout-*.jsonl"))]
    for number, (rows, logged) in enumerate(zip(dumped, run.log, strict=True)):
        spans = [row.get("spans", [[row["weights_version"], sum(row["sampled"] or [1] * len(row["completion_ids"]))]])
                 for row in rows]  # fmt: skip
        used = {version for parts in spans for version, _ in parts}
        assert number - 2 <= min(used) and max(used) <= number
        assert logged["rollout/several_weights"] == sum(len(parts) > 1 for parts in spans)
        tokens = [sum(count for parts in spans for version, count in parts if number - version == age)
                  for age in range(3)]  # fmt: skip
        shares = [logged[f"rollout/staleness_{age}_frac"] for age in range(3)]
        assert shares == pytest.approx([count / sum(tokens) for count in tokens], abs=1e-7)  # fp32
    assert sum(step["rollout/several_weights"] for step in run.log) > 0
    assert len({row["prompt_id"] for rows in dumped for row in rows}) * 4 == sum(map(len, dumped)) == 8 * 8

    replayed = ["--rollout_replay", str(rollouts)]
    replay = megatron_rlhf(dense, dataset, folder / "replay in flight", 2, [*EXACT, *flags, *replayed])
    assert replay.code == 0, replay.output[-4000:]
    assert numbers(replay, "actor/approxkl") == numbers(run, "actor/approxkl")


@pytest.mark.nightly
def test_one_rollout_ahead_is_corrected_for_its_staleness(
    folder: Path, dense: Path, dataset: Path, server: RolloutServer
) -> None:
    """Dynamic sampling is on as well: it requests more completions before the next rollout may begin."""
    flags = ["--train_iters", "4", "--save_steps", "4", "--lr", "3e-3", "--dynamic_sample", "true",
             "--max_resample_times", "2", "--reward_funcs", "every_second", "--external_plugins", str(REWARDS),
             str(PLUGINS / "uniform_groups.py"), "--rollout_importance_sampling_mode", "token_truncate"]  # fmt: skip
    rollouts = folder / "corrected rollouts"
    run = train(dense, dataset, folder / "corrected", server, [*flags, *AHEAD, "--rollout_dump", str(rollouts)])
    assert [step["rollout/staleness_max"] for step in run.log] == [0, 1, 1, 1]
    assert all(step["actor/approxkl"] == 0 for step in run.log)  # weights correct the staleness, the ratio stays 1
    k3 = [step["rollout/k3_kl"] for step in run.log]
    assert k3[0] < 1e-7 and all(1e-6 < value < 1 for value in k3[1:])
    assert all("rollout_correction/ess" in step for step in run.log)
    drawn = {path.name: set(pandas.read_json(path, lines=True).weights_version) for path in rollouts.glob("*-draw-*")}
    assert drawn and all(used == {int(name.split("-")[1])} for name, used in drawn.items())  # newest weights


@pytest.mark.slow
def test_two_rollouts_ahead_stay_within_the_staleness_bound(
    folder: Path, dense: Path, dataset: Path, server: RolloutServer
) -> None:
    """The weights that generate depend on timing; the bound does not, and every prompt is trained exactly once."""
    rollouts = folder / "rollouts of two"
    run = train(dense, dataset, folder / "two ahead", server,
                ["--train_iters", "8", "--save_steps", "100", *AHEAD, "--max_staleness", "2",
                 "--rollout_dump", str(rollouts)])  # fmt: skip
    used = versions(rollouts)
    assert len(run.log) == len(used) == 8 and used[:2] == [{0}, {0}]
    assert all(number - 2 <= min(weights) and max(weights) <= number for number, weights in enumerate(used))
    assert max(step["rollout/staleness_max"] for step in run.log) == 2
    dumped = pandas.concat(pandas.read_json(file, lines=True) for file in rollouts.glob("*.jsonl"))
    assert (dumped.groupby("prompt_id").size() == 4).all() and len(dumped) == 8 * 8


@pytest.mark.slow
def test_a_run_survives_a_restart_of_its_only_server(
    folder: Path, dense: Path, dataset: Path, server: RolloutServer
) -> None:
    """The server dies during a rollout ahead of training, whose weights the trainer no longer has.

    The missing completions are generated with the trainer's current weights.
    """
    restarted: list[str] = []

    def kill(line: str) -> None:
        if "may generate with weights 2" in line and not restarted:
            restarted.append(line)
            server.kill()
            server.start()

    rollouts = folder / "restarted rollouts"
    flags = ["--train_iters", "5", "--global_batch_size", "32", "--max_completion_length", "100", "--save_steps", "100",
             "--vllm_server_timeout", "600"]  # fmt: skip
    run = train(dense, dataset, folder / "restarted", server,
                [*flags, *AHEAD, "--rollout_dump", str(rollouts)], on_line=kill)  # fmt: skip
    assert restarted and "0 of 1 remain" in run.output and "is back after" in run.output
    assert "weights 3 were resent to servers that needed them" in run.output
    assert len(run.log) == 5 and all(step["rollout/staleness_max"] <= 1 for step in run.log)
    used = versions(rollouts)
    assert 3 in used[3] <= {2, 3} and used[4] == {3}
    dumped = pandas.concat(pandas.read_json(file, lines=True) for file in rollouts.glob("*.jsonl"))
    assert (dumped.groupby("prompt_id").size() == 4).all() and len(dumped) == 5 * 32


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_an_update_loses_nothing(folder: Path, dense: Path, dataset: Path) -> None:
    killed, rollouts = folder / "killed", folder / "rollouts of a killed server"
    plugin = ["--external_plugins", str(PLUGINS / "ends_in_update.py")]
    server = RolloutServer(dense, folder / "killed server.txt", plugin, environment={"ENDED": str(killed)})
    restarted: list[str] = []

    def restart(line: str) -> None:
        if "is lost" in line and not restarted:
            restarted.append(line)
            server.start()

    try:
        server.start().wait()
        run = train(dense, dataset, folder / "killed in flight", server,
                    ["--train_iters", "8", "--save_steps", "100", "--max_completion_length", "200", *IN_FLIGHT,
                     "--vllm_server_timeout", "600", "--rollout_dump", str(rollouts)], on_line=restart)  # fmt: skip
    finally:
        server.stop()
    assert restarted and any(json.loads(killed.read_text())) and "is back after" in run.output
    dumped = [read_json_lines(file) for file in sorted(rollouts.glob("rollout-*.jsonl"))]
    assert len(run.log) == len(dumped) == 8 and max(step["rollout/staleness_max"] for step in run.log) <= 2
    assert len({row["prompt_id"] for rows in dumped for row in rows}) * 4 == sum(map(len, dumped)) == 8 * 8


@pytest.mark.slow
def test_a_server_that_never_finishes_an_update_ends_the_run(folder: Path, dense: Path, dataset: Path) -> None:
    hung = folder / "hung"
    plugin = ["--external_plugins", str(PLUGINS / "ends_in_update.py")]
    variables = {"ENDED": str(hung), "HANGS": "1"}
    server = RolloutServer(dense, folder / "hung server.txt", plugin, environment=variables)
    try:
        server.start().wait()
        run = megatron_rlhf(dense, dataset, folder / "hung in flight", 2,
                            [*EXACT, "--vllm_mode", "server", "--vllm_server_base_url", server.url, *IN_FLIGHT,
                             "--train_iters", "8", "--max_completion_length", "200", "--vllm_request_timeout", "15",
                             "--vllm_server_timeout", "10"], {API_KEY_VARIABLE: KEY})  # fmt: skip
    finally:
        server.kill()
    assert run.code != 0 and any(json.loads(hung.read_text()))
    assert re.search(
        r"no rollout server has answered for 1\d s \(--vllm_server_timeout 10\): http://\S+: it has not loaded the "
        r"weights within 15 s \(--vllm_request_timeout\); it is not used again before it is restarted. Start `swift "
        "rollout` again, then resume this run from its last checkpoint",
        run.output,
    ), run.output[-4000:]


@pytest.mark.slow
@pytest.mark.alone
def test_generating_ahead_takes_two_thirds_of_the_time(folder: Path, dense: Path, dataset: Path) -> None:
    """Generation takes as long as training. Both are slowed down by plugins, because the model is tiny."""
    seconds, steps = 6, 8
    environment = {"SECONDS": str(seconds)}
    plugin = ["--external_plugins", str(PLUGINS / "slow_generation.py")]
    server = RolloutServer(dense, folder / "slow server.txt", plugin, environment=environment)
    flags = ["--train_iters", str(steps), "--save_steps", "100", "--callbacks", "stopwatch",
             "--external_plugins", str(REWARDS), str(PLUGINS / "slow_training.py")]  # fmt: skip
    took = {}
    try:
        server.start().wait()
        for name, ahead in (("slow synchronous", []), ("slow ahead", AHEAD)):
            run = train(dense, dataset, folder / name, server, [*flags, *ahead], environment=environment)
            took[name] = json.loads((run.folder / "seconds.json").read_text())
            waited = [step["time/generation"] for step in run.log[1:]]
            assert all(wait < seconds / 2 for wait in waited) if ahead else all(wait >= seconds for wait in waited)
    finally:
        server.stop()
    print(f"{took}, {took['slow ahead'] / took['slow synchronous']:.3f} of the time")
    assert took["slow synchronous"] >= 2 * seconds * steps
    assert took["slow ahead"] <= 0.65 * took["slow synchronous"]
