"""Adapters on all experts of a large model are more tensors than Transformer Engine's kernels take in one call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEP = """
import sys
import torch
from transformer_engine.pytorch.optimizers import FusedAdam, multi_tensor_applier, multi_tensor_l2norm
from swift_megatron_grpo.training.upstream_fixes.multi_tensor_kernels import bound_tensor_handles

if sys.argv[1] == "fixed":
    bound_tensor_handles()
count = 25_000
ours, torchs = ([torch.nn.Parameter(torch.full((2,), 1.0, device="cuda")) for _ in range(count)] for _ in range(2))
for index, pair in enumerate(zip(ours, torchs)):
    for parameter in pair:
        parameter.grad = torch.full((2,), float(1 + index % 7), device="cuda")
norm, _ = multi_tensor_applier(
    multi_tensor_l2norm, torch.zeros(1, dtype=torch.int, device="cuda"), [[p.grad for p in ours]], False
)
torch.testing.assert_close(norm[0], torch.linalg.vector_norm(torch.cat([p.grad for p in ours])))
FusedAdam(ours, lr=1e-2).step()
torch.optim.AdamW(torchs, lr=1e-2, weight_decay=0.0).step()
torch.testing.assert_close(torch.cat(list(ours)), torch.cat(list(torchs)))
"""


def step(fixed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", STEP, fixed], capture_output=True, text=True)


def test_adam_and_the_norm_take_any_number_of_tensors() -> None:
    done = step("fixed")
    assert done.returncode == 0, done.stderr[-2000:]


def test_upstream_has_too_few_handles() -> None:
    assert "Cannot allocate a new NVTETensor" in step("plain").stderr, "see multi_tensor_kernels.py"
