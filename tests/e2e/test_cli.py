"""The command in every mode: one run by the real command, the others on forked ranks.

It trains, the engine runs the trainer's weights after each sync, and plain transformers computes the same log-probs
from the saved checkpoint.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.runs import (
    PLUGINS,
    PROBE,
    REWARDS,
    Finished,
    hf_difference,
    make_model,
    megatron_command,
    megatron_rlhf,
    read_json_lines,
)

pytestmark = pytest.mark.e2e
# everything is offloaded whenever possible; test_offloading.py verifies that this changes no number
SMALL_GPU = ["--offload_model", "true", "--offload_optimizer", "true", "--offload_grad", "true",
             "--external_plugins", str(REWARDS), str(PROBE), str(PLUGINS / "small_gpu.py")]  # fmt: skip
PROBED = ["--external_plugins", str(REWARDS), str(PROBE), "--callbacks", "probe"]


def check_run(run: Finished, steps: int, layout: str, k3_bound: float, max_diff: float = 0.02) -> None:
    """Check what every run logs."""
    assert run.code == 0, run.output[-4000:]
    assert "trains this run" in run.output and layout in run.output
    assert len(run.log) == steps
    for step in run.log:
        assert step["grad_norm"] > 0
        if "time/generation" in step:
            assert 0 <= step["sync_check/mean_diff"] <= step["sync_check/max_diff"] < max_diff
    assert max(step["rollout/k3_kl"] for step in run.log) < k3_bound  # the engine generates with the trainer's weights
    assert "bit for bit as they were sent" in run.output
    assert run.log[0]["actor/approxkl"] == 0 and run.log[0]["actor/clipfrac"] == 0  # the first step is on-policy


@pytest.mark.thorough
def test_full_tuning_trains_with_tensor_and_sequence_parallelism(folder: Path, dense: Path, dataset: Path) -> None:
    """`swift megatron rlhf FILE` reaches torchrun and its ranks; test_stop.py runs `megatron rlhf`."""
    flags = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--train_iters", "4", "--save_steps",
             "4", "--steps_per_generation", "2", "--log_completions", "true", "--beta", "0.04",
             "--ref_tensor_model_parallel_size", "1", "--report_to", "tensorboard", *PROBED]  # fmt: skip
    ending_as_a_users = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    run = megatron_command(dense, dataset, folder / "full", 2, flags, ending_as_a_users, folder / "grpo.yaml")
    assert re.search(r"run sh: `.*torch\.distributed\.run .*/rlhf\.py --rlhf_type grpo --model", run.output)
    check_run(run, steps=4, layout="TP 2", k3_bound=5e-2)  # the second step of a rollout is off-policy
    assert run.log[0]["rollout/k3_kl"] < 1e-4 and run.log[2]["rollout/k3_kl"] < 1e-4
    assert run.log[2]["actor/approxkl"] == 0 and run.log[1]["actor/approxkl"] > 0
    assert "reference TP 1, PP 1, CP 1, EP 1, DP 2" in run.output
    assert run.log[0]["kl"] == pytest.approx(0, abs=1e-6) and run.log[3]["kl"] > 0
    assert hf_difference(run.last_checkpoint)["mean"] < 2e-2
    rows = read_json_lines(run.folder / "completions.jsonl")
    assert len(rows) == 2 * 16 and {"gen_step", "prompt", "completion", "advantages"} <= set(rows[0])
    assert (run.folder / "runs").is_dir() and not (run.folder / "images").exists()  # TensorBoard; the report has curves
    assert "images_dir" not in run.output  # ms-swift's line on that folder
    assert re.search(r"^ *4/4 +1 .* TTTTT", run.output, re.MULTILINE) and "a completion of rollout 0" in run.output
    report = (run.folder / "report.html").read_text()
    assert '"step":4,"total_steps":4,"ended":true' in report and '"speed/tokens_per_second"' in report


def test_lora_trains_with_data_parallelism(folder: Path, dense: Path, dataset: Path) -> None:
    flags = ["--tuner_type", "lora", "--train_iters", "3", "--save_steps", "3", "--merge_lora", "true",
             "--callbacks", "probe", "--external_plugins", str(REWARDS), str(PROBE),
             str(PLUGINS / "fuller_first_rank.py")]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "lora", ranks=2, flags=flags)
    check_run(run, steps=3, layout="DP 2", k3_bound=1e-4)
    assert not (run.folder / "runs").exists() and not (run.folder / "images").exists()  # --report_to none
    assert all(step["memory(GiB)"] == 3 for step in run.log)  # of all ranks, and the last one logs
    checkpoint = run.last_checkpoint
    assert hf_difference(checkpoint, base=dense)["mean"] < 2e-2
    merged = checkpoint.with_name(checkpoint.name + "-merged")
    (merged / "probe.json").write_text((checkpoint / "probe.json").read_text())
    assert hf_difference(merged)["mean"] < 2e-2


def test_a_pipeline_trains_with_tensor_parallel_vllm(folder: Path, dense: Path, dataset: Path) -> None:
    flags = ["--pipeline_model_parallel_size", "2", "--vllm_tensor_parallel_size", "2", "--torch_dtype", "float32",
             "--fp16", "false", "--beta", "0.04", "--virtual_pipeline_model_parallel_size", "2",
             "--max_tokens_per_micro_batch", "96", "--num_iterations", "2", "--infer_batch_size", "8",
             "--sync_check", "full", *PROBED, *SMALL_GPU]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "pipeline", ranks=2, flags=flags)
    check_run(run, steps=2, layout="PP 2 with VPP 2", k3_bound=5e-2, max_diff=1e-5)
    assert "the trainer offloads gradients and reference policy and weights" in run.output
    assert run.log[0]["kl"] == pytest.approx(0, abs=1e-6) and run.log[1]["kl"] > 0
    assert run.log[0]["rollout/k3_kl"] < 1e-7
    assert "time/generation" in run.log[0] and "time/generation" not in run.log[1]  # reuses the completions
    assert run.log[1]["actor/approxkl"] > 0
    assert hf_difference(run.last_checkpoint)["max"] < 1e-4


def test_experts_train_in_parallel(folder: Path, dataset: Path) -> None:
    model = make_model(folder / "moe", kind="moe")
    flags = ["--expert_model_parallel_size", "2", "--torch_dtype", "float32", "--fp16", "false", "--micro_batch_size",
             "1", "--callbacks", "probe", "--external_plugins", str(REWARDS), str(PROBE),
             "--moe_aux_loss_coeff", "0.001"]  # fmt: skip
    run = megatron_rlhf(model, dataset, folder / "experts", 2, flags)
    check_run(run, steps=2, layout="EP 2", k3_bound=1e-7, max_diff=1e-5)
    assert all(0.9 < step["load_balancing_loss"] < 4 for step in run.log)  # 1: all experts get as many tokens
    assert hf_difference(run.last_checkpoint)["max"] < 1e-4
