"""Completions that no engine of this run can have generated are found, whatever is wrong with them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from swift_megatron_grpo.data.images import portable_images
from swift_megatron_grpo.generation.protocol.messages import Completion, InvalidMessage, SentSequence, ServerStatus
from swift_megatron_grpo.generation.remote.completion_checks import problem_of as _problem_of
from swift_megatron_grpo.settings.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.settings.servers import RemoteTurnsConfig
from tests.unit.arguments.test_server_checks import CONFIG, GYM, status

SAMPLING = SamplingConfig(1.0, 1.0, -1, 1.0, max_completion_length=4, stop_words=())
ONE_TURN = replace(CONFIG, model={"vocab_size": 300})
TURNS = replace(ONE_TURN, turns=RemoteTurnsConfig(None))
IMAGES = replace(TURNS, images=1)
COMPLETION = Completion([1, 2], [3, 299], [-0.5, 1e-6], "ab", "stop", 7)
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CONVERSATION = replace(
    COMPLETION, logprobs=[-0.5], sampled=[True, False], messages=MESSAGES, infos={"num_turns": 1, "total_reward": 0.5}
)
EARLIER = SentSequence([1], [5, 6], [-0.5], [False, True])

STATUS = asdict(status())


def problem_of(completion: Completion, run: ServerConfig) -> str | None:
    return _problem_of(completion, range(7, 8), 8, SAMPLING, run)


def test_a_valid_completion_and_a_valid_conversation_have_no_problem() -> None:
    assert problem_of(COMPLETION, ONE_TURN) is None
    assert problem_of(CONVERSATION, TURNS) is None
    several = replace(CONVERSATION, earlier=(EARLIER, EARLIER), infos={"num_turns": 3})
    assert problem_of(several, TURNS) is None and Completion.from_json(several.to_json()) == several
    assert problem_of(replace(CONVERSATION, infos={"num_turns": 1, "total_reward": float("nan")}), TURNS) is None
    unanswered = replace(CONVERSATION, completion_ids=[], sampled=[], logprobs=None)
    assert problem_of(unanswered, TURNS) is None


SPANS = [(7, 1), (9, 1)]


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        (SPANS, None),
        ([(7, 2)], None),
        ([], "their versions do not ascend from 7"),
        ([(8, 1), (9, 1)], "their versions do not ascend from 7"),
        ([(7, 1), (7, 1)], "their versions do not ascend from 7"),
        ([(7, 1), (9, 1), (8, 1)], "their versions do not ascend from 7"),
        ([(7, 1), (10, 1)], "its last weights have version 10, not 7 to 9"),
        ([(7, 1), (9, 2)], "they are not of 2 sampled tokens"),
        ([(7, 3), (9, -1)], "they are not of 2 sampled tokens"),
        ([(7, 2), (9, 0)], "they are not of 2 sampled tokens"),
    ],
)
def test_spans_are_of_all_sampled_tokens_and_of_weights_that_were_sent(spans: Any, problem: str | None) -> None:
    found = _problem_of(replace(COMPLETION, spans=spans), range(7, 10), 8, SAMPLING, ONE_TURN)
    assert found is None if problem is None else problem in str(found)
    conversation = replace(CONVERSATION, spans=[(7, 1)])  # one of its two tokens was sampled
    assert _problem_of(conversation, range(7, 10), 8, SAMPLING, TURNS) is None
    assert _problem_of(replace(conversation, spans=SPANS), range(7, 10), 8, SAMPLING, TURNS) is not None


@pytest.mark.parametrize(
    ("spans", "earlier", "problem"),
    [
        ([(8, 1)], None, None),
        (None, [(9, 1)], None),
        ([(8, 1)], [(7, 1)], None),
        ([(8, 1)], [(9, 1)], "their versions do not ascend from 7"),
        ([(7, 1)], [(6, 1)], "their versions do not ascend from 7"),
        ([(7, 1)], [(8, 2)], "they are not of 1 sampled tokens"),
        (None, [(10, 1)], "its last weights have version 10, not 7 to 9"),
    ],
)
def test_the_oldest_weights_are_of_any_sequence(spans: Any, earlier: Any, problem: str | None) -> None:
    several = replace(CONVERSATION, spans=spans, earlier=(replace(EARLIER, spans=earlier),), infos={"num_turns": 2})
    found = _problem_of(several, range(7, 10), 8, SAMPLING, TURNS)
    assert found is None if problem is None else problem in str(found)
    assert Completion.from_json(several.to_json()) == several


@pytest.mark.parametrize("spans", [[[7, True]], [[7, 1.0]], [[7]], [[7, 1, 1]], [["7", 1]], {"7": 1}, "71", [7, 1]])
def test_spans_of_another_type_are_refused(spans: Any) -> None:
    assert Completion.from_json(COMPLETION.to_json() | {"spans": [[7, 1], [9, 1]]}).spans == SPANS
    with pytest.raises(InvalidMessage):
        Completion.from_json(COMPLETION.to_json() | {"spans": spans})


def test_experts_of_all_tokens_but_the_last_are_accepted() -> None:
    expected = replace(ONE_TURN, model={"vocab_size": 300, "num_hidden_layers": 2})
    rows = np.zeros((3, 2, 2), np.uint8)
    assert problem_of(replace(COMPLETION, routed_experts=rows), expected) is None
    wrong = replace(COMPLETION, routed_experts=rows[:2])
    assert problem_of(wrong, expected) == "it has 2 rows of experts for 4 tokens"
    other = replace(COMPLETION, routed_experts=rows[:, :1])
    assert problem_of(other, expected) == "its experts are of 1 layers, not 2"
    assert problem_of(other, ONE_TURN) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"completion_ids": [3, 300]}, "a token is not in the vocabulary of 300"),
        ({"prompt_ids": [-1]}, "a token is not in the vocabulary of 300"),
        ({"prompt_ids": []}, "it has no prompt"),
        ({"completion_ids": [], "logprobs": []}, "it has no token"),
        ({"completion_ids": [3] * 5, "logprobs": [-1.0] * 5}, "it has 5 tokens, more than --max_completion_length 4"),
        ({"prompt_ids": [1] * 7}, "prompt and completion have 9 tokens, more than its vllm_max_model_len 8"),
        ({"logprobs": [-0.5]}, "it has 1 log-probs for 2 sampled tokens"),
        ({"logprobs": None}, "it has no log-probs"),
        ({"logprobs": [-0.5, float("nan")]}, "a log-prob is not finite, or above 0"),
        ({"logprobs": [-0.5, float("-inf")]}, "a log-prob is not finite, or above 0"),
        ({"logprobs": [-0.5, 0.1]}, "a log-prob is not finite, or above 0"),
        ({"finish_reason": "abort"}, "its finish_reason is 'abort'"),
        ({"weights_version": 6}, "its weights have version 6, not 7"),
        ({"spans": [(7, 1), (8, 1)]}, "its last weights have version 8, not 7"),
        ({"sampled": [True, True]}, "the fields of a conversation, which was not requested"),
        ({"earlier": (EARLIER,)}, "the fields of a conversation, which was not requested"),
        ({"infos": {"num_turns": 1}}, "the fields of a conversation, which was not requested"),
    ],
)
def test_an_impossible_completion_is_found(changes: dict[str, Any], problem: str) -> None:
    assert problem in str(problem_of(replace(COMPLETION, **changes), ONE_TURN))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampled": None, "logprobs": [-0.5, -0.5]}, "it has no mask of sampled tokens"),
        ({"sampled": [True]}, "its mask has 1 values for 2 tokens"),
        ({"sampled": [True, True]}, "it has 1 log-probs for 2 sampled tokens"),
        ({"messages": None}, "its messages are not those of a conversation"),
        ({"messages": [{"content": "a"}]}, "its messages are not those of a conversation"),
        ({"infos": {}}, "its infos have no num_turns"),
        ({"infos": {"num_turns": 1, "total_reward": "a"}}, "a total_reward that is not a number"),
        ({"earlier": (EARLIER,)}, "it has 2 sequences of 1 turns"),
        *(
            ({"infos": {"num_turns": 3}, "earlier": (EARLIER, replace(EARLIER, **wrong))}, problem)
            for wrong, problem in (
                ({"completion_ids": [300, 3]}, "a token is not in the vocabulary of 300"),
                ({"prompt_ids": []}, "it has no prompt"),
                ({"sampled": [True]}, "its mask has 1 values for 2 tokens"),
                ({"logprobs": [0.5]}, "a log-prob is not finite, or above 0"),
                ({"logprobs": None}, "it has no log-probs"),
            )
        ),
    ],
)
def test_an_impossible_conversation_is_found(changes: dict[str, Any], problem: str) -> None:
    assert problem in str(problem_of(replace(CONVERSATION, **changes), TURNS))


@pytest.mark.parametrize("images", [["/etc/hostname"], ["http://host/a.png"], ["YWJj"], ["é"], [None], [["a"]], "a", 1])
def test_a_conversation_shows_images_and_no_names_of_them(images: Any) -> None:
    """The trainer would open a path or a URL."""
    [png] = portable_images([Image.new("RGB", (2, 2))])
    for shown in ([], [png]):
        assert problem_of(replace(CONVERSATION, infos={"num_turns": 1, "images": shown}), IMAGES) is None
    named = replace(CONVERSATION, infos={"num_turns": 1, "images": images})
    assert "images that are not base64" in str(problem_of(named, IMAGES))
    assert problem_of(named, TURNS) is None  # a run on text ignores them


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_a_message_is_read_or_refused_with_one_kind_of_error(data: st.DataObject) -> None:
    """Whatever a server sends instead of some fields, or instead of the whole message."""
    for cls, valid in [(Completion, CONVERSATION.to_json()), (ServerStatus, STATUS)]:
        names = data.draw(st.lists(st.sampled_from(sorted(valid)), max_size=2))
        damaged = valid | {name: data.draw(JSON) for name in names}
        message = data.draw(st.just(damaged) | JSON)
        try:
            read = cls.from_json(message)
        except InvalidMessage:
            assert repr(message) != repr(valid)  # False is equal to 0
        else:
            assert isinstance(read, cls) and isinstance(message, dict)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"instance": 5}, "instance"),
        ({"model": []}, "model"),
        ({"run": 1.0}, "run"),
        ({"conversations": asdict(GYM) | {"max_turns": "3"}}, "max_turns"),
    ],
)
def test_a_status_with_a_field_of_another_type_is_refused(changes: dict[str, Any], field: str) -> None:
    assert ServerStatus.from_json(STATUS) == status()
    with pytest.raises(InvalidMessage, match=field):
        ServerStatus.from_json(STATUS | changes)
