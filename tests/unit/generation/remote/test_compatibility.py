"""Conflicts between the flags of a run and of its servers: conversations, and who holds the vision tower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_megatron_grpo.generation.protocol.messages import ConversationSettings
from swift_megatron_grpo.generation.remote.compatibility import (
    conflicts_between,
    conflicts_with_run,
)
from swift_megatron_grpo.settings.servers import RemoteTurnsConfig
from tests.unit.arguments.test_server_checks import status

SERVER = ConversationSettings("gym_scheduler", max_turns=3, gym_env="riddles", use_gym_env=True)
RUN = RemoteTurnsConfig("--vllm_server_pass_dataset true")


def test_settings_that_the_run_leaves_out_are_taken_from_the_server() -> None:
    assert conflicts_with_run(None, None) == []
    assert conflicts_with_run(SERVER, RUN) == []
    assert conflicts_with_run(SERVER, replace(RUN, scheduler="gym_scheduler", max_turns=3, gym_env="riddles")) == []


@pytest.mark.parametrize(
    ("server", "run", "message"),
    [
        (None, RemoteTurnsConfig("--max_turns 3", max_turns=3),
         "without --multi_turn_scheduler, .* --multi_turn_scheduler NAME --max_turns 3, and --external_plugins"),
        (None, RemoteTurnsConfig("--multi_turn_scheduler a --gym_env e", "a", gym_env="e"),
         "start it with --multi_turn_scheduler a --gym_env e, .* leave --multi_turn_scheduler a --gym_env e out here"),
        (None, RemoteTurnsConfig(None), "no reward function, .* use --reward_funcs here, or start it with --multi"),
        (SERVER, None, "add --multi_turn_scheduler gym_scheduler here"),
        (SERVER, replace(RUN, scheduler="a"), "its --multi_turn_scheduler is gym_scheduler, and this run's is a"),
        (SERVER, replace(RUN, gym_env="e"), "its --gym_env is riddles, and this run's is e"),
        (replace(SERVER, max_turns=None), replace(RUN, max_turns=3), "its --max_turns is not set, and this"),
    ],
)  # fmt: skip
def test_conflicts_with_the_run(
    server: ConversationSettings | None, run: RemoteTurnsConfig | None, message: str
) -> None:
    [conflict] = conflicts_with_run(server, run)
    with pytest.raises(ValueError, match=message):
        raise ValueError(conflict)


def test_all_servers_of_a_run_must_have_the_same_settings() -> None:
    one = status(conversations=SERVER)
    assert conflicts_between({"http://a": one, "http://b": status(conversations=replace(SERVER))}) == []
    [conflict] = conflicts_between({"http://a": one, "http://b": status()})
    assert "http://a: --multi_turn_scheduler gym_scheduler --max_turns 3" in conflict and "http://b: none" in conflict


def test_servers_that_are_alike_are_accepted() -> None:
    """A limit of 0 for videos alone changes no part of the model."""
    one, other = status(held_media=("image", "video")), status(held_media=("image",))
    assert conflicts_between({"http://a": one, "http://b": other}) == conflicts_between({"http://a": one}) == []


def test_servers_that_differ_are_refused_with_the_flag() -> None:
    [problem] = conflicts_between(
        {"http://a": status(held_media=("image", "audio")), "http://b": status(held_media=("audio",))}
    )
    assert "(http://a)" in problem and """--vllm_limit_mm_per_prompt '{"image": 0, "video": 0}'""" in problem
    [problem] = conflicts_between({"http://a": status(), "http://b": status(held_media=("audio",))})
    assert "audio part of the model (http://b)" in problem and """'{"audio": 0}'""" in problem
