"""Faults that only the assembled run can see end it before a model loads, with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from swift_megatron_grpo.output.disk.folder_lock import FolderLock
from tests.support.runs import megatron_command, megatron_rlhf
from tests.support.servers import RolloutServer

LOADING = "Loading: "  # progress bar of mcore-bridge, see test_adapter_settings.py


@pytest.mark.e2e
def test_a_setting_that_vllm_refuses_ends_the_run_before_a_model_loads(
    folder: Path, dense: Path, dataset: Path
) -> None:
    settings = json.dumps({"max_num_batched_tokens": -1})
    run = megatron_rlhf(dense, dataset, folder / "engine", 1, ["--vllm_engine_kwargs", settings])
    assert run.code != 0 and LOADING not in run.output
    assert "--vllm_engine_kwargs: vLLM refuses max_num_batched_tokens = -1: Input should be greater" in run.output


@pytest.mark.nightly
@pytest.mark.e2e
def test_rows_that_would_be_dropped_end_the_run_before_a_model_loads(folder: Path, dense: Path, dataset: Path) -> None:
    """The run prints one message. test_torchrun.py refuses it on several ranks."""
    rows = dataset.read_text().splitlines()[:8]
    mixed = folder / "mixed.jsonl"
    mixed.write_text("\n".join([*rows, json.dumps({"query": "1+1", "letters": "a"})]))
    run = megatron_command(dense, mixed, folder / "dropped", 1)
    assert run.code == 1 and LOADING not in run.output and "Traceback" not in run.output
    message = f"--dataset: {mixed}: 1 of 9 rows of the dataset would not be trained: row 8 has query but no messages"
    assert run.output.count(message) == 1 and run.output.splitlines()[-1].startswith(message), run.output[-3000:]


@pytest.mark.nightly
@pytest.mark.e2e
def test_too_few_rows_for_a_step_end_the_run_with_one_message(folder: Path, dense: Path, dataset: Path) -> None:
    (few := folder / "few.jsonl").write_text(dataset.read_text().splitlines()[0])
    run = megatron_command(dense, few, folder / "few", 2, ["--num_train_epochs", "1"])
    assert run.code == 1 and LOADING not in run.output and "Traceback" not in run.output
    message = "the dataset's 1 prompts are too few for one training step in --num_train_epochs 1; use --train_iters"
    assert run.output.count(message) == 1 and run.output.splitlines()[-1].startswith(message), run.output[-3000:]


RAISES = """
from swift.rewards import ORM, orms

class Mine(ORM):
    def __init__(self, args=None, **kwargs):
        raise ValueError("no api key")

    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)

orms["mine"] = Mine
"""


@pytest.mark.e2e
@pytest.mark.nightly
def test_a_reward_that_raises_and_a_model_without_weights_end_the_run(folder: Path, dense: Path, dataset: Path) -> None:
    (plugin := folder / "raises.py").write_text(RAISES)
    mine = ["--external_plugins", str(plugin), "--reward_funcs", "mine"]
    run = megatron_command(dense, dataset, folder / "raises", 2, mine)
    assert run.code == 1 and LOADING not in run.output and "Traceback" not in run.output
    message = "--reward_funcs mine: creating it raises ValueError: no api key; correct its __init__"
    assert run.output.count(message) == 1 and run.output.splitlines()[-1].startswith(message), run.output[-3000:]
    shutil.copytree(dense, empty := folder / "empty", ignore=shutil.ignore_patterns("*.safetensors*"))
    run = megatron_rlhf(empty, dataset, folder / "no weights", 1, [])
    assert run.code != 0 and LOADING not in run.output
    assert f"--model {empty}: the folder {empty} has no weights: neither model.safetensors" in run.output


@pytest.mark.e2e
@pytest.mark.parametrize("flag", ["--output_dir", "--rollout_dump"])
def test_the_folder_of_another_run_is_refused_before_a_model_loads(
    folder: Path, dense: Path, dataset: Path, flag: str
) -> None:
    used, other = folder / f"used{flag}", folder / f"other{flag}"
    lock = FolderLock(used, flag)
    flags = ["--rollout_dump", str(used if flag == "--rollout_dump" else other)]
    run = megatron_rlhf(dense, dataset, used if flag == "--output_dir" else folder / "free", 2, flags)
    del lock  # its file closes, which unlocks the folder
    assert run.code != 0 and LOADING not in run.output
    assert f"FolderInUse: {flag} {used} is in use by another run (process " in run.output, run.output[-3000:]


@pytest.mark.e2e
def test_a_setting_that_changes_the_policy_ends_a_server_at_its_start(folder: Path, dense: Path) -> None:
    settings = json.dumps({"quantization": "fp8", "max_num_batch_tokens": 8192})
    server = RolloutServer(dense, folder / "quantized.txt", ["--vllm_engine_kwargs", settings]).start()
    assert server.process is not None and server.process.wait(timeout=300) != 0
    log = server.log.read_text()
    assert "--vllm_engine_kwargs: quantization: use --rollout_quantization" in log, log[-3000:]
    assert "max_num_batch_tokens: vLLM has no such setting" in log and "did you mean max_num_batched_tokens" in log
    assert LOADING not in log
