"""Runs in which vLLM generates in FP8: a dense model on a CPU, whose vLLM quantizes as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.support.quantized_engines import check_syncs
from tests.support.runs import Finished, megatron_rlhf
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
FP8 = ["--rollout_quantization", "fp8"]
CORRECTED = ["--rollout_importance_sampling_mode", "token_truncate"]
FLAGS = [*FP8, *CORRECTED, "--sync_check", "full", "--train_iters", "3", "--save_steps", "100"]


def check_run(run: Finished) -> None:
    assert run.code == 0, run.output[-4000:]
    assert "bit for bit as they were sent, before it quantized its linear layers" in run.output
    assert "--rollout_quantization fp8: vLLM samples from" not in run.output  # a correction is set
    assert len(run.log) == 3
    for step in run.log:
        assert step["grad_norm"] > 0
        # 8 bits are seen, and the engine follows the trainer: its steps are large here
        assert 3e-3 < step["sync_check/mean_diff"] < 0.1
        assert 0 < step["rollout/k3_kl"] < 1e-2


@pytest.mark.nightly
def test_vllm_in_the_trainer_generates_in_8_bits(folder: Path, dense: Path, dataset: Path) -> None:
    flags = [*FLAGS, "--vllm_tensor_parallel_size", "2", "--tensor_model_parallel_size", "2"]
    check_run(megatron_rlhf(dense, dataset, folder / "colocate", 2, flags))


@pytest.mark.nightly
def test_a_server_must_be_started_with_the_same_flag(folder: Path, dense: Path, dataset: Path) -> None:
    """A run without the flag is refused by the server; the run with it trains."""
    server = RolloutServer(dense, folder / "server.txt", ["--torch_dtype", "bfloat16", *FP8]).start()
    try:
        environment = {API_KEY_VARIABLE: KEY}
        address = ["--vllm_mode", "server", "--vllm_server_base_url", server.wait().url]
        plain = megatron_rlhf(dense, dataset, folder / "plain", 1, address, environment)
        assert plain.code != 0
        assert "its --rollout_quantization is fp8, and that of this run is none" in plain.output
        check_run(megatron_rlhf(dense, dataset, folder / "served", 1, [*FLAGS, *address], environment))
    finally:
        server.stop()


def test_a_sync_leaves_what_an_engine_loads_at_its_start(folder: Path, dense: Path) -> None:
    check_syncs(dense, folder)
