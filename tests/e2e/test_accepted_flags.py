"""Flags of ms-swift that change nothing, or how something is computed and not what: the numbers stay the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import CANNED, PROBE, REWARDS, Finished, hf_difference, megatron_rlhf, read_json_lines

pytestmark = pytest.mark.e2e
LOADING = "Loading: "  # progress bar of mcore-bridge, see test_adapter_settings.py
FP32 = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true"]
ALL_WEIGHTS = ["--use_distributed_optimizer", "false"]  # which the one on the CPU needs in fp32
CPU_ADAM = ["--optimizer_cpu_offload", "true", "--optimizer_offload_fraction", "0.5", *ALL_WEIGHTS]
STATES = ["--no_save_optim", "false", "--no_save_rng", "false", "--save_steps", "1"]


def train(folder: Path, model: Path, dataset: Path, name: str, *flags: str, ok: bool = True) -> Finished:
    run = megatron_rlhf(model, dataset, folder / name, 1, [*FP32, *flags])
    assert not ok or run.code == 0, run.output[-4000:]
    return run


def same_steps(runs: Finished, other: Finished) -> bool:
    """Return True if the steps that both have logged are equal, up to rounding."""
    steps = {line["iteration"]: line for line in other.log}
    pairs = [(line, steps[line["iteration"]]) for line in runs.log if line["iteration"] in steps]
    assert pairs
    return all(
        line[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7)
        for line, expected in pairs
        for key in ("loss", "grad_norm", "reward")
    )


@pytest.fixture(scope="module")
def plain(folder: Path, dense: Path, dataset: Path) -> Finished:
    return train(folder, dense, dataset, "plain", *CANNED)


@pytest.fixture(scope="module")
def noted(folder: Path, dense: Path, dataset: Path) -> Finished:
    """A run with flags that change no number, which saves states of the optimizer after every step."""
    short = ["--vllm_max_model_len", "151"]  # 1 below --max_length and --max_completion_length
    unused = ["--padding_free", "false", "--offload_bridge", "true", "--calculate_per_token_loss", "true",
              "--loss_scale", "default", "--expert_model_parallel_size", "1"]  # fmt: skip
    return train(folder, dense, dataset, "noted", *unused, *short, *CPU_ADAM, *STATES, *CANNED)


def test_flags_without_effect_are_noted_and_the_numbers_are_the_same(plain: Finished, noted: Finished) -> None:
    assert same_steps(noted, plain)
    for note in (
        "--padding_free false: without effect, because sequences are packed",
        "--offload_bridge true: without effect",
        "--calculate_per_token_loss true: without effect, because the loss is divided",
        "--vllm_max_model_len 151 is less than --max_length 128 and --max_completion_length 24 together",
    ):
        assert note in noted.output and note not in plain.output


@pytest.mark.nightly
def test_optimizer_states_on_cpu_start_from_a_megatron_checkpoint(
    noted: Finished, folder: Path, dense: Path, dataset: Path
) -> None:
    """Upstream copies the weights to the CPU before it loads them; see upstream_fixes/hybrid_optimizer.py."""
    start = ["--mcore_model", str(noted.folder / "checkpoint-2"), *CANNED]
    on_cpu = train(folder, dense, dataset, "on-cpu", *start, *CPU_ADAM)
    assert same_steps(on_cpu, train(folder, dense, dataset, "on-gpu", *start, *ALL_WEIGHTS))


IN_ORDER = ["--dataset_shuffle", "false", "--train_dataloader_shuffle", "false", "--log_completions", "true",
            "--lr_decay_style", "constant", *ALL_WEIGHTS]  # fmt: skip


@pytest.mark.nightly
def test_a_stream_trains_the_rows_that_a_run_without_it_trains(folder: Path, dense: Path, dataset: Path) -> None:
    """A run that continues it for more steps reads more rows, and begins with the same ones."""
    streamed = ["--streaming", "true", *STATES, *IN_ORDER]
    whole = train(folder, dense, dataset, "whole", "--train_iters", "3", *IN_ORDER)
    first = train(folder, dense, dataset, "streamed", "--train_iters", "1", *streamed)
    source = ["--finetune", "false", "--mcore_model", str(first.folder / "checkpoint-1")]
    rest = train(folder, dense, dataset, "streamed-on", "--train_iters", "3", *source, *streamed)
    for step, expected in zip([*first.log, *rest.log], whole.log, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
    found = [[row["prompt"] for row in read_json_lines(run.folder / "completions.jsonl")] for run in (first, rest)]
    expected = [row["prompt"] for row in read_json_lines(whole.folder / "completions.jsonl")]
    assert found[0] + found[1] == expected and len(set(expected)) == len(expected) / 4 == 6
    assert "--streaming true: 2 rows are read" in first.output and "--streaming true: 6 rows" in rest.output


BF16 = ["--torch_dtype", "bfloat16", "--use_precision_aware_optimizer", "true"]  # as scripts use it


@pytest.fixture(scope="module")
def low(folder: Path, dense: Path, dataset: Path) -> Finished:
    """A run in bf16 with all states of the distributed optimizer on the CPU, saved after every step."""
    return train(folder, dense, dataset, "bf16-cpu", *BF16, "--optimizer_cpu_offload", "true", *STATES)


@pytest.mark.nightly
def test_optimizer_states_on_the_cpu_work_with_the_distributed_optimizer(
    low: Finished, folder: Path, dense: Path, dataset: Path
) -> None:
    """The two optimizers round differently in the last place."""
    on_gpu = train(folder, dense, dataset, "bf16", *BF16)
    for line, expected in zip(low.log, on_gpu.log, strict=True):
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


@pytest.mark.nightly
def test_a_run_with_optimizer_states_on_cpu_resumes_as_if_uninterrupted(
    low: Finished, folder: Path, dense: Path, dataset: Path
) -> None:
    start = ["--finetune", "false", "--mcore_model", str(low.folder / "checkpoint-1")]
    resumed = train(folder, dense, dataset, "resumed", *start, *BF16, "--optimizer_cpu_offload", "true", *STATES)
    assert [line["iteration"] for line in resumed.log] == ["2/2"] and same_steps(resumed, low)


def test_a_run_with_sgd_resumes_as_if_uninterrupted(folder: Path, dense: Path, dataset: Path) -> None:
    """Its state is the momentum, which shows in the weights after the next step; see upstream_fixes/sgd.py."""
    constant = ["--train_iters", "3", "--lr_decay_style", "constant"]
    sgd = ["--optimizer", "sgd", *ALL_WEIGHTS, *STATES, "--sync_check", "off", *constant]
    whole = train(folder, dense, dataset, "sgd", *sgd)
    start = ["--finetune", "false", "--mcore_model", str(whole.folder / "checkpoint-2")]
    resumed = train(folder, dense, dataset, "sgd-resumed", *start, *sgd)
    assert [line["iteration"] for line in resumed.log] == ["3/3"] and same_steps(resumed, whole)
    weights = [load_file(run.last_checkpoint / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


def test_a_reference_in_megatrons_format_equals_that_in_safetensors(
    noted: Finished, folder: Path, dense: Path, dataset: Path
) -> None:
    reference, beta = str(noted.folder / "checkpoint-2"), ["--beta", "0.5", *CANNED]
    theirs = train(folder, dense, dataset, "hf-reference", "--ref_model", reference, *beta)
    ours = train(folder, dense, dataset, "megatron-reference", "--mcore_ref_model", reference, *beta)
    assert [line["kl"] for line in ours.log] == [line["kl"] for line in theirs.log] and ours.log[0]["kl"] > 0
    assert [line["loss"] for line in ours.log] == [line["loss"] for line in theirs.log]


# ---- lengths


def test_a_prompt_without_room_is_refused_with_the_flag(folder: Path, dense: Path, dataset: Path) -> None:
    run = train(folder, dense, dataset, "no-room", "--vllm_max_model_len", "40", "--sync_check", "off", ok=False)
    assert run.code != 0
    assert "leaves no room for a completion within --vllm_max_model_len 40; use a larger --vllm_max" in run.output


@pytest.fixture(scope="module")
def with_long_rows(folder: Path, dataset: Path) -> Path:
    rows = [json.loads(line) for line in dataset.read_text().splitlines()[:10]]
    for row in (3, 7):
        rows[row]["messages"] = [{"role": "user", "content": f"{row}: " + "x" * 200}]
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.nightly
def test_long_prompts_are_left_out(folder: Path, dense: Path, with_long_rows: Path) -> None:
    flags = ["--truncation_strategy", "delete", "--train_iters", "5", "--rollout_dump", str(folder / "kept")]
    run = train(folder, dense, with_long_rows, "delete", *flags, "--dataset_shuffle", "false")
    found = "2 of 10 prompts are longer than --max_length 128 (row 3 of "
    assert f"--dataset: {found}" in run.output and "they are left out" in run.output
    prompts = {
        row["messages"][-1]["content"].split(":")[0]
        for dumped in (folder / "kept").glob("rollout-*.jsonl")
        for row in read_json_lines(dumped)
    }
    assert prompts == {str(row) for row in range(10)} - {"3", "7"}


@pytest.mark.parametrize("strategy", ["left", "raise"])
def test_long_prompts_are_refused_before_a_model_loads(
    folder: Path, dense: Path, with_long_rows: Path, strategy: str
) -> None:
    run = train(folder, dense, with_long_rows, strategy, "--truncation_strategy", strategy, ok=False)
    assert run.code != 0 and LOADING not in run.output
    assert f"row 7 of {with_long_rows} has 2" in run.output
    assert ", or --truncation_strategy delete to leave them out" in run.output


# ---- positions


def test_scaled_positions_are_those_of_vllm_and_of_transformers(folder: Path, dense: Path, dataset: Path) -> None:
    scaling = ["--rope_scaling", "yarn", "--max_model_len", "8192", "--vllm_max_model_len", "4096",
               "--external_plugins", str(REWARDS), str(PROBE), "--callbacks", "probe"]  # fmt: skip
    run = train(folder, dense, dataset, "yarn", *scaling)
    assert run.log[0]["rollout/k3_kl"] < 1e-9
    saved = json.loads((run.last_checkpoint / "config.json").read_text())
    assert saved["rope_parameters"]["rope_type"] == "yarn" and saved["max_position_embeddings"] == 8192
    assert hf_difference(run.last_checkpoint)["mean"] < 1e-5


# ---- sampling


@pytest.mark.nightly
def test_completions_match_a_regular_expression(folder: Path, dense: Path, dataset: Path) -> None:
    flags = ["--structured_outputs_regex", "[a-d]{6}", "--log_completions", "true"]
    run = train(folder, dense, dataset, "regex", *flags)
    lines = read_json_lines(run.folder / "completions.jsonl")
    completions = [line["completion"].split("\n\n")[-1].removesuffix("<|endoftext|>") for line in lines]
    assert len(completions) == 16 and all(re.fullmatch("[a-d]{6}", text) for text in completions)
    assert "--structured_outputs_regex [a-d]{6} make vLLM sample from another distribution" in run.output
