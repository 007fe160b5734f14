"""The flags of `swift rollout` at start-up: defaults, limits, and what is refused before a model loads."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from swift.rollout import multi_turns

from swift_megatron_grpo.generation.server.arguments import _POSITIVE, LOOPBACK, GRPORolloutArguments
from tests.forking.client import free_port, run_script
from tests.paths import REPOSITORY

KEY = "a secret key"
ENGINE = {
    "status": {"max_model_len": 2**17, "images_per_prompt": 0, "recordings_per_prompt": 0, "videos_per_prompt": 0},
    "vocab_size": 300,
    "accepts_media": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    run_script(REPOSITORY / "scripts" / "make_tiny_model.py", "--out", folder)
    return folder


def server(model: Path, **flags: Any) -> GRPORolloutArguments:
    return GRPORolloutArguments(model=str(model), model_type="qwen3", template="qwen3", **flags)


def refusal(**flags: Any) -> str:
    """Return the error of flags that are checked before the model's files are read."""
    with pytest.raises(ValueError) as refused:
        GRPORolloutArguments(model="no/such/model", **flags)
    return str(refused.value)


def test_a_server_keeps_its_port_listens_on_loopback_and_hides_its_key(model: Path) -> None:
    port = free_port()
    arguments = server(model, port=port, api_key=KEY, max_requests=7)
    assert (arguments.host, arguments.port, arguments.vllm_use_async_engine) == (LOOPBACK, port, True)
    assert KEY not in repr(arguments) and not arguments.returns_experts
    assert (arguments.max_body_bytes, arguments.body_timeout, arguments.max_requests) == (2**26, 60, 7)
    assert (arguments.max_connections, arguments.idle_timeout) == (16384, 60)
    limits = arguments.content_limits(ENGINE)
    assert (limits.max_model_len, limits.vocab_size, limits.accepts_media, limits.images) == (2**17, 300, False, 0)
    assert (limits.nesting, limits.messages, limits.prompt_characters) == (32, 4096, 32 * 2**17)


def test_a_port_that_another_process_listens_on_is_refused(model: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: another process listens on it; use another port"):
            server(model, port=port)


def test_an_agent_that_cannot_run_is_refused() -> None:
    assert "use FILE.py:FUNCTION" in refusal(agent="nobody")
    assert "takes the place of --multi_turn_scheduler math" in refusal(agent="true", multi_turn_scheduler="math")


def test_an_agent_is_known_in_the_process_of_the_engine(model: Path, tmp_path: Path) -> None:
    """The process is spawned, and gets the arguments alone."""
    (tmp_path / "agents.py").write_text("async def spawned(row, base_url, api_key): ...")
    arguments = server(model, port=free_port(), agent=f"{tmp_path}/agents.py:spawned")
    assert (arguments.multi_turn_scheduler, arguments.use_gym_env) == ("spawned", True)
    del multi_turns["spawned"]
    arguments._import_external_plugins()
    assert multi_turns.pop("spawned").seconds == 600


@pytest.mark.parametrize("flag", _POSITIVE)
@pytest.mark.parametrize("value", [0, -1, float("inf")])
def test_a_limit_must_be_positive_and_finite(flag: str, value: float) -> None:
    assert (
        refusal(**{flag: value})
        == f"--{flag} must be > 0, got {value}; use --{flag} {_POSITIVE[flag]}, or leave it out"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"vllm_quantization": "fp8"}, "use --rollout_quantization fp8"),
        ({"vllm_speculative_config": '{"method": "ngram"}'}, "--vllm_speculative_config"),
        ({"vllm_engine_kwargs": '{"worker_cls": "x"}'}, "--vllm_engine_kwargs: worker_cls"),
        ({"vllm_engine_kwargs": "{worker_cls: x}"}, "is not JSON"),
    ],
)
def test_settings_that_would_change_the_policy_are_refused(flags: dict[str, Any], message: str) -> None:
    assert message in refusal(**flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_rollouts": "lossy"}, "--speculative_rollouts lossy: unknown value; use history or off"),
        ({"speculative_tokens": 0}, "must be at least 1 and at most 16, got 0; use --speculative_tokens 4"),
        ({"rollout_quantization": "fp8"}, "use --rollout_quantization none"),
        ({"vllm_data_parallel_size": 2}, "start a `swift rollout` for each, with --vllm_data_parallel_size 1"),
    ],
)
def test_drafts_that_are_not_served_are_refused(flags: dict[str, Any], message: str) -> None:
    assert message in refusal(**{"speculative_rollouts": "history", **flags})


def test_drafts_are_a_setting_of_the_engine(model: Path) -> None:
    drafted = server(model, port=free_port(), speculative_rollouts="history", speculative_tokens=3)
    assert drafted.drafts == 3
    assert drafted.vllm_engine_kwargs["speculative_config"]["num_speculative_tokens"] == 3
    plain = server(model, port=free_port())
    assert plain.drafts == 0 and "speculative_config" not in plain.vllm_engine_kwargs
