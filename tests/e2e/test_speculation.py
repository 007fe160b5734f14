"""Drafts change no completion: real engines with and without them, of a tiny model and of SmolLM2."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.cli.simulate_drafts.dump import read_dump
from swift_megatron_grpo.cli.simulate_drafts.replay import replay
from tests.contract.test_released_models import get_model
from tests.forking.client import run_code
from tests.support.runs import PLUGINS, REWARDS, make_dataset, megatron_rlhf, read_json_lines
from tests.support.servers import RolloutServer

QUESTIONS = [
    "Explain why the sky is blue to a ten year old.",
    "Explain how a bicycle stays upright while moving.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Describe the steps to make a vegetable soup, with ingredients.",
    "Write a Python function that returns the prime numbers below n, and explain it.",
    "What is 17 + 25? Think step by step, and repeat the question first.",
    "List the days of the week, and then list them again in reverse order.",
    "Anna has 12 apples, and gives 5 of them to Ben. How many apples does each of them have?",
]
EXACT = 1e-5  # of log-probs in fp32, whose sums depend on the batch
# Of SmolLM2. With drafts 2.5e-5 was the largest. Without, it was 1.9e-5 between 24 and 5 requests at a time, and 3.6e-5
# between vLLM's fp32 and fp64.
ROUNDING = 5e-5
CASES = ["temperature", "top_k and top_p", "repetition penalty", "stop tokens", "greedy", "all at once",
         "end of the context"]  # fmt: skip
ALL = [*CASES, "first rollout", "second rollout", "after an update"]


def report_of(model: Path, *arguments: Any) -> Any:
    """Return what main of the program prints with these arguments."""
    arguments = f"{str(model)!r}, {', '.join(map(repr, arguments))}"
    code = f"from tests.programs.e2e import speculation; speculation.main({arguments})"
    return json.loads(run_code("trainer", code).rsplit("RESULT ", 1)[1].splitlines()[0])


@pytest.fixture(scope="module")
def report(dense: Path) -> Any:
    return report_of(dense, ["aa bb aa bb aa", "1 2 3 1 2 3 1 2"], 6, 32, 16, CASES, "low temperature")


def assert_equal(without: Any, drafted: Any, bound: float = EXACT) -> None:
    for (expected, logprobs), (found, others) in zip(without["results"], drafted["results"], strict=True):
        assert found == expected
        assert max(abs(a - b) for a, b in zip(logprobs, others, strict=True)) < bound


def furthest(one: Any, other: Any) -> float:
    """Return the largest difference between the log-probs of the same completions."""
    pairs = zip(one, other, strict=True)
    return max(abs(a - b) for (_, ours), (_, theirs) in pairs for a, b in zip(ours, theirs, strict=True))


def assert_equal_runs(plain: Any, drafted: Any) -> None:
    for (expected, logprobs), (found, others) in zip(plain[0], drafted[0], strict=True):
        assert found == expected
        assert max(abs(a - b) for a, b in zip(logprobs, others, strict=True)) < 5 * EXACT


@pytest.mark.e2e
@pytest.mark.parametrize("case", ALL)
def test_completions_with_drafts_are_those_without(report: Any, case: str) -> None:
    without, drafted = report[case]
    assert_equal(without, drafted)
    assert without["verified"] == without["accepted"] == 0 < drafted["verified"]


@pytest.mark.e2e
@pytest.mark.parametrize("case", ["first rollout", "second rollout", "after an update", "greedy"])
def test_drafts_are_accepted_and_save_steps(report: Any, case: str) -> None:
    without, drafted = report[case]
    assert 0 < drafted["accepted"] < drafted["verified"]
    assert drafted["steps"] < without["steps"]


@pytest.mark.e2e
def test_requests_were_preempted_with_drafts(report: Any) -> None:
    assert sum(report[case][1]["preempted"] for case in ALL) > 3


@pytest.mark.e2e
def test_a_wrong_rule_of_acceptance_is_noticed(report: Any) -> None:
    with pytest.raises(AssertionError):
        assert_equal(*report["planted"])


@pytest.mark.e2e
def test_a_run_with_drafts_on_two_ranks_generates_what_one_without_does(folder: Path, dense: Path) -> None:
    """The weights change between three rollouts of the same prompts, and the second run has one engine on two ranks."""
    dataset = make_dataset(folder / "two.jsonl", rows=2)
    drafts = ["--speculative_rollouts", "history", "--vllm_tensor_parallel_size", "2"]
    plain, drafted = (
        trained(folder / name, dense, dataset, flags, ranks=2) for name, flags in (("plain", []), ("drafted", drafts))
    )
    assert_equal_runs(plain, drafted)
    assert [line["loss"] for line in drafted[1]] == pytest.approx([line["loss"] for line in plain[1]], abs=1e-5)
    assert [line["drafts/accepted"] for line in drafted[1]] == list(simulated(folder / "drafted" / "dump"))
    saved = [line["drafts/steps_saved"] for line in drafted[1]]
    assert len(saved) == 3 and all(0 < share < 1 for share in saved)
    assert not any(name.startswith("drafts/") for line in plain[1] for name in line)


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("where", ["merged", "in vLLM"])
def test_drafts_change_no_completion_of_a_run_that_trains_adapters(folder: Path, dense: Path, where: str) -> None:
    """vLLM samples with merged weights, or with the adapter that each sync sends."""
    dataset = make_dataset(folder / "adapters.jsonl", rows=2)
    lora = ["--tuner_type", "lora", "--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "all-linear", "--lr",
            "1e-2", "--vllm_enable_lora", str(where == "in vLLM").lower()]  # fmt: skip
    drafts = ["--speculative_rollouts", "history"]
    plain, drafted = (
        trained(folder / f"{where} {name}", dense, dataset, [*lora, *flags])
        for name, flags in (("plain", []), ("drafted", drafts))
    )
    assert_equal_runs(plain, drafted)
    assert all(line["drafts/accepted"] > 0 for line in drafted[1])


@pytest.mark.e2e
@pytest.mark.nightly
def test_drafts_change_no_turn_of_a_conversation(folder: Path, dense: Path) -> None:
    """A scheduler cuts the first turn and sends messages; the engine with drafts is one on two ranks."""
    dataset = make_dataset(folder / "turns.jsonl", rows=2)
    turns = ["--multi_turn_scheduler", "hints", "--max_turns", "3", "--external_plugins", str(REWARDS),
             str(PLUGINS / "hints.py")]  # fmt: skip
    drafts = ["--speculative_rollouts", "history", "--vllm_tensor_parallel_size", "2"]
    plain, drafted = (
        trained(folder / f"{name} turns", dense, dataset, [*turns, *flags], ranks=2)
        for name, flags in (("plain", []), ("drafted", drafts))
    )
    assert_equal_runs(plain, drafted)
    assert all(line["num_turns"] == 3 for line in drafted[1])
    assert all(0 < line["drafts/accepted"] < line["drafts/verified"] for line in drafted[1])
    assert all(0 < line["drafts/steps_saved"] < 1 for line in drafted[1])


@pytest.mark.e2e
def test_servers_with_drafts_generate_what_a_run_without_does(folder: Path, dense: Path) -> None:
    """One of two servers is killed in the second of three rollouts, with its requests and what it remembers."""
    dataset = make_dataset(folder / "served.jsonl", rows=2)
    drafts = ["--speculative_rollouts", "history"]
    servers = [RolloutServer(dense, folder / f"server {n}.txt", drafts, key=None).start() for n in range(2)]

    def kill(line: str) -> None:
        if "may generate with weights 1" in line:
            servers[0].kill()

    try:
        plain = trained(folder / "no servers", dense, dataset, [])
        remote = ["--vllm_mode", "server", "--vllm_server_base_url", *(server.wait().url for server in servers)]
        drafted = trained(folder / "served", dense, dataset, [*drafts, *remote], on_line=kill)
        assert servers[0].process is not None and servers[0].process.poll() is not None
    finally:
        for server in servers:
            server.stop()
    assert_equal_runs(plain, drafted)
    assert [line["loss"] for line in drafted[1]] == pytest.approx([line["loss"] for line in plain[1]], abs=1e-5)
    assert all(0 < line["drafts/accepted"] < line["drafts/verified"] for line in drafted[1])
    assert all(0 < line["drafts/steps_saved"] < 1 for line in drafted[1])


@pytest.mark.e2e
@pytest.mark.nightly
def test_drafts_change_no_turn_of_a_conversation_on_a_server(folder: Path, dense: Path) -> None:
    dataset = make_dataset(folder / "served turns.jsonl", rows=2)
    turns = ["--multi_turn_scheduler", "hints", "--max_turns", "3", "--external_plugins"]
    hints, drafts = str(PLUGINS / "hints.py"), ["--speculative_rollouts", "history"]
    server = RolloutServer(dense, folder / "turns.txt", [*turns, hints, *drafts], key=None).start()
    try:
        plain = trained(folder / "local turns", dense, dataset, [*turns, str(REWARDS), hints])
        remote = ["--vllm_mode", "server", "--vllm_server_base_url", server.wait().url, "--vllm_server_pass_dataset",
                  "true", "--external_plugins", str(REWARDS)]  # fmt: skip
        drafted = trained(folder / "served turns", dense, dataset, [*drafts, *remote])
    finally:
        server.stop()
    assert_equal_runs(plain, drafted)
    assert all(line["num_turns"] == 3 and line["drafts/accepted"] > 0 for line in drafted[1])


@pytest.mark.e2e
@pytest.mark.nightly
def test_drafts_change_no_completion_of_adapters_on_a_server(folder: Path, dense: Path) -> None:
    dataset = make_dataset(folder / "served adapters.jsonl", rows=2)
    lora = ["--tuner_type", "lora", "--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "all-linear", "--lr",
            "1e-2", "--vllm_enable_lora", "true"]  # fmt: skip
    drafts = ["--speculative_rollouts", "history"]
    flags = ["--vllm_enable_lora", "true", *drafts]
    server = RolloutServer(dense, folder / "adapters.txt", flags, key=None).start()
    try:
        plain = trained(folder / "local adapters", dense, dataset, lora)
        remote = ["--vllm_mode", "server", "--vllm_server_base_url", server.wait().url]
        drafted = trained(folder / "served adapters", dense, dataset, [*lora, *drafts, *remote])
    finally:
        server.stop()
    assert_equal_runs(plain, drafted)
    assert all(line["drafts/accepted"] > 0 for line in drafted[1])


def trained(
    folder: Path,
    model: Path,
    dataset: Path,
    flags: list[str],
    ranks: int = 1,
    rollouts: int = 3,
    on_line: Callable[[str], object] | None = None,
) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Return tokens and log-probs of the completions of trained rollouts, and the logged steps."""
    dump = folder / "dump"
    exact = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--rollout_dump", str(dump),
             "--train_iters", str(rollouts), "--temperature", "0.04", "--max_completion_length", "32",
             "--save_steps", "100"]  # fmt: skip
    run = megatron_rlhf(model, dataset, folder, ranks, [*exact, *flags], on_line=on_line)
    assert run.code == 0, run.output[-4000:]
    rows = [row for number in range(rollouts) for row in read_json_lines(dump / f"rollout-{number:06}.jsonl")]
    return [(row["completion_ids"], row["logprobs"]) for row in rows], run.log


@pytest.mark.slow
def test_a_run_that_resumes_drafts_from_its_dump(folder: Path, dense: Path) -> None:
    """The replay counts another number of accepted drafts without the rollouts of the first run."""
    flags = ["--speculative_rollouts", "history", "--resume", "auto", "--save_steps", "2", "--no_save_optim", "false",
             "--no_save_rng", "false"]  # fmt: skip
    dataset = make_dataset(folder / "two rows.jsonl", rows=2)
    run = folder / "resumed"
    trained(run, dense, dataset, flags, rollouts=2)
    _, log = trained(run, dense, dataset, flags, rollouts=3)
    *_, with_dump = simulated(run / "dump")
    *_, without = simulated(run / "dump", remembers=False)
    assert log[-1]["drafts/accepted"] == with_dump != without


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_completions_of_a_released_model_are_the_same(tmp_path: Path) -> None:
    """504 completions of SmolLM2, in three rollouts of eight questions. It takes minutes, and an index that has it.

    Its nine heads cannot be divided by two ranks: the run above has them, with another model. Log-probs differ by
    rounding, which depends on the rows of a step, as between steps without drafts.
    """
    done = get_model(tmp_path / "smollm2")
    if done.returncode:
        pytest.skip(f"get-model: {done.stderr[-500:]}")
    report = report_of(tmp_path / "smollm2", QUESTIONS, 21, 24, 40, [], "released model")
    for rollout, (without, drafted) in report.items():
        counts = {name: value for name, value in drafted.items() if name != "results"}
        far = furthest(without["results"], drafted["results"])
        print(rollout, counts, f"{without['steps']} steps without, log-probs within {far:.3g}")
        assert_equal(without, drafted, bound=ROUNDING)
        assert len(drafted["results"]) == 168 and drafted["accepted"] > 0
        assert drafted["steps"] < without["steps"]
    assert sum(runs[1]["preempted"] for runs in report.values()) > 0


def simulated(dump: Path, remembers: bool = True) -> Iterator[int]:
    """Yield how many drafts the replay of each rollout accepts, without an engine."""
    rollouts = read_dump(dump)
    for number, files in rollouts.items():
        before = range(number if remembers else 0)
        earlier = [text for rollout in before for file in rollouts[rollout] for text in file.completions]
        tallies = replay([text for file in files for text in file.completions], earlier, depth=4, most_running=8)
        yield sum(tally.tokens - tally.requests for tally in tallies.values())
