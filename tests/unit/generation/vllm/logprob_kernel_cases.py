"""Compares the kernel of sampled log-probs and ranks with fp64: on a GPU, or on the CPU in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.unit.generation.vllm.logprob_kernel_cases     runs the cases
python -m tests.unit.generation.vllm.logprob_kernel_cases compile       compiles it for an H100 or H200, without a GPU
"""

from __future__ import annotations

import sys

import torch

from swift_megatron_grpo.generation.vllm import logprob_kernel
from swift_megatron_grpo.generation.vllm.logprob_kernel import sampled_logprobs


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.randn(rows, vocabulary + 3, device=device) * 5).to(dtype)[:, :vocabulary]  # rows are strided


def check(device: str) -> int:
    torch.manual_seed(0)
    cases = [(3, 10_000, torch.float32), (2, 4096, torch.bfloat16), (1, 1, torch.float32), (5, 77, torch.float32),
             (0, 50, torch.float32)]  # fmt: skip
    for rows, vocabulary, dtype in cases:
        logits = logits_of(rows, vocabulary, dtype, device)
        tokens = torch.randint(0, vocabulary, (rows,), device=device)
        if vocabulary > 100:  # as after top-k: most tokens are excluded, whole blocks of them among others
            logits[:, 60 : vocabulary - 9] = float("-inf")
            tokens.clamp_(max=59)
        if rows > 1:
            logits[0, 7:11] = logits[0, tokens[0]]  # equally probable tokens count as well
        exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])
        found, ranks = sampled_logprobs(logits, tokens)
        assert found.shape == (rows, 1) and found.dtype == torch.float32
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=2e-6), (rows, vocabulary, dtype)
        assert torch.equal(ranks, (logits >= logits.gather(1, tokens[:, None])).sum(-1)), (rows, vocabulary, dtype)
    return len(cases)


def compile_for_hopper(logits: str) -> None:
    """Compile for arguments as in a launch; the interpreter accepts much that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"logits": logits, "stride": "i32", "token_ids": "*i64", "logprobs": "*fp32", "ranks": "*i64",
                 "vocabulary": "i32", "LANES": "constexpr"}  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
    source = ASTSource(logprob_kernel._sampled_logprobs, signature, {"LANES": logprob_kernel._LANES}, aligned)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert "ld.global.v4" in text and ".local" not in text, "loads are not wide, or registers are spilled"


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_for_hopper("*fp32")
        compile_for_hopper("*bf16")
        print("compiled")
        sys.exit()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{check(device)} cases")
