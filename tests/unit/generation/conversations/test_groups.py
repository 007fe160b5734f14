"""Schedulers that answer all completions of a prompt: each conversation has the turns that led to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rollout import multi_turns

from swift_megatron_grpo.generation.conversations.groups import answers_groups, members, turns_of
from swift_megatron_grpo.generation.conversations.running import Conversations, NoRoom, current
from swift_megatron_grpo.generation.conversations.turns import Turn
from swift_megatron_grpo.generation.interface import Share
from swift_megatron_grpo.generation.protocol.messages import Completion, InvalidRequest
from tests.support.tree import Tree
from tests.unit.generation.conversations.answering import USER, Engine

FIRST = RolloutInferRequest(messages=[dict(USER)], uuid="7-0")


class TreeEngine(Engine):
    """Has no room for prompts with one of these texts."""

    without_room = frozenset[str]()

    async def _batch_infer_stream(self, conversations: Sequence[Any], *_: Any) -> list[Any]:
        return await asyncio.gather(*conversations)

    async def infer_async(self, request: RolloutInferRequest, config: RequestConfig, **options: Any) -> Any:
        if request.messages[-1]["content"] in self.without_room:
            turns = current.get()
            assert turns is not None

            async def infer(_: RequestConfig) -> Any:
                raise NoRoom

            return await turns.generate(request, config, infer, frozenset())
        return await super().infer_async(request, config, **options)


def complete(engine: TreeEngine, width: int, scheduler: type[Tree] = Tree, logprobs: bool = True) -> list[Completion]:
    async def main() -> list[Completion]:
        conversations = Conversations(scheduler(infer_engine=engine, tokenizer=engine))
        sampling = RequestConfig(max_tokens=9, logprobs=logprobs, seed=5)
        return await conversations.complete_group(members(FIRST, width), sampling)

    return asyncio.run(main())


def test_each_conversation_has_the_turns_of_its_branch() -> None:
    engine = TreeEngine()
    completions = complete(engine, 4)
    assert len(engine.requests) == 1 + 2 + 4  # what branches begin with is generated once
    # prompt, first answer, "Pair 0." or "Pair 1.", second answer, "Leaf 0-0." and so on, third answer
    expected = [[101, 7, 102, 9, 104], [101, 7, 102, 9, 105], [101, 7, 103, 9, 106], [101, 7, 103, 9, 107]]
    for completion, tokens in zip(completions, expected, strict=True):
        assert completion.prompt_ids == [len(USER["content"])] and completion.completion_ids == tokens
        assert completion.sampled == [True, False, True, False, True]
        assert completion.logprobs == [-1.0] * 3 and completion.infos["num_turns"] == 3
        assert [message["role"] for message in completion.messages or ()] == ["user", "assistant"] * 3
    seeds = [config.seed for config in engine.sampling]
    assert len(set(seeds)) == len(seeds)


def test_the_engine_may_have_no_room_for_one_branch() -> None:
    engine = TreeEngine()
    engine.without_room = frozenset({"Leaf 0-1."})
    completions = complete(engine, 4)
    assert completions[1].completion_ids == [101, 7, 102] and completions[1].finish_reason == "length"
    assert completions[1].logprobs == [-1.0] * 2
    assert [len(each.completion_ids) for each in completions] == [5, 3, 5, 5]


def test_a_scheduler_may_read_log_probs_that_the_run_does_not_need() -> None:
    """TreePO's branches where they are low."""

    class Reads(Tree):
        async def run(self, infer_request: Any, request_config: Any, **options: Any) -> Any:
            return await super().run(infer_request, replace(request_config, logprobs=True), **options)

    engine = TreeEngine()
    completions = complete(engine, 2, Reads, logprobs=False)
    assert all(config.logprobs for config in engine.sampling)
    assert all(completion.logprobs is None for completion in completions)
    engine = TreeEngine()
    complete(engine, 2, logprobs=False)
    assert not any(config.logprobs for config in engine.sampling)


def test_a_scheduler_that_repeats_a_turn_without_room_is_ended() -> None:
    class Repeats(Tree):
        async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
            await self.infer_engine.infer_async(infer_request, request_config)
            longer = replace(infer_request, messages=[*infer_request.messages, {"role": "user", "content": "More."}])
            while (await self.infer_engine.infer_async(longer, request_config)).choices[0].finish_reason == "length":
                pass

    engine = TreeEngine()
    engine.without_room = frozenset({"More."})
    with pytest.raises(RuntimeError, match="another turn of a conversation that has no room left"):
        complete(engine, 4, Repeats)


def test_a_scheduler_must_return_as_many_as_completions() -> None:
    class TooFew(Tree):
        missing = 1

    with pytest.raises(InvalidRequest, match=r"3 conversations for the 4 completions of a prompt; .*--num_generations"):
        complete(TreeEngine(), 4, TooFew)


def test_tokens_that_no_turn_sampled_are_refused() -> None:
    class Rewrites(Tree):
        async def run(self, *arguments: Any, **options: Any) -> Any:
            outputs = await super().run(*arguments, **options)
            outputs[1].response_token_ids[2] = [5]
            return outputs

    with pytest.raises(ValueError, match="1 tokens that the engine did not sample"):
        complete(TreeEngine(), 4, Rewrites)


def output_of(chain: Sequence[Turn], *responses: list[int]) -> Any:
    """Return what a scheduler returns of these turns; `responses`: with other tokens than theirs."""
    last = SimpleNamespace(prompt_token_ids=chain[-1].prompt_ids)
    return SimpleNamespace(response=last, response_token_ids=responses or [turn.completion_ids for turn in chain])


@pytest.mark.parametrize("texts", [([8], [9]), ([9, 9], [9]), ([9], [9, 9])])
def test_equal_answers_to_different_texts_are_told_apart(texts: tuple[list[int], list[int]]) -> None:
    """Two branches ask another question after the same answer, and get the same answers."""
    root = Turn([1], [2], [-0.1])
    branches = []
    for text in texts:
        second = Turn([1, 2, *text], [4], [-0.2])
        branches.append([root, second, Turn([*second.tokens, 7], [5], [-0.3])])
    recorded = [root, *(turn for pair in list(zip(*branches, strict=True))[1:] for turn in pair)]
    for chain in (*branches, branches[0][:2], branches[1][:2]):
        assert turns_of(output_of(chain), recorded) == chain


def test_equal_answers_are_told_apart_by_what_they_follow() -> None:
    """Two branches sample the same second answer after different first ones."""
    first, other = Turn([1], [2], [-0.1]), Turn([1], [3], [-0.2])
    after_first, after_other = Turn([1, 2, 9], [4], [-0.3]), Turn([1, 3, 9], [4], [-0.4])
    recorded = [first, other, after_first, after_other]
    for chain in ([first, after_first], [other, after_other]):
        assert turns_of(output_of(chain), recorded) == chain


def test_equal_answers_are_told_apart_by_their_depth() -> None:
    """A branch that is ahead samples in its second turn what another one samples in its first, after it."""
    first, deeper = Turn([1], [2], [-0.1]), Turn([1, 2, 9], [4], [-0.2])
    own, after_own = Turn([1], [4], [-0.3]), Turn([1, 4, 9], [5], [-0.4])
    even_deeper, behind_own = Turn([1, 4, 9, 5, 9], [6], [-0.5]), Turn([1, 4, 9], [6], [-0.6])
    recorded = [first, deeper, own, after_own, even_deeper, behind_own]
    for chain in ([first, deeper], [own, after_own, even_deeper], [own, behind_own]):
        assert turns_of(output_of(chain), recorded) == chain


def test_a_response_may_begin_with_the_prefix_of_the_template() -> None:
    """ms-swift's `run` puts it before the tokens of each turn. It is the end of the prompt."""
    first, second = Turn([1, 8], [2], [-0.1]), Turn([1, 8, 2, 9, 8], [3], [-0.2])
    output = output_of([first, second], [8, 2], [8, 3])
    assert turns_of(output, [first, second]) == [first, second]
    whole = Turn([1, 8], [8, 2], [-0.3, -0.4])  # nothing before it is a prefix
    assert turns_of(output, [first, whole, second])[0] == whole
    with pytest.raises(ValueError, match="2 tokens that the engine did not sample"):
        turns_of(output, [Turn([1, 7], [2], [-0.1])])


def test_schedulers_of_groups_are_known_by_their_own_async_infer() -> None:
    assert multi_turns["tree"] is Tree and answers_groups("tree")
    assert not any(map(answers_groups, {*multi_turns} - {"tree"})) and not answers_groups(None)
    assert not answers_groups("of a server alone")


def test_members_have_ids_of_their_own_and_share_the_prompt() -> None:
    requests = members(replace(FIRST, data_dict={"seen": []}), 3)
    assert [request.uuid for request in requests] == ["7-0", "7-1", "7-2"]
    assert all(request.messages == FIRST.messages for request in requests)
    requests[0].data_dict["seen"].append(1)  # a scheduler may keep its state there
    assert [request.data_dict["seen"] for request in requests] == [[1], [], []]
    assert len({id(request.messages[0]) for request in requests}) == 3  # which a scheduler may change


@pytest.mark.parametrize(("groups", "engines"), [(4, 2), (3, 2), (1, 2), (5, 3)])
def test_one_engine_answers_a_whole_group(groups: int, engines: int) -> None:
    requests = [(group, place) for group in range(groups) for place in range(4)]
    picked = [Share(index, engines, True, whole_groups=True).pick(requests, 4) for index in range(engines)]
    assert [request for part in picked for request in part] == requests
    assert all(len(part) % 4 == 0 for part in picked)
    assert max(map(len, picked)) - min(map(len, picked)) <= 4
