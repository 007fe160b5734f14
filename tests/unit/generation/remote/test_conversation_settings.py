"""Conversations behind servers: the server's command line against the trainer's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_megatron_grpo.config import RemoteTurnsConfig
from swift_megatron_grpo.generation.remote.conversation_settings import differences, disagreements
from swift_megatron_grpo.protocol.messages import ConversationSettings

THEIRS = ConversationSettings("gym_scheduler", max_turns=3, gym_env="riddles", use_gym_env=True)
OURS = RemoteTurnsConfig("--vllm_server_pass_dataset true")


def test_what_the_trainer_leaves_out_is_the_servers_to_decide() -> None:
    assert disagreements(None, None) == []
    assert disagreements(THEIRS, OURS) == []
    assert disagreements(THEIRS, replace(OURS, scheduler="gym_scheduler", max_turns=3, gym_env="riddles")) == []


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (None, RemoteTurnsConfig("--max_turns 3", max_turns=3),
         "without --multi_turn_scheduler, .* --multi_turn_scheduler NAME --max_turns 3, and --external_plugins"),
        (None, RemoteTurnsConfig("--multi_turn_scheduler a --gym_env e", "a", gym_env="e"),
         "start it with --multi_turn_scheduler a --gym_env e, .* leave --multi_turn_scheduler a --gym_env e out here"),
        (THEIRS, None, "add --multi_turn_scheduler gym_scheduler here"),
        (THEIRS, replace(OURS, scheduler="a"), "its --multi_turn_scheduler is gym_scheduler, and this run's is a"),
        (THEIRS, replace(OURS, gym_env="e"), "its --gym_env is riddles, and this run's is e"),
        (replace(THEIRS, max_turns=None), replace(OURS, max_turns=3), "its --max_turns is not set, and this"),
        (replace(THEIRS, scheduler="thinking_tips_scheduler"), OURS, "several samples of one request"),
    ],
)  # fmt: skip
def test_mismatches(theirs: ConversationSettings | None, ours: RemoteTurnsConfig | None, said: str) -> None:
    [told] = disagreements(theirs, ours)
    with pytest.raises(ValueError, match=said):
        raise ValueError(told)


def test_servers_of_one_run_lead_alike() -> None:
    assert differences({"http://a": THEIRS, "http://b": replace(THEIRS)}) == []
    [told] = differences({"http://a": THEIRS, "http://b": None})
    assert "http://a: --multi_turn_scheduler gym_scheduler --max_turns 3" in told and "http://b: not at all" in told
