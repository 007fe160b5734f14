"""Sends the hidden state of a token once to each GPU that has some of its experts, and sorts it only where needed.

Both are part of --fast_kernels. Megatron's alltoall dispatcher sends a row for each pair of a token and an expert, also
where a GPU has several of a token's experts. On four H200 with adapters of Qwen3-30B-A3B these transfers were 1.53 of
the 3.9 s of a GPU's kernels (benchmarks/h200/parts/moe-30b-a3b-lora-ep4-before-kernels.txt). A token has 8 of 128
experts there, on 3.6 of 4 GPUs, so that 6 rows leave a GPU where 2.7 would do; with two GPUs 4 where 1 would do.

Here a row is sent once to a GPU, with the router's scores of that GPU's experts, 4 bytes each. The receiver copies it
for each expert, and adds their outputs before they are sent back. Sums are the same in another order. In bf16 the sum
of a GPU's experts is rounded a second time, as in DeepEP.

n tokens of this rank, g expert-parallel ranks, e experts of a rank, h hidden size, s rows that this rank sends,
r rows that it receives, p pairs of a received row and an expert of this rank.

Tests: tests/dist/test_row_dispatch.py, tests/unit/training/moe/test_expert_chunks.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher

ABSENT = -1.0  # the score of an expert that a token does not go to; no router computes it


def _layers_of(model: torch.nn.Module) -> Iterator[MoELayer]:
    """Yield layers of experts that tensor parallelism does not divide, with tokens that are not padded."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            plain = type(dispatcher) is MoEAlltoAllTokenDispatcher and not dispatcher.drop_and_pad
            if plain and dispatcher.tp_size == 1:
                yield module


def send_rows_once(model: torch.nn.Module) -> None:
    """Replace the dispatchers of layers whose experts are on several GPUs."""
    for layer in _layers_of(model):
        dispatcher = layer.token_dispatcher
        config = dispatcher.config
        # Shared experts are computed while tokens are sent.
        special = dispatcher.shared_experts is not None or config.fp8 or config.fp4 or config.cuda_graph_impl != "none"
        if dispatcher.ep_size > 1 and not special:
            layer.token_dispatcher = RowDispatcher(dispatcher)


def skip_sorting(model: torch.nn.Module) -> None:
    """Skip sorting tokens by expert where they arrive in that order, because one rank alone sends them.

    Megatron's alltoall dispatcher orders the tokens of a rank by expert and sends them. A receiver holds a chunk per
    sender and expert, and sorts the chunks by expert; megatron-core up to 0.19.2 does so even with one sender, and
    copies all routed tokens four times per layer. On an H200 that was 38 of the 880 ms of GPU kernels of a step (12
    layers, 64 experts, 8 per token, hidden size 2,048, 51k tokens), and its maps another 9.5 ms.

    The dispatcher sorts only if its `num_local_experts` is above 1. Without a second rank it reads the number nowhere
    else, but for experts that are padded to a capacity. tests/contract/test_megatron_seam.py lists all places.
    """
    for layer in _layers_of(model):
        if layer.token_dispatcher.ep_size == 1:
            layer.token_dispatcher.num_local_experts = 1


@dataclass(frozen=True, slots=True)
class _Routing:
    """The rows of one layer that ranks exchange."""

    to_ranks: torch.Tensor  # [n, g] bool
    sent: list[int]  # [g] rows
    received: list[int]  # [g] rows
    tokens_per_expert: list[int]  # [e] of this rank


class RowDispatcher(MoETokenDispatcher):
    """The dispatcher of one layer. Megatron calls its methods one after the other, and passes only rows from each."""

    def __init__(self, upstream: MoEAlltoAllTokenDispatcher) -> None:
        groups = SimpleNamespace(ep=upstream.ep_group, expt_tp=upstream.tp_group, tp_ep=upstream.tp_ep_group)
        super().__init__(upstream.config, groups)
        self._fused = upstream.config.moe_permute_fusion
        self._shape: torch.Size  # of the layer's input
        self._routing: _Routing
        self._add_ranks: Callable[[torch.Tensor], torch.Tensor]  # [s, h] -> [n, h]
        self._add_experts: Callable[[torch.Tensor], torch.Tensor]  # [p, h] -> [r, h]

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows to send, [s, h], sorted by rank, and the scores of that rank's experts, [s, e]."""
        self._shape = hidden_states.shape
        routing = self._routing = self._exchange_counts(routing_map)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        sent, _, places, *_ = permute(rows, routing.to_ranks, num_out_tokens=sum(routing.sent), fused=self._fused)
        self._add_ranks = partial(
            unpermute, sorted_indices=places, restore_shape=rows.shape, routing_map=routing.to_ranks, fused=self._fused
        )
        return sent, _scores_by_rank(probs, routing_map, routing)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send both. Return what this rank receives: [r, h] and [r, e]."""
        sent = self._routing.sent
        received = self._routing.received
        rows, scores = (all_to_all(self.ep_group, values, received, sent) for values in (hidden_states, probs))
        return rows, scores

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the copies of rows, [p, h], sorted by expert, their number for each expert, [e], and their scores."""
        tokens_per_expert = self._routing.tokens_per_expert
        to_experts = probs.detach() != ABSENT  # [r, e]
        fused = self._fused and len(hidden_states) > 0  # Transformer Engine's gradients of nothing are wrong
        copies, scores, places, *_ = permute(
            hidden_states,
            to_experts,
            probs=probs.masked_fill(~to_experts, 0),
            num_out_tokens=sum(tokens_per_expert),
            fused=fused,
        )
        self._add_experts = partial(
            unpermute, sorted_indices=places, restore_shape=hidden_states.shape, routing_map=to_experts, fused=fused
        )
        return copies, torch.tensor(tokens_per_expert), scores

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add the outputs of this rank's experts, [p, h], for each received row: [r, h]."""
        return self._add_experts(hidden_states)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send the sums back: [s, h]."""
        sums: torch.Tensor = all_to_all(self.ep_group, hidden_states, self._routing.sent, self._routing.received)
        return sums

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add the sums of all ranks, in the shape of the layer's input."""
        output = self._add_ranks(hidden_states).view(self._shape)
        del self._shape, self._routing, self._add_ranks, self._add_experts  # autograd has what backward needs
        return output

    def _exchange_counts(self, routing_map: torch.Tensor) -> _Routing:
        """Exchange how many rows each rank will receive, and how many of them each of its experts has."""
        by_rank = routing_map.reshape(len(routing_map), self.ep_size, -1)  # [n, g, e]
        to_ranks = by_rank.any(-1)
        mine = torch.cat([to_ranks.sum(0)[:, None], by_rank.sum(0)], 1)  # [g, 1 + e]
        theirs = torch.empty_like(mine)
        torch.distributed.all_to_all_single(theirs, mine, group=self.ep_group)
        numbers = torch.cat([mine[:, 0], theirs[:, 0], theirs[:, 1:].sum(0)]).tolist()  # the only wait for the GPU
        sent = numbers[: self.ep_size]
        received = numbers[self.ep_size : 2 * self.ep_size]
        return _Routing(to_ranks, sent, received, numbers[2 * self.ep_size :])


def _scores_by_rank(probs: torch.Tensor, routing_map: torch.Tensor, routing: _Routing) -> torch.Tensor:
    """Return for each row to send the scores of the experts of the rank that it goes to, [s, e]."""
    tokens, ranks = routing.to_ranks.shape
    marked = probs.masked_fill(~routing_map, ABSENT).view(tokens, ranks, -1)
    by_rank = marked.transpose(0, 1).reshape(ranks * tokens, -1)
    chosen = torch.nonzero_static(routing.to_ranks.T.reshape(-1), size=sum(routing.sent))
    return by_rank.index_select(0, chosen[:, 0])
