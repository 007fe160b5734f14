"""Routers that do not choose: the experts of a pass are given, and the router only weighs them.

megatron-core's router asks the object in `router.router_replay` for its top k, if there is one. During a pass with a
given or recorded routing, that is an ExpertChoice. Gradients flow through the weights, as without it. Routing comes
before tokens are dispatched, so nothing here depends on expert parallelism.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from swift_megatron_grpo.runtime.parallel import RankPosition

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RoutingUnsupported(RuntimeError):
    """A router chooses experts without asking for them."""


def chosen_experts(
    scores: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor], given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and indices [rows, k] of the given experts; in rows of -1, of the experts that the router chose.

    `scores`: [rows, experts]. `own`: scores and indices of the router's own choice. `given`: [rows, k].
    """
    indices = torch.where(given[:, :1] < 0, own[1], given)
    return scores.gather(1, indices), indices


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

    def begin(self, given: torch.Tensor | None) -> None:
        """Begin the forward pass of a micro batch. `given`: [rows, k]; None: the router chooses."""
        self._given = given
        self._is_open = True
        self._was_asked = False

    def end(self) -> None:
        """End the forward pass of a micro batch."""
        self._given = None
        self._is_open = False

    def check_asked(self) -> None:
        """Raise RoutingUnsupported if the router has not asked for experts since `begin`."""
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
            values, indices = chosen_experts(scores, (values, indices), given.long())
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
        self._routers = {model: routers_of(model) for model in models}  # one model per virtual pipeline stage
        self._choices = {
            model: [ExpertChoice(router.layer_number - 1, trains, records) for router in routers]
            for model, routers in self._routers.items()
        }
        self._position = position

    @property
    def choices(self) -> list[ExpertChoice]:
        """Choices of all virtual pipeline stages."""
        return [choice for choices in self._choices.values() for choice in choices]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make the routers ask for their experts."""
        pairs = [
            pair for model, routers in self._routers.items() for pair in zip(routers, self._choices[model], strict=True)
        ]
        before: list[Any] = [router.router_replay for router, _ in pairs]
        for router, choice in pairs:
            router.router_replay = choice
        try:
            yield
        finally:
            for (router, _), original in zip(pairs, before, strict=True):
                router.router_replay = original

    @contextmanager
    def forward(self, model: nn.Module, routing: torch.Tensor | None) -> Iterator[None]:
        """Run the forward pass of one micro batch on one stage.

        `routing`: [l, layers, k] of the tokens of this context-parallel rank.
        """
        routers = self._routers[model]
        choices = self._choices[model]
        if routing is not None and routers and routers[0].config.sequence_parallel:
            routing = routing.chunk(self._position.tp_size)[self._position.tp_rank]
        for choice in choices:
            choice.begin(None if routing is None else routing[:, choice.layer])
        try:
            yield
            for choice in choices:
                choice.check_asked()
        finally:
            for choice in choices:
                choice.end()


def routers_of(model: nn.Module) -> list[TopKRouter]:
    """Return the routers of one virtual pipeline stage; with an adapter on them, those below it."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]
