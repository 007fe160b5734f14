"""`swift rollout` on separate GPUs: weights are sent over NCCL, and a killed server loses no completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.support.runs import REWARDS, SIZE_FOR_GPUS, Finished, make_dataset, make_model, megatron_rlhf
from tests.support.servers import KEY, RolloutServer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]


def make_server(folder: Path, gpus: str, *flags: str) -> RolloutServer:
    model = make_model(folder / "model", "dense", SIZE_FOR_GPUS)
    server_flags = ["--torch_dtype", "bfloat16", "--vllm_max_model_len", "512", *flags]
    return RolloutServer(model, folder / "server.txt", server_flags, environment={"CUDA_VISIBLE_DEVICES": gpus}).start()


def train(
    server: RolloutServer, folder: Path, gpus: str, steps: int, *flags: str,
    on_line: Callable[[str], object] | None = None,
) -> Finished:  # fmt: skip
    dataset = make_dataset(folder / "data.jsonl", rows=64)
    finished = megatron_rlhf(server.model, dataset, folder / "run", len(gpus.split(",")), [
        "--attention_backend", "fused", "--train_iters", str(steps), "--save_steps", "1000",
        "--global_batch_size", "32", "--max_completion_length", "128", "--lr", "1e-4",
        "--external_plugins", str(REWARDS), "--sync_check", "full",
        "--vllm_mode", "server", "--vllm_server_base_url", server.url, *flags],
        {"CUDA_VISIBLE_DEVICES": gpus, API_KEY_VARIABLE: KEY}, timeout=240, on_line=on_line)  # fmt: skip
    assert finished.code == 0, finished.output[-4000:] + server.log.read_text()[-2000:]
    assert len(finished.log) == steps
    for step in finished.log:
        assert step["rollout/k3_kl"] < 1e-3  # bf16 kernels of two engines; stale or missing weights give 0.01 to 1
    return finished


@pytest.mark.parametrize(("server_gpus", "trainer_gpus"), [("1", "0"), ("2,3", "0,1")], ids=["1+1", "tp2+tp2"])
def test_all_weights_arrive_bit_for_bit(tmp_path: Path, server_gpus: str, trainer_gpus: str) -> None:
    if len(server_gpus + trainer_gpus) > 2 and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    size = str(len(server_gpus.split(",")))
    with_graphs = ["--vllm_enforce_eager", "false"]
    server = make_server(tmp_path, server_gpus, "--vllm_tensor_parallel_size", size, *with_graphs)
    try:
        layout = ["--tensor_model_parallel_size", size, "--sequence_parallel", str(size != "1").lower()]
        finished = train(server, tmp_path, trainer_gpus, 6, *layout)
    finally:
        server.stop()
    assert " tensors bit for bit as they were sent" in finished.output
    assert "failed its check" not in finished.output


def test_an_adapter_is_sent_without_the_base_weights(tmp_path: Path) -> None:
    server = make_server(tmp_path, "1", "--vllm_enable_lora", "true")
    try:
        train(server, tmp_path, "0", 4, "--tuner_type", "lora", "--vllm_enable_lora", "true", "--sync_check", "canary")
    finally:
        server.stop()


def test_weights_are_resent_to_a_server_that_was_killed_and_restarted(tmp_path: Path) -> None:
    """NCCL does not detect that the other end is gone; the trainer must, and must neither hang nor exit."""
    server = make_server(tmp_path, "1")
    killed: list[float] = []

    def kill(line: str) -> None:
        if "may generate with weights 2" in line and not killed:
            killed.append(time.monotonic())
            server.kill()
            server.start()

    try:
        finished = train(server, tmp_path, "0", 5, on_line=kill)
    finally:
        server.stop()
    assert killed and "weights 2 were resent to servers that needed them" in finished.output
