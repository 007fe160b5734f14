"""Checks that the dispatcher of one rank computes the same without sorting, and that others keep sorting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from swift_megatron_grpo.training.moe.row_dispatch import skip_sorting

EXPERTS, K, HIDDEN, TOKENS = 6, 2, 8, 40


def layer(kind: type = MoEAlltoAllTokenDispatcher, **settings: Any) -> torch.nn.Module:
    """Return a layer that has nothing but a dispatcher, that of one rank with all experts."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=K,
        add_bias_linear=False, moe_ffn_hidden_size=HIDDEN, **settings,
    )  # fmt: skip
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=alone, expt_tp=alone, tp_ep=alone)
    built = MoELayer.__new__(MoELayer)
    torch.nn.Module.__init__(built)
    built.token_dispatcher = kind(EXPERTS, list(range(EXPERTS)), config=config, pg_collection=groups)
    return built


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, and their probabilities. No token goes to expert 1, many to expert 4."""
    scores = torch.randn(TOKENS, EXPERTS) + torch.tensor([0, -100, 0, 0, 2, 0])
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(K).indices, value=True)
    return chosen, scores.softmax(-1) * chosen


def run(dispatcher: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what the experts are given, the layer's output, and the gradients of tokens and probabilities."""
    torch.manual_seed(0)
    chosen, probabilities = routing()
    tokens = torch.randn(TOKENS, 1, HIDDEN).to(dtype).requires_grad_()
    probabilities.requires_grad_()
    sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, chosen, probabilities))
    received, counts, weights = dispatcher.dispatch_postprocess(*sent)
    assert counts.tolist() == chosen.sum(0).tolist()
    scale = torch.arange(1, EXPERTS + 1).repeat_interleave(counts.cpu())[:, None]
    computed = (received * scale * weights[:, None]).to(dtype)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(computed)))
    gradients = torch.autograd.grad(output, (tokens, probabilities), torch.randn(output.shape).to(dtype))
    return [received, weights, output, *gradients]


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an element per sort."""
    done: list[int] = []
    original = token_dispatcher.sort_chunks_by_idxs

    def counted(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done.append(len(tokens))
        return original(tokens, *args, **kwargs)

    monkeypatch.setattr(token_dispatcher, "sort_chunks_by_idxs", counted)
    return done


@pytest.mark.parametrize("fused", [False, True], ids=["loops", "moe_permute_fusion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_without_sorting_a_rank_with_all_experts_computes_the_same_bits(
    fused: bool, dtype: torch.dtype, sorts: list[int]
) -> None:
    whole = layer(moe_permute_fusion=fused)
    expected = run(whole.token_dispatcher, dtype)
    assert sorts == 2 * [TOKENS * K]
    skip_sorting(whole)
    for _ in range(2):  # a dispatcher keeps state from one pass to the next
        found = run(whole.token_dispatcher, dtype)
        assert len(sorts) == 2
        for value, right in zip(found, expected, strict=True):
            assert torch.equal(value, right) and value.dtype == right.dtype


@pytest.mark.parametrize("size", ["ep_size", "tp_size"])
def test_a_dispatcher_of_several_ranks_sorts(size: str) -> None:
    parallel = layer()
    setattr(parallel.token_dispatcher, size, 2)
    skip_sorting(parallel)
    assert parallel.token_dispatcher.num_local_experts == EXPERTS


def test_experts_that_are_padded_to_a_capacity_keep_their_number() -> None:
    padded = layer(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True)
    skip_sorting(padded)
    assert padded.token_dispatcher.num_local_experts == EXPERTS


def test_a_dispatcher_of_another_kind_keeps_its_experts() -> None:
    gathering = layer(MoEAllGatherTokenDispatcher)
    skip_sorting(gathering)
    assert gathering.token_dispatcher.num_local_experts == EXPERTS
