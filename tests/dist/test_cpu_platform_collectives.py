"""torch.distributed on the CPU platform as Megatron, accelerate and ms-swift use it; the stand-in's parallel layers.

All checks run in one torchrun of two ranks, which report the ones that failed. This file is also the ranks' script.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.forking.client import run_script

HEADS, GROUPS, CHANNELS = 4, 2, 8


def check_nccl_is_gloo() -> None:
    import torch.distributed as dist

    assert dist.get_backend() == "gloo"
    for backend in ("nccl", "cpu:gloo,cuda:nccl", None):
        group = dist.new_group([0, 1], backend=backend)
        assert dist.get_backend(group) == "gloo"
    dist.barrier(device_ids=[torch.cuda.current_device()])


def check_averages_and_coalesced_calls() -> None:
    """gloo supports these natively since torch 2.13; Megatron's gradient buffers rely on them."""
    import torch.distributed as dist
    from torch.distributed import _coalescing_manager

    rank = dist.get_rank()
    mean = torch.full((4,), float(rank), dtype=torch.bfloat16)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert torch.equal(mean, torch.full((4,), 0.5, dtype=torch.bfloat16))
    shards = [torch.zeros(2), torch.zeros(2)]
    with _coalescing_manager(dist.group.WORLD, async_ops=True) as handle:
        for shard in shards:
            dist.reduce_scatter_tensor(shard, torch.arange(4.0) + rank, op=dist.ReduceOp.AVG, async_op=True)
    handle.wait()
    expected = (torch.arange(4.0) + 0.5)[2 * rank : 2 * rank + 2]
    assert all(torch.equal(shard, expected) for shard in shards)


def check_all_gather_of_unequal_sizes() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    outputs = [torch.zeros(3, 2), torch.zeros(1, 2)]
    dist.all_gather(outputs, torch.full((3, 2), 1.0) if rank == 0 else torch.full((1, 2), 2.0))
    assert torch.equal(outputs[0], torch.ones(3, 2)) and torch.equal(outputs[1], torch.full((1, 2), 2.0))
    work = dist.all_gather(equal := [torch.zeros(2), torch.zeros(2)], torch.full((2,), float(rank)), async_op=True)
    work.wait()
    assert torch.equal(torch.cat(equal), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def check_accelerate_gathers() -> None:
    """accelerate.utils.gather returns its argument on a CPU unless the first PartialState was built for one."""
    import torch.distributed as dist
    from accelerate.utils import gather, gather_object

    rank = dist.get_rank()
    assert gather(torch.tensor([rank])).tolist() == [0, 1]
    assert gather_object([rank]) == [0, 1]


def check_a_sent_tensor_may_be_reused_at_once() -> None:
    """The interleaved pipeline frees the storage of a sent tensor before the receiver posts its receive."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import p2p_communication

    def communicate(**tensors: torch.Tensor) -> dict[str, dist.Work]:
        nothing = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"))
        neighbours = dict(prev_pipeline_rank=1 - dist.get_rank(), next_pipeline_rank=1 - dist.get_rank())
        return p2p_communication._p2p_ops(**{**nothing, **tensors}, **neighbours, group=group)

    group = dist.new_group([0, 1])
    sends = 100  # more than are buffered at once
    if dist.get_rank() == 0:
        sent = [torch.full((100_000,), float(index)) for index in range(sends)]
        handles = [communicate(tensor_send_next=tensor)["send_next"] for tensor in sent]
        for tensor in sent:
            tensor.fill_(-1.0)
        for handle in handles:
            handle.wait()
    else:
        time.sleep(0.5)
        received = [torch.empty(100_000) for _ in range(sends)]
        for tensor in received:
            communicate(tensor_recv_prev=tensor)["recv_prev"].wait()
        for index, tensor in enumerate(received):
            assert torch.equal(tensor, torch.full_like(tensor, float(index))), index


def check_tensor_parallel_linears() -> None:
    """Column then row, with and without sequence parallelism, match the whole weights on one rank."""
    import torch.distributed as dist
    import transformer_engine.pytorch as te

    group, rank = dist.group.WORLD, dist.get_rank()
    for sequence_parallel in (False, True):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, 2, 8, generator=generator)
        gamma, first = torch.rand(8, generator=generator), torch.randn(12, 8, generator=generator)
        second, bias = torch.randn(8, 12, generator=generator), torch.randn(8, generator=generator)
        upstream = torch.randn(6, 2, 8, generator=generator)
        whole = [tensor.clone().requires_grad_() for tensor in (x, gamma, first, second, bias)]
        normalized = torch.nn.functional.rms_norm(whole[0], (8,), whole[1], 1e-5)
        expected = torch.tanh(normalized @ whole[2].T) @ whole[3].T + whole[4]
        expected.backward(upstream)

        parallel = dict(sequence_parallel=sequence_parallel, tp_group=group, device="cpu")
        column = te.LayerNormLinear(8, 12, bias=False, normalization="RMSNorm", parallel_mode="column", **parallel)
        row = te.Linear(12, 8, parallel_mode="row", **parallel)
        with torch.no_grad():
            column.layer_norm_weight.copy_(gamma)
            column.weight.copy_(first.chunk(2)[rank])
            row.weight.copy_(second.chunk(2, dim=1)[rank])
            row.bias.copy_(bias)
        own = slice(3 * rank, 3 * rank + 3) if sequence_parallel else slice(None)
        local = x[own].clone().requires_grad_()
        y = row(torch.tanh(column(local)))
        torch.testing.assert_close(y, expected[own])
        y.backward(upstream[own])
        torch.testing.assert_close(local.grad, whole[0].grad[own])
        torch.testing.assert_close(column.weight.grad, whole[2].grad.chunk(2)[rank])
        torch.testing.assert_close(row.weight.grad, whole[3].grad.chunk(2, dim=1)[rank])
        for replicated, reference in ((column.layer_norm_weight, whole[1]), (row.bias, whole[4])):
            assert replicated.sequence_parallel is sequence_parallel  # if so, Megatron sums its gradient over the group
            if sequence_parallel:
                dist.all_reduce(replicated.grad)
            torch.testing.assert_close(replicated.grad, reference.grad)


def zigzag(tensor: torch.Tensor, cu_seqlens: list[int], rank: int) -> torch.Tensor:
    """Return chunks `rank` and `3 - rank` of 4 of every sequence [begin, end) along dimension 0."""
    parts = [tensor[begin:end].chunk(4) for begin, end in pairwise(cu_seqlens)]
    return torch.cat([torch.cat([chunks[rank], chunks[3 - rank]]) for chunks in parts])


def check_context_parallel_attention() -> None:
    """Outputs and gradients match one rank: thd with and without padding, sbhd; causal, full, windowed, sink."""
    import torch.distributed as dist
    import transformer_engine.pytorch as te

    group, rank = dist.group.WORLD, dist.get_rank()
    rooms, lengths = torch.tensor([0, 16, 24, 32]), torch.tensor([0, 13, 18, 26])
    packed = dict(qkv_format="thd", cu_seqlens_q=rooms.int(), cu_seqlens_kv=rooms.int())
    padded = dict(
        qkv_format="thd", cu_seqlens_q=lengths.int(), cu_seqlens_kv=lengths.int(),
        cu_seqlens_q_padded=rooms.int(), cu_seqlens_kv_padded=rooms.int(),
    )  # fmt: skip
    cases = [
        (packed, "padding_causal", {}, {}),
        (packed, "padding", {}, {}),
        (padded, "padding_causal", {}, {}),
        (padded, "padding", {}, {}),
        (packed, "padding_causal", dict(window_size=(3, 0)), {}),
        (packed, "padding_causal", {}, dict(softmax_type="off-by-one")),
        (dict(qkv_format="sbhd"), "causal", {}, {}),
        (dict(qkv_format="sbhd"), "no_mask", {}, {}),
    ]
    for layout, mask_type, arguments, constructor in cases:
        packed_layout = layout["qkv_format"] == "thd"
        tokens = 32 if packed_layout else 16
        batch = (tokens,) if packed_layout else (tokens, 2)
        boundaries = rooms.tolist() if packed_layout else [0, tokens]

        def own(tensor: torch.Tensor, boundaries: list[int] = boundaries) -> torch.Tensor:
            return zigzag(tensor, boundaries, rank)

        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(*batch, heads, CHANNELS, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
        upstream = torch.randn(*batch, HEADS * CHANNELS, generator=generator)
        attention = te.DotProductAttention(HEADS, CHANNELS, num_gqa_groups=GROUPS, **constructor)
        arguments = dict(layout, attn_mask_type=mask_type, **arguments)
        whole = [tensor.clone().requires_grad_() for tensor in inputs]
        expected = attention(*whole, **arguments)
        expected.backward(upstream)

        attention.set_context_parallel_group(group, [0, 1], None, "p2p")
        local = [own(tensor).clone().requires_grad_() for tensor in inputs]
        actual = attention(*local, **arguments)
        actual.backward(own(upstream))
        torch.testing.assert_close(actual, own(expected), atol=1e-6, rtol=1e-5)
        for tensor, reference in zip(local, whole, strict=True):
            torch.testing.assert_close(tensor.grad, own(reference.grad), atol=1e-6, rtol=1e-5)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("collectives")
    printed = run_script(Path(__file__), output, ranks=2, kind="upstream")
    assert printed.count("the CPU platform uses gloo in place of nccl") == 1
    return {**json.loads((output / "0").read_text()), **json.loads((output / "1").read_text())}


@pytest.mark.dist
@pytest.mark.parametrize("check", CHECKS)
def test_a_collective_check_passes_on_two_ranks(failures: dict[str, str], check: str) -> None:
    assert check not in failures, failures[check]


def main(output: Path) -> None:
    from swift_megatron_grpo.platforms.cpu import activate

    activate()
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    failures = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()
        dist.barrier()
    (output / str(dist.get_rank())).write_text(json.dumps(failures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
