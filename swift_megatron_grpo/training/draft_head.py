"""Trains the model's layer of multi-token prediction next to the policy, so that rollouts keep accepting its drafts.

A policy that changes leaves a frozen layer behind: it predicts what the first policy would have sampled. Here it learns
from the tokens that the policy samples: at each of them but the first of a text, the log-prob of the token under the
layer, which sees the hidden state of the token two places before and the embedding of the one between. Both are
detached, and so is the output layer, so the layer's loss changes nothing but the layer.

Its weights are frozen while the policy is wrapped, and are wrapped and updated by themselves. So the policy has the
buffers, gradient norm, clipping and update of a run without the layer, and the layer has its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from mcore_bridge import unwrap_model
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.training.head.logprob import frozen_log_probs
from swift_megatron_grpo.training.vision_tower import language_model


def freeze(models: Sequence[torch.nn.Module]) -> None:
    """Freeze the layers that predict, before the models are wrapped."""
    for model in models:
        language_model(model).mtp.requires_grad_(False)


class DraftHead:
    """The layer of one rank. Every rank has it, because there is one pipeline stage."""

    def __init__(self, models: Sequence[MegatronModule]) -> None:
        """`models`: the policy as wrapped for training (DDP), with the layer frozen."""
        [policy], [model] = models, unwrap_model(list(models))
        assert isinstance(policy, DistributedDataParallel)
        self._model = language_model(model)
        self._parallel = RankPosition.from_megatron()
        layers = self._model.mtp
        [self._layer] = layers.layers
        layers.requires_grad_(True)
        # The policy's wrapper sums the gradients of norms over tensor-parallel ranks, also of these. That comes before
        # `reduce_gradients`, which must not have begun then.
        ddp = replace(policy.ddp_config, overlap_grad_reduce=False, overlap_param_gather=False, bucket_size=None)
        self.wrapped = DistributedDataParallel(config=policy.config, ddp_config=ddp, module=layers)
        self._losses: list[torch.Tensor] = []

    def join(self, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> MegatronOptimizer:
        """Return an optimizer of policy and layer for this scheduler, which was made for that of the policy."""
        both = SeparatelyClipped(optimizer, get_megatron_optimizer(optimizer.config, [self.wrapped]))
        scheduler.optimizer = both
        scheduler.step(increment=0)  # sets the learning rate
        return both

    def start_step(self) -> None:
        self.wrapped.zero_grad_buffer()
        self._losses.clear()

    def reduce_gradients(self) -> None:
        """Average over data-parallel ranks, after Megatron has finished the policy's gradients."""
        self.wrapped.finish_grad_sync()

    def take_losses(self) -> list[torch.Tensor]:
        """Return this rank's share of the mean loss of the step for each of its micro batches."""
        losses, self._losses = self._losses, []
        return losses

    @contextmanager
    def learning(self, batch: MicroBatch, temperature: float) -> Iterator[None]:
        """Let the policy's backward pass also compute the layer's gradients, in a forward pass inside the context."""
        postprocess = self._model._postprocess

        def both(hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
            output: torch.Tensor = postprocess(hidden_states=hidden_states, **inputs)
            loss = self._loss(hidden_states, inputs, batch, temperature)
            self._losses.append(loss.detach())
            # Megatron's wrapper divides by the data-parallel ranks
            joined: torch.Tensor = _WithLoss.apply(output, loss * self._parallel.dp_size)
            return joined

        with replaced(self._model, "_postprocess", both):
            yield

    def _loss(
        self, hidden_states: torch.Tensor, inputs: dict[str, Any], batch: MicroBatch, temperature: float
    ) -> torch.Tensor:
        names = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin",
                 "packed_seq_params", "sequence_len_offset")  # fmt: skip
        states, *_ = self._layer(
            # Megatron's recomputation in backward finds what to differentiate by its inputs.
            hidden_states=hidden_states.detach().requires_grad_(),
            embedding=self._embed,
            **{name: inputs[name] for name in names},
        )
        rows, targets = batch.inputs.head_positions, batch.inputs.head_targets
        # The second token of a text is the first that has two before it; the row before belongs to another text.
        predicted = batch.inputs.position_ids.flatten().index_select(0, rows) > 0
        values = frozen_log_probs(states, (rows - 1).clamp(min=0), targets, self._model, temperature, self._parallel)
        tokens = max(batch.step.tokens + batch.step.sft_tokens, 1)
        return -(values * predicted).sum() / tokens

    @torch.no_grad()
    def _embed(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._model.embedding(input_ids=input_ids, position_ids=position_ids)
        return embedded


class _WithLoss(torch.autograd.Function):
    """Returns `output`; backward starts from `loss` as well."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.one = torch.ones_like(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, ctx.one


class SeparatelyClipped(ChainedOptimizer):
    """Two optimizers that save, load and move their states as one. Each clips its gradients by their own norm."""

    def __init__(self, policy: MegatronOptimizer, head: MegatronOptimizer) -> None:
        super().__init__([*_links(policy), *_links(head)])
        self._parts = policy, head

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Update both. Returns the policy's norm."""
        (updated, norm, zeros), (head_updated, _, _) = (part.step() for part in self._parts)
        return updated and head_updated, norm, zeros


def _links(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]
