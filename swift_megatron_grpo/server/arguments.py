"""The flags of `swift rollout`: ms-swift's, with the defaults that a server of weights and completions should have."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, field

import torch
from swift.arguments import RolloutArguments
from swift.rollout import envs, multi_turns

from swift_megatron_grpo.conversations.checks import check_multi_turn
from swift_megatron_grpo.protocol.messages import API_KEY_VARIABLE

LOOPBACK = "127.0.0.1"


@dataclass
class GRPORolloutArguments(RolloutArguments):
    vllm_use_async_engine: bool | None = None
    host: str = LOOPBACK  # ms-swift's default is every interface
    port: int = 8000
    api_key: str | None = field(default_factory=lambda: os.environ.get(API_KEY_VARIABLE))

    def __post_init__(self) -> None:
        """ms-swift takes the next port when this one is busy, and it counts a port as busy for a minute after a server
        on it was killed. A trainer waits for the server where it was."""
        port = self.port
        super().__post_init__()
        self.port = port
        check_multi_turn(
            self.multi_turn_scheduler,
            self.max_turns,
            self.use_gym_env,
            self.gym_env,
            schedulers=multi_turns,
            led_by_run=(),  # a server leads by any
            environments=envs,
        )
        if _somebody_listens(self.host, port):
            raise ValueError(f"--port {port}: another process listens on it; use another one, or end that process")

    def _set_default_engine_type(self) -> None:
        if self.vllm_use_async_engine is False:
            raise ValueError(
                "--vllm_use_async_engine false: requests come one by one and are batched as they come, which is the "
                "asynchronous engine's way; leave it out, or set SWIFT_MEGATRON_GRPO=off for ms-swift's own server"
            )
        self.vllm_use_async_engine = True
        super()._set_default_engine_type()

    def _check_device_count(self) -> None:
        """On a machine without accelerators vLLM's workers share the processor, and ms-swift counts no device."""
        if torch.accelerator.current_accelerator(check_available=True) is not None:
            super()._check_device_count()


def _somebody_listens(host: str, port: int) -> bool:
    """A listener may take a port that connections of before still hold, and uvicorn does."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
