"""Faults between the trainer and vLLM, injected into real runs: each is detected before anything is generated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.support.runs import PLUGINS, REWARDS, Finished, make_model, megatron_rlhf
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
FAULTY = ["--external_plugins", str(REWARDS), str(PLUGINS / "sync_faults.py")]
TWO_RANKS_OF_VLLM = ["--sequence_parallel", "true", "--vllm_tensor_parallel_size", "2"]
STOPPED = "EngineHasOtherWeights, generated 0 times"


def reports(run: Finished) -> dict[str, str]:
    """Return the report of each fault, which must be the same on both ranks."""
    one, other = (json.loads((run.folder / f"faults.{rank}.json").read_text()) for rank in (0, 1))
    assert one == other
    return one  # type: ignore[no-any-return]


WHERE = pytest.mark.parametrize("where", ["colocate", pytest.param("server", marks=pytest.mark.slow)])


@contextmanager
def generating(where: str, model: Path, flags: list[str]) -> Iterator[tuple[list[str], str]]:
    """Run vLLM in the trainer or in a server; yield the trainer's flags and the names of the engines."""
    if where == "colocate":
        yield [], "engine 0, engine 1"
        return
    server = RolloutServer(model, model.with_suffix(".server.txt"), flags).start()
    try:
        yield ["--vllm_mode", "server", "--vllm_server_base_url", server.wait().url], server.url
    finally:
        server.stop()


@WHERE
def test_lost_tensors_and_swapped_experts_are_detected(folder: Path, dataset: Path, where: str) -> None:
    model = make_model(folder / f"moe {where}", kind="moe")
    flags = ["--expert_model_parallel_size", "2", "--torch_dtype", "float32", "--fp16", "false", "--micro_batch_size",
             "1", "--train_iters", "12", "--save_steps", "100", "--temperature", "0.7", *FAULTY]  # fmt: skip
    with generating(where, model, ["--model_type", "qwen3_moe"]) as (more, engines):
        environment = {"FAULTS": "experts", API_KEY_VARIABLE: KEY}
        run = megatron_rlhf(model, dataset, folder / f"experts {where}", 2, [*flags, *more], environment)
    up = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert "first weight sync: vLLM holds all 87 tensors bit for bit" in run.output
    errors = reports(run)
    first = errors["tensor_lost_in_transfer, step 0"]  # vLLM has the same tensor from the checkpoint
    assert first.startswith(STOPPED) and "w13_weight" in first
    assert "parameters of the engine that no sent tensor writes" in first
    assert errors["tensor_not_sent, step 1"].startswith(STOPPED)
    assert f"trainer: not sent, unlike in the sync before: {up}" in errors["tensor_not_sent, step 1"]
    swapped = errors["experts_swapped_in_export, step 1"]
    assert swapped.startswith(STOPPED) and "So the export itself is wrong" in swapped
    stale = errors["tensor_lost_in_transfer, step 2"]
    assert stale.startswith(STOPPED)
    assert f"{engines}: the engine holds other values than were sent: {up}" in stale
    swapped = errors["experts_swapped_in_transfer, step 2"]
    assert swapped.startswith(STOPPED)
    assert all(f"experts.{i}.{name}_proj" in swapped for i in (0, 1) for name in ("down", "gate", "up"))
    assert errors["logprobs_shifted, step 2"].startswith("ShiftedLogprobs, generated 1 times")
    assert "completions of weights [1] were returned instead of 2" in errors["rollouts_of_older_weights, step 2"]
    assert errors["tensor_lost_once, step 3"] == "no error"
    assert "weight sync 3 failed its check, was repeated, and then passed" in run.output
    assert errors["temperature_not_applied, step 5"] == "no error"
    assert "vLLM does not apply --temperature 0.7" in run.output
    assert run.code != 0  # the last fault affects one engine
    assert "weight sync 7 failed its check twice" in run.output
    assert f"{engines.split(', ')[-1]}: the engine holds other" in run.output
    assert all(step.get("sync_check/mean_diff", 0) < 1e-5 for step in run.log)


@pytest.mark.nightly
@WHERE
def test_twenty_syncs_of_an_adapter_are_bitwise_exact(folder: Path, dense: Path, dataset: Path, where: str) -> None:
    """The engine matches the trainer bit for bit after each sync, and the base weights do not change."""
    flags = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--max_completion_length", "12",
             "--tuner_type", "lora", "--lr", "1e-2", "--sync_check", "full", "--top_p", "0.8", "--train_iters", "20",
             "--save_steps", "100", "--micro_batch_size", "8", *FAULTY]  # fmt: skip
    with generating(where, dense, ["--torch_dtype", "bfloat16"]) as (more, _):
        environment = {"FAULTS": "adapter", API_KEY_VARIABLE: KEY}
        run = megatron_rlhf(dense, dataset, folder / f"adapter {where}", 2, [*flags, *more], environment)
    assert run.code == 0, run.output[-4000:]
    assert len(run.log) == 20 and all(step["sync_check/mean_diff"] < 5e-3 for step in run.log)
    assert run.output.count("failed its check") == 0
    errors = reports(run)
    assert errors["frozen weights"] == 35 and errors["frozen weights that changed"] == []
    nothing = errors["adapter_bound_to_nothing, step 19"]
    assert nothing.startswith(STOPPED) and "bound to no module (--target_modules)" in nothing
    assert errors["adapter_merged_as_zeros, step 19"].startswith(STOPPED)
    fewer = errors["one_adapter_of_a_layer_left_out, step 19"]
    assert fewer.startswith(STOPPED) and "4 of 16 adapters were not merged into the weights sent" in fewer
    assert "--top_p 0.8" in run.output and "use --top_p 1 to sample from the policy" in run.output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("moe", ["--expert_model_parallel_size", "2"]),
        ("dense", ["--tensor_model_parallel_size", "2", *TWO_RANKS_OF_VLLM]),
        ("qwen3_5", ["--torch_dtype", "bfloat16"]),
    ],
)
def test_vllms_own_digests_are_those_of_an_engine_with_the_checkpoint(
    folder: Path, dataset: Path, kind: str, flags: list[str]
) -> None:
    """A second witness, which shares no code with the checksums of this package."""
    witness = ["--external_plugins", str(REWARDS), str(PLUGINS / "witness.py"), "--callbacks", "witness"]
    flags = [*flags, *witness, "--save_steps", "1"]
    model = make_model(folder / f"{kind} of digests", kind=kind)
    trained = megatron_rlhf(model, dataset, folder / f"{kind} trained", 2, [*flags, "--train_iters", "2"])
    saved = trained.folder / "checkpoint-1"
    loaded = megatron_rlhf(saved, dataset, folder / f"{kind} loaded", 2, [*flags, "--train_iters", "1"])
    for rank in (0, 1):
        start, _, synced = json.loads((trained.folder / f"digests.{rank}.json").read_text())
        of_checkpoint = json.loads((loaded.folder / f"digests.{rank}.json").read_text())[0]
        assert synced == of_checkpoint
        assert synced.keys() == start.keys() and synced != start
