"""Routers that do not choose: the experts of a pass are given, and the router only weighs them.

megatron-core's router asks the object in `router.router_replay` for its top k, if there is one. During a pass with a
given or recorded routing, that is an ExpertChoice. Gradients flow through the weights, as without it. Routing comes
before tokens are dispatched, so nothing here depends on expert parallelism.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from swift_megatron_grpo.packing.plan import Alignment, zigzag_positions
from swift_megatron_grpo.packing.routing import unpack_routing
from swift_megatron_grpo.packing.segments import lay_out
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.types import ExpertRows, Sample

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RoutingUnsupported(RuntimeError):
    """A router chooses experts without asking for them."""


class ExpertChoice:
    """The choices of one router in one pass."""

    def __init__(self, layer: int, trains: bool, records: bool) -> None:
        self.layer = layer  # from 0, of the whole model
        self.chosen: list[torch.Tensor] = []  # [rows, k] int32 of each micro batch, if they are recorded
        self._trains = trains
        self._records = records
        self._is_open = self._was_asked = False
        self._given: torch.Tensor | None = None  # [rows, k] of the micro batch in forward
        self._recomputed: deque[torch.Tensor | None] = deque()  # of micro batches that backward recomputes, in order

    @contextmanager
    def forward(self, given: torch.Tensor | None) -> Iterator[None]:
        """Run the forward pass of a micro batch, in which the router must ask. `given`: [rows, k]; None: it chooses."""
        self._given = given
        self._is_open = True
        self._was_asked = False
        try:
            yield
        finally:
            self._given = None
            self._is_open = False
        if not self._was_asked:
            raise RoutingUnsupported(
                f"the router of layer {self.layer} chooses experts in a way that cannot be replayed or recorded "
                "(a fused kernel, or sinkhorn); use --moe_router_fusion false and a --moe_router_load_balancing_type "
                "other than sinkhorn, or --router_replay_mode disabled"
            )

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and indices [rows, k]: the function that megatron-core calls."""
        assert default_compute_topk is not None
        self._was_asked = True
        values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self._next_given()
        if given is not None:
            if given.shape != indices.shape:
                raise ValueError(
                    f"layer {self.layer}: a routing of shape {list(given.shape)} was given, and its router chooses "
                    f"{list(indices.shape)}"
                )
            indices = torch.where(given[:, :1] < 0, indices, given.long())  # rows of -1: the router's own
            values = scores.gather(1, indices)
        if self._records:
            self.chosen.append(indices.to(torch.int32))  # NCCL does not send int16
        return values, indices

    def _next_given(self) -> torch.Tensor | None:
        """Return the experts of the micro batch that runs: in forward, or again in backward.

        A checkpointed layer runs without gradients in forward and again in backward, when no forward is open. Of one
        router, backward passes come in the order of forward passes, also in an interleaved pipeline.
        """
        if not self._is_open:
            if not self._recomputed:
                raise RoutingUnsupported(f"layer {self.layer} ran again in backward, but its forward had no checkpoint")
            return self._recomputed.popleft()
        if self._trains and not torch.is_grad_enabled():
            self._recomputed.append(self._given)
        return self._given


class PassRouters:
    """The routers of this rank in one pass."""

    def __init__(self, models: Sequence[nn.Module], position: RankPosition, trains: bool, records: bool) -> None:
        # Pairs of a router, with an adapter on it the one below, and its choice, by virtual pipeline stage.
        self._pairs = {
            model: [
                (module, ExpertChoice(module.layer_number - 1, trains, records))
                for module in model.modules()
                if isinstance(module, TopKRouter)
            ]
            for model in models
        }
        self._position = position

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make the routers ask for their experts."""
        with ExitStack() as stack:
            for router, choice in chain(*self._pairs.values()):
                stack.enter_context(replaced(router, "router_replay", choice))
            yield

    @contextmanager
    def forward(self, model: nn.Module, routing: torch.Tensor | None) -> Iterator[None]:
        """Run a micro batch on one stage. `routing`: [l, layers, k] of the tokens of this context-parallel rank."""
        pairs = self._pairs[model]
        if routing is not None and pairs and pairs[0][0].config.sequence_parallel:
            routing = routing.chunk(self._position.tp_size)[self._position.tp_rank]
        with ExitStack() as stack:
            for _, choice in pairs:
                stack.enter_context(choice.forward(None if routing is None else routing[:, choice.layer]))
            yield

    def rows_by_sample(
        self, assigned: Sequence[Sequence[int]], samples: Sequence[Sample], align: Alignment, share_prompts: bool
    ) -> dict[int, ExpertRows]:
        """Return the recorded rows of this data-parallel rank's samples: [t, layers, k], -1 in layers of other stages.

        `assigned`: the indices in `samples` of each micro batch. {} on a stage without experts. A collective among the
        ranks that hold parts of a sequence.
        """
        position = self._position
        pairs = list(chain(*self._pairs.values()))
        if not pairs:
            return {}
        config = pairs[0][0].config
        layers = [choice.layer for _, choice in pairs]
        rows: dict[int, ExpertRows] = {}
        for number, indices in enumerate(assigned):
            chosen = [samples[index] for index in indices]
            layout = lay_out(chosen, align, share_prompts)
            local = torch.stack([choice.chosen[number] for _, choice in pairs], dim=1)  # [l, layers of the stage, k]
            if config.sequence_parallel:
                local = torch.cat(_gathered(local, position.tp_group, position.tp_size))
            packed = _whole_sequences(local, layout.lengths, position).cpu()
            rows |= dict(zip(indices, unpack_routing(packed, layers, chosen, layout, config.num_layers), strict=True))
        return rows


def _whole_sequences(local: torch.Tensor, lengths: Sequence[int], position: RankPosition) -> torch.Tensor:
    """Gather the tokens of all context-parallel ranks: [l, ...] to [n, ...]."""
    if position.cp_size == 1:
        return local
    parts = _gathered(local, position.cp_group, position.cp_size)
    whole = local.new_empty((sum(lengths), *local.shape[1:]))
    for rank, part in enumerate(parts):
        whole[torch.tensor(zigzag_positions(lengths, rank, position.cp_size), device=local.device)] = part
    return whole


def _gathered(local: torch.Tensor, group: dist.ProcessGroup, size: int) -> list[torch.Tensor]:
    """Return the tensors of all ranks of a group, which have one shape."""
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts
