"""A scheduler that answers all completions of a prompt as a tree, for --external_plugins.

The completions of a prompt share their first turn, and each pair of them the second one. ms-swift's TreePO example
works like this: its `async_infer` asks for one conversation for each prompt, and its `run` returns as many as branches.
"""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rollout import MultiTurnScheduler, multi_turns


@dataclass
class Branch:
    messages: list[dict[str, Any]]
    responses: list[list[int]] = field(default_factory=list)

    def fork(self, question: str) -> Branch:
        return Branch([*deepcopy(self.messages), {"role": "user", "content": question}], list(self.responses))


class Tree(MultiTurnScheduler):
    missing = 0  # branches

    async def async_infer(self, infer_requests: Any, request_config: Any, **options: Any) -> list[RolloutOutput]:
        self.width = len(infer_requests) - self.missing
        outputs: list[RolloutOutput] = await super().async_infer(infer_requests[:1], request_config, **options)
        return outputs

    async def run(self, infer_request: Any, request_config: Any, **_: Any) -> list[RolloutOutput]:
        root = infer_request.uuid
        last = {}

        async def answer(name: str, branch: Branch) -> Branch:
            request = RolloutInferRequest(messages=branch.messages, uuid=f"{root}-{name}")
            last[name] = await self.infer_engine.infer_async(request, request_config)
            choice = last[name].choices[0]
            assert len(choice.logprobs["content"]) == len(choice.token_ids)  # also without room for an answer
            # Tokens instead of their text, which the template might encode as others.
            messages = [*branch.messages, {"role": "assistant", "content": list(choice.token_ids)}]
            return Branch(messages, [*branch.responses, list(choice.token_ids)])

        first = await answer("a", Branch(infer_request.messages))
        names = [str(number) for number in range((self.width + 1) // 2)]
        second = await asyncio.gather(*(answer(name, first.fork(f"Pair {name}.")) for name in names))
        leaves = [(f"{place // 2}-{place % 2}", second[place // 2]) for place in range(self.width)]
        third = await asyncio.gather(*(answer(name, branch.fork(f"Leaf {name}.")) for name, branch in leaves))
        return [
            RolloutOutput(
                response=last[name],
                messages=leaf.messages,
                response_token_ids=leaf.responses,
                rollout_infos={"num_turns": 3, "leaf": name},
            )
            for (name, _), leaf in zip(leaves, third, strict=True)
        ]

    def step(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise AssertionError("run() does not call it")


multi_turns["tree"] = Tree
