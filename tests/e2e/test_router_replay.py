"""--router_replay_mode R3 in real runs: the trainer takes vLLM's experts, of its process, of a server, of a dump."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.packing.expert_rows import decode_rows
from swift_megatron_grpo.types import ExpertRows
from tests.paths import REPOSITORY
from tests.support.runs import PLUGINS, REPORTS_EXPERTS, REWARDS, Finished, make_model, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
EXACT = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--save_steps", "100"]
R3 = ["--router_replay_mode", "R3", "--router_agreement_samples", "4"]
STOPPED = "EngineHasOtherWeights, generated 0 times"
NUMBERS = ("loss", "grad_norm")


@pytest.fixture(scope="module")
def moe(folder: Path) -> Path:
    return make_model(folder / "moe", kind="moe")


def numbers(run: Finished) -> list[list[float]]:
    assert run.code == 0, run.output[-4000:]
    return [[step[name] for name in NUMBERS] for step in run.log]


def rows_of(dump: Path) -> list[tuple[dict[str, Any], ExpertRows | None]]:
    lines = [line for path in sorted(dump.glob("*.jsonl")) for line in read_json_lines(path)]
    return [(line, decode_rows(line.get("routed_experts"))) for line in lines]


def test_the_difference_to_vllm_falls_with_its_experts(folder: Path, dataset: Path) -> None:
    """bf16, 64 experts, 2 of them per token, in 8 layers."""
    model = make_model(folder / "many experts", "moe", ["--experts", "64", "--layers", "8"])
    plugins = ["--external_plugins", str(REWARDS), str(PLUGINS / "measure_gap.py")]
    flags = ["--train_iters", "1", "--generation_batch_size", "16", "--global_batch_size", "16", "--micro_batch_size",
             "8", "--temperature", "0.9", "--save_steps", "100", "--router_agreement_samples", "16"]  # fmt: skip
    run = megatron_rlhf(model, dataset, folder / "gap", 1, [*flags, "--router_replay_mode", "R3", *plugins])
    assert run.code == 0, run.output[-4000:]
    gap = json.loads((folder / "gap.json").read_text())
    print(gap, run.log[0]["rollout/router_agreement"])
    assert gap["tokens"] > 100 and gap["replayed"] < 0.85 * gap["chosen"]
    assert 0.9 < run.log[0]["rollout/router_agreement"] < 1


@pytest.mark.nightly
def test_experts_arrive_from_server_and_dump_as_from_a_colocated_engine(folder: Path, moe: Path, dataset: Path) -> None:
    flags = [*EXACT, *R3, "--steps_per_generation", "2", "--train_iters", "4"]
    local = megatron_rlhf(moe, dataset, folder / "local", 2, [*flags, "--rollout_dump", str(folder / "local dump")])
    expected, recorded = numbers(local), rows_of(folder / "local dump")
    agreement = [step["rollout/router_agreement"] for step in local.log if "rollout/router_agreement" in step]
    assert len(agreement) == 2 and min(agreement) > 0.99
    for line, rows in recorded:
        assert rows is not None and rows.dtype == np.uint8
        assert rows.shape == (len(line["prompt_ids"]) + len(line["completion_ids"]) - 1, 4, 2)

    server = RolloutServer(moe, folder / "moe server.txt", ["--model_type", "qwen3_moe", *REPORTS_EXPERTS]).start()
    try:
        more = ["--vllm_mode", "server", "--vllm_server_base_url", server.wait().url]
        more += ["--rollout_dump", str(folder / "server dump"), "--expert_model_parallel_size", "2"]
        remote = megatron_rlhf(moe, dataset, folder / "remote", 2, [*flags, *more], {API_KEY_VARIABLE: KEY})
    finally:
        server.stop()
    for step, wanted in zip(numbers(remote), expected, strict=True):
        assert step == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    pairs = list(zip(rows_of(folder / "server dump"), recorded, strict=True))
    assert all(one["completion_ids"] == other["completion_ids"] for (one, _), (other, _) in pairs)
    same = [(np.sort(one) == np.sort(other)).all(-1) for (_, one), (_, other) in pairs]  # type: ignore[arg-type]
    assert np.concatenate([part.ravel() for part in same]).mean() > 0.99

    replay = ["--rollout_replay", str(folder / "local dump")]
    again = megatron_rlhf(moe, dataset, folder / "again", 2, [*flags, *replay])
    assert numbers(again) == expected

    flags = [*EXACT, "--steps_per_generation", "2", "--num_iterations", "2", "--train_iters", "4", *replay]
    recorded_by_trainer = [*flags, "--router_replay_mode", "R2"]
    one = megatron_rlhf(moe, dataset, folder / "one", 1, recorded_by_trainer)
    stages = ["--pipeline_model_parallel_size", "2", "--decoder_last_pipeline_num_layers", "1"]
    two = megatron_rlhf(moe, dataset, folder / "two", 2, [*recorded_by_trainer, *stages])
    for step, wanted in zip(numbers(two), numbers(one), strict=True):
        assert step == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_the_experts_of_a_conversation_are_those_of_all_its_tokens(folder: Path, moe: Path, dataset: Path) -> None:
    """An environment's words were in the prompt of the turn after them. Two ranks share one engine."""
    plugins = [str(REWARDS), str(REPOSITORY / "templates" / "plugins" / "spelling.py")]
    flags = [*EXACT, *R3, "--multi_turn_scheduler", "gym_scheduler", "--gym_env", "spelling", "--max_turns", "3",
             "--train_iters", "1", "--max_completion_length", "12", "--vllm_tensor_parallel_size", "2",
             "--external_plugins", *plugins]  # fmt: skip
    dump = folder / "conversations"
    run = megatron_rlhf(moe, dataset, folder / "turns", 2, [*flags, "--rollout_dump", str(dump)])
    assert run.code == 0, run.output[-4000:]
    assert run.log[0]["rollout/k3_kl"] < 1e-8 and run.log[0]["rollout/router_agreement"] > 0.99
    for line, rows in rows_of(dump):
        assert not all(line["sampled"]) and rows is not None
        assert len(rows) == len(line["prompt_ids"]) + len(line["completion_ids"]) - 1


@pytest.mark.nightly
def test_runs_that_could_replay_nothing_are_refused(folder: Path, moe: Path, dense: Path, dataset: Path) -> None:
    run = megatron_rlhf(dense, dataset, folder / "dense", 1, ["--router_replay_mode", "R2"])
    assert run.code != 0 and f"--router_replay_mode R2: --model {dense} is dense" in run.output
    dump, plain = folder / "without experts", [*EXACT, "--train_iters", "1"]
    assert megatron_rlhf(moe, dataset, folder / "plain", 1, [*plain, "--rollout_dump", str(dump)]).code == 0
    assert all(rows is None for _, rows in rows_of(dump))
    replay = ["--rollout_replay", str(dump), "--router_replay_mode", "R3"]
    run = megatron_rlhf(moe, dataset, folder / "none", 1, [*plain, *replay])
    assert run.code != 0 and "the dump of --rollout_replay has none" in run.output
    run = megatron_rlhf(moe, dataset, folder / "cold", 1, [*plain, *R3, "--vllm_enable_prefix_caching", "false"])
    assert run.code != 0 and "vLLM cannot report the experts" in run.output and "prefix caching" in run.output


@pytest.mark.nightly
def test_faults_in_experts_and_routers_behind_a_server_are_detected(folder: Path, moe: Path, dataset: Path) -> None:
    """The server uses expert parallelism."""
    sharded = ["--vllm_tensor_parallel_size", "2", "--vllm_enable_expert_parallel", "true", *REPORTS_EXPERTS]
    server = RolloutServer(moe, folder / "faulty server.txt", sharded).start()
    try:
        flags = [*EXACT, *R3, "--train_iters", "6", "--expert_model_parallel_size", "2", "--micro_batch_size", "1",
                 "--vllm_mode", "server", "--vllm_server_base_url", server.wait().url,
                 "--external_plugins", str(REWARDS), str(PLUGINS / "sync_faults.py")]  # fmt: skip
        environment = {"FAULTS": "routers", API_KEY_VARIABLE: KEY}
        run = megatron_rlhf(moe, dataset, folder / "faulty", 2, flags, environment)
    finally:
        server.stop()
    assert run.code == 0, run.output[-4000:]
    errors = json.loads((run.folder / "faults.0.json").read_text())
    expert, router = "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.1.mlp.gate.weight"
    for fault, tensor in (("expert_not_sent", expert), ("router_not_sent", router)):
        error = errors[f"{fault}, step 1"]
        assert error.startswith(STOPPED) and "trainer: not sent, unlike in the sync before" in error and tensor in error
    assert "So the export itself is wrong" in errors["experts_swapped_in_export, step 1"]
    assert errors["experts_swapped_in_export, step 1"].startswith(STOPPED)
    for fault, tensor in (
        ("router_lost_in_transfer, step 2", router),
        ("expert_lost_in_transfer, step 3", expert),
        ("experts_swapped_in_transfer, step 4", expert),
    ):
        assert errors[fault].startswith(STOPPED) and tensor in errors[fault]
    unreported = errors["experts_not_reported, step 4"]
    assert unreported.startswith("WrongExperts, generated 1 times")
    assert "vLLM does not report the experts of layer 3: a row of it is zero" in unreported
    assert all(step["rollout/router_agreement"] > 0.99 for step in run.log)
