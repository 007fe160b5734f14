"""Conversations of several turns in the training processes: the scheduler and the environments live in each engine's
first rank, and the other ranks of the engine are told what to generate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch.distributed as dist
from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rl_core.data import OnPolicySample
from swift.template import Template
from swift.utils import remove_response

from swift_megatron_grpo.config import MultiTurnConfig, SamplingConfig, VllmConfig
from swift_megatron_grpo.generation.engine import Request
from swift_megatron_grpo.generation.local import LocalVllm
from swift_megatron_grpo.generation.multi_turn import Finished, converse, make_scheduler
from swift_megatron_grpo.generation.requests import request_config
from swift_megatron_grpo.types import Prompt, Rollout


class ConversingVllm(LocalVllm):
    def __init__(self, config: VllmConfig, turns: MultiTurnConfig, template: Template) -> None:
        template = copy(template)
        template.max_length = None  # it is the prompt's, and would cut the conversation: max_model_len bounds that
        super().__init__(config, template)
        self._scheduler = make_scheduler(turns, template)
        self._max_turns = turns.max_turns
        size = config.tensor_parallel_size
        self._engine_ranks = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None
        self._first_rank = dist.get_rank() // size * size

    def _complete(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        if not self.share.speaks:
            self._follow(sampling)
            return []

        def infer(asked: list[RolloutInferRequest]) -> list[RolloutOutput]:
            self._lead(asked)
            return self._infer(asked, sampling)

        prompts = [request.prompt for request in requests]
        finished = converse(_conversations(prompts), self._scheduler, self._max_turns, infer, self._has_room)
        self._lead(None)
        return [_rollout(*each, self._weights_version) for each in zip(prompts, finished, strict=True)]

    def _infer(self, requests: list[RolloutInferRequest], sampling: SamplingConfig) -> list[RolloutOutput]:
        answers: list[RolloutOutput] = self._engine.infer(requests, request_config(sampling), use_tqdm=False)
        return answers

    def _follow(self, sampling: SamplingConfig) -> None:
        while (requests := self._lead(None)) is not None:
            self._infer(requests, sampling)

    def _lead(self, requests: list[RolloutInferRequest] | None) -> list[RolloutInferRequest] | None:
        """From the engine's first rank to its others."""
        if self._engine_ranks is not None:
            box = [requests]
            dist.broadcast_object_list(box, src=self._first_rank, group=self._engine_ranks)
            requests = box[0]
        return requests

    def _has_room(self, request: RolloutInferRequest) -> bool:
        length: int = self._engine._get_num_tokens(self._engine.template.encode(request))
        return length + self._engine.max_tokens_offset < self._engine.max_model_len


def _conversations(prompts: Sequence[Prompt]) -> list[RolloutInferRequest]:
    """With all of the dataset's columns, and a name of its own for each: environments are kept by it."""
    drawn: Counter[str] = Counter()
    requests = []
    for prompt in prompts:
        sample = OnPolicySample.from_row(prompt.row)  # a copy
        remove_response(sample.messages)
        request: Any = sample.to_infer_request(include_extra=True)
        request.uuid = f"{prompt.prompt_id}-{drawn[prompt.prompt_id]}"
        drawn[prompt.prompt_id] += 1
        requests.append(request)
    return requests


def _rollout(prompt: Prompt, finished: Finished, version: int) -> Rollout:
    conversation = finished.conversation
    return Rollout(
        prompt=prompt,
        prompt_ids=conversation.prompt_ids,
        completion_ids=conversation.completion_ids,
        logprobs=conversation.logprobs,
        text=finished.messages[-1]["content"],
        finish_reason=finished.finish_reason,
        weights_version=version,
        sampled=conversation.sampled,
        messages=finished.messages,
        infos={**finished.infos, **({"lost_turns": conversation.lost_turns} if conversation.lost_turns else {})},
    )
