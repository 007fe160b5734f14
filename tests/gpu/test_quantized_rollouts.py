"""vLLM quantizes what is synced to the same bits as what it loads at its start, also after it has slept at level 2.

CUDA graphs are captured at the start and replayed after the syncs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.quantized_engines import check_syncs
from tests.support.runs import SIZE_FOR_GPUS, make_dataset, make_model, megatron_rlhf

_HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HAS_FP8, reason="needs a GPU with FP8")]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_sync_leaves_what_an_engine_loads_at_its_start(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / kind, kind, SIZE_FOR_GPUS)
    tensors = check_syncs(model, tmp_path)
    in_8_bits = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    suffixes = {".".join(name.split(".")[3:]) for name in in_8_bits}
    attention = {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}
    assert attention <= suffixes and not any("gate.weight" in name for name in suffixes)
    if kind == "dense":
        assert suffixes == attention | {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    else:
        assert sum("w13_weight" in name or "w2_weight" in name for name in suffixes) == 2
    kept = {name for name in tensors if "embed_tokens" in name or "norm" in name or "mlp.gate.weight" in name}
    assert kept and all(tensors[name].dtype == torch.bfloat16 for name in kept)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_run_trains(tmp_path: Path, kind: str, level: int) -> None:
    model = make_model(tmp_path / "model", kind, SIZE_FOR_GPUS)
    dataset = make_dataset(tmp_path / "data.jsonl", rows=64)
    run = megatron_rlhf(model, dataset, tmp_path / "run", 1, [
        "--rollout_quantization", "fp8", "--rollout_importance_sampling_mode", "token_truncate", "--sync_check", "full",
        "--attention_backend", "fused", "--vllm_enforce_eager", "false", "--sleep_level", str(level),
        "--train_iters", "6", "--save_steps", "1000", "--global_batch_size", "16", "--lr", "1e-4"])  # fmt: skip
    assert run.code == 0, run.output[-4000:]
    assert "before it quantized its linear layers" in run.output and "failed its check" not in run.output
    assert len(run.log) == 6
    for step in run.log:
        assert 0 < step["sync_check/mean_diff"] < 0.2 and step["rollout/k3_kl"] < 0.05
