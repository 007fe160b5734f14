"""The flags of `swift rollout`: ms-swift's flags, with the defaults of a server that receives weights."""

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
    host: str = LOOPBACK  # ms-swift listens on every interface by default
    port: int = 8000
    api_key: str | None = field(default_factory=lambda: os.environ.get(API_KEY_VARIABLE))

    def __post_init__(self) -> None:
        """Keep the requested port, and check the flags.

        ms-swift takes the next free port if this one is busy, and treats a port as busy for a minute after a server on
        it was killed. A trainer waits for the restarted server on the same port.
        """
        port = self.port
        super().__post_init__()
        self.port = port
        check_multi_turn(
            self.multi_turn_scheduler,
            self.max_turns,
            self.use_gym_env,
            self.gym_env,
            schedulers=multi_turns,
            with_own_run=(),  # a server runs any scheduler
            environments=envs,
        )
        if _is_port_taken(self.host, port):
            raise ValueError(f"--port {port}: another process listens on it; use another port, or stop that process")

    def _set_default_engine_type(self) -> None:
        if self.vllm_use_async_engine is False:
            raise ValueError(
                "--vllm_use_async_engine false: this server receives requests one by one and batches them as they "
                "arrive, which needs the asynchronous engine; remove the flag, or set SWIFT_MEGATRON_GRPO=off to run "
                "ms-swift's own server"
            )
        self.vllm_use_async_engine = True
        super()._set_default_engine_type()

    def _check_device_count(self) -> None:
        """Skip ms-swift's check without accelerators, where vLLM's workers share the CPU."""
        if torch.accelerator.current_accelerator(check_available=True) is not None:
            super()._check_device_count()


def _is_port_taken(host: str, port: int) -> bool:
    """Return True if a process listens on the port. Lingering connections do not count: uvicorn can still listen."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
