"""The flags of `swift rollout`: ms-swift's flags, with the defaults of a server that receives weights."""

import errno
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from swift.arguments import RolloutArguments
from swift.utils import import_external_file

from swift_megatron_grpo.generation.conversations.agent_flag import scheduler_of
from swift_megatron_grpo.generation.conversations.checks import check_multi_turn
from swift_megatron_grpo.generation.protocol.api_key import hide_in_process_list, read_api_key
from swift_megatron_grpo.generation.server.schema import ContentLimits, prompt_characters
from swift_megatron_grpo.generation.vllm.batch_invariance import batch_invariance
from swift_megatron_grpo.generation.vllm.engine_kwargs import (
    EXPERTS,
    FLAG,
    REFUSED_BY_SERVERS,
    parse_json_object,
    passed_on,
)
from swift_megatron_grpo.generation.vllm.model_packages import fault_of_packages
from swift_megatron_grpo.generation.vllm.second_runner import draft_settings, refusal_of_history
from swift_megatron_grpo.types import Quantization
from swift_megatron_grpo.weights.load.quantization import check_quantization, engine_settings, refusal_of_device

LOOPBACK = "127.0.0.1"
_MOST_DRAFTS = 16  # of a request in a step, as in the trainer
_POSITIVE = {  # flags with an example of a value
    "health_timeout": 360, "max_body_bytes": 2**26, "max_prompt_characters": 2**20, "max_messages": 4096,
    "max_nesting": 32, "max_requests": 16384, "max_connections": 16384, "body_timeout": 60, "idle_timeout": 60,
    "max_media_bytes": 2**31,
}  # fmt: skip


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class GRPORolloutArguments(RolloutArguments):
    vllm_use_async_engine: bool | None = None
    vllm_engine_kwargs: dict[str, Any] | str | None = None
    rollout_quantization: Quantization = _flag(
        "none",
        "fp8: vLLM generates with weights and activations in 8 bits, which it quantizes after every sync. The trainer "
        "must have the same flag. Default: none.",
    )
    batch_invariant: bool = _flag(
        False,
        "vLLM computes with kernels whose results do not depend on the other requests, and are slower. It needs a GPU "
        "of compute capability 9.0. Default: false, unless VLLM_BATCH_INVARIANT is 1.",
    )
    speculative_rollouts: Literal["off", "history"] = _flag(
        "off",
        "history: the same completions in fewer steps, as the trainer's flag of this name, which must be set as well. "
        "Drafts come from the prompt, its other requests, and what this server has completed since its start, in at "
        "most 256 MiB. Default: off.",
    )
    speculative_tokens: int = _flag(
        4, "With --speculative_rollouts history: the most drafts of a request in a step, as in the trainer. Default: 4."
    )
    agent: str | None = _flag(
        None,
        "The agent of each rollout, as the trainer's flag of this name in colocate. Its trainer needs "
        "--vllm_server_pass_dataset true. Default: none.",
    )
    host: str = LOOPBACK  # ms-swift listens on every interface by default
    port: int = 8000
    # not in the repr, which ms-swift logs
    api_key: str | None = field(
        default_factory=lambda: read_api_key(os.environ),
        repr=False,
        metadata={
            "help": "Key that every request must send, except those for /health. It is also read from "
            "SWIFT_ROLLOUT_API_KEY, or from the file that SWIFT_ROLLOUT_API_KEY_FILE names. A flag is visible in "
            "process lists until the server has started. Default: none."
        },
    )
    health_timeout: float = _flag(
        360.0,
        "Time in seconds in which the engine must generate a token. While no request is in progress, the server "
        "generates one from time to time. A server whose engine is stuck for longer ends with exit code 1. "
        "Default: 360.",
    )
    max_body_bytes: int = _flag(2**26, "Largest body of a request in bytes. Default: 67108864 (64 MiB).")
    max_media_bytes: int = _flag(
        2**31,
        "Memory in bytes for images that trainers have sent, as base64. Those used last are kept; others are sent "
        "again when they are needed. Default: 2147483648 (2 GiB).",
    )
    max_prompt_characters: int | None = _flag(
        None,
        "Largest prompt in characters, tools included. Default: 32 per token of --vllm_max_model_len, and at least "
        "1048576.",
    )
    max_messages: int = _flag(4096, "Most messages of one request. Default: 4096.")
    max_nesting: int = _flag(32, "Most levels of lists and objects in the body of a request. Default: 32.")
    max_requests: int = _flag(16384, "Most requests in progress; further ones get status 429. Default: 16384.")
    max_connections: int = _flag(16384, "Most connections; further ones are closed at once. Default: 16384.")
    body_timeout: float = _flag(60.0, "Time limit in seconds for a client to send a body. Default: 60.")
    idle_timeout: float = _flag(
        60.0, "Time in seconds after which a connection is closed on which no request has begun. Default: 60."
    )

    def __post_init__(self) -> None:
        """Keep the requested port, and check the flags.

        ms-swift takes the next free port if this one is busy, and treats a port as busy for a minute after a server on
        it was killed. A trainer waits for the restarted server on the same port.
        """
        for flag, example in _POSITIVE.items():
            value = getattr(self, flag)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{flag} must be > 0, got {value}; use --{flag} {example}, or leave it out")
        self._check_engine()
        self._check_drafts()
        if (fault := fault_of_packages(self.model, self.model_type)) is not None:
            raise ValueError(fault)
        if self.agent is not None:
            given = vars(self)["multi_turn_scheduler"]
            self.multi_turn_scheduler = scheduler_of(self.agent, given, self.gym_env, import_external_file)
            self.use_gym_env = vars(self)["use_gym_env"] is not False
        if self.api_key:
            hide_in_process_list(self.api_key)
        port = self.port
        super().__post_init__()
        self.port = port
        dtype = None if self.torch_dtype is None else str(self.torch_dtype).removeprefix("torch.")
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        device = refusal_of_device(capability, has_experts=False)  # on a CPU vLLM itself refuses experts
        check_quantization(self.rollout_quantization, self.vllm_enable_lora, dtype, device)
        self.batch_invariant = batch_invariance(self.batch_invariant, capability)
        settings = parse_json_object(FLAG, self.vllm_engine_kwargs)
        drafts = draft_settings(self.drafts, self.vllm_max_num_seqs, predicted=False)
        self.vllm_engine_kwargs = settings | engine_settings(self.rollout_quantization) | drafts
        check_multi_turn(self)
        if _is_port_taken(self.host, port):
            raise ValueError(f"--port {port}: another process listens on it; use another port, or stop that process")

    def _check_engine(self) -> None:
        """Refuse settings of vLLM that would change the policy that generates, as the trainer does in colocate."""
        settings = parse_json_object(FLAG, self.vllm_engine_kwargs)
        settings = passed_on(settings, self.vllm_enable_lora, vars(self), REFUSED_BY_SERVERS)
        if self.vllm_quantization is not None:
            raise ValueError(
                f"--vllm_quantization {self.vllm_quantization}: a server quantizes the weights that it receives; use "
                "--rollout_quantization fp8"
            )
        if self.vllm_speculative_config is not None:
            why = REFUSED_BY_SERVERS["speculative_config"]
            raise ValueError(f"--vllm_speculative_config {self.vllm_speculative_config}: {why}; leave it out")
        self.vllm_engine_kwargs = settings

    def _check_drafts(self) -> None:
        """Refuse what the trainer refuses with drafts; it also knows the model and the requests."""
        this, most = "--speculative_rollouts history", self.speculative_tokens
        if self.speculative_rollouts not in ("off", "history"):
            raise ValueError(f"--speculative_rollouts {self.speculative_rollouts}: unknown value; use history or off")
        if not 1 <= most <= _MOST_DRAFTS:
            raise ValueError(
                f"--speculative_tokens must be at least 1 and at most {_MOST_DRAFTS}, got {most}; use "
                "--speculative_tokens 4"
            )
        if not self.drafts:
            return
        if self.rollout_quantization != "none":
            raise ValueError(
                f"{this}: no test compares drafted completions of quantized weights yet; use --rollout_quantization "
                "none"
            )
        if self.vllm_data_parallel_size > 1:
            raise ValueError(
                f"{this}: vLLM reports what drafts did for the first of several replicas; start a `swift rollout` for "
                "each, with --vllm_data_parallel_size 1"
            )
        from vllm import __version__ as vllm_version  # takes seconds, and is read with drafts alone

        if problem := refusal_of_history(vllm_version, torch.cuda.is_available()):
            raise ValueError(f"{this}: {problem}; use --speculative_rollouts off")

    @property
    def drafts(self) -> int:
        """The most drafts of a request in a step; 0: none."""
        return self.speculative_tokens if self.speculative_rollouts == "history" else 0

    def _import_external_plugins(self) -> None:
        """Import what registers names, which ms-swift does again in the process of the engine."""
        super()._import_external_plugins()
        if self.agent is not None:
            scheduler_of(self.agent, None, None, import_external_file)

    def content_limits(self, engine_settings: Mapping[str, Any]) -> ContentLimits:
        """Return the limits on the content of a request, which depend on the engine."""
        max_model_len = engine_settings["status"]["max_model_len"]
        return ContentLimits(
            nesting=self.max_nesting,
            messages=self.max_messages,
            prompt_characters=prompt_characters(self.max_prompt_characters, max_model_len),
            max_model_len=max_model_len,
            vocab_size=engine_settings["vocab_size"],
            accepts_media=engine_settings["accepts_media"],
            images=engine_settings["status"]["images_per_prompt"],
            recordings=engine_settings["status"]["recordings_per_prompt"],
            videos=engine_settings["status"]["videos_per_prompt"],
        )

    @property
    def world_size(self) -> int:
        """The workers that receive weights."""
        return int(self.vllm_tensor_parallel_size * self.vllm_data_parallel_size)

    @property
    def returns_experts(self) -> bool:
        """True if the engine can report which experts its routers choose."""
        return bool(parse_json_object(FLAG, self.vllm_engine_kwargs).get(EXPERTS, False))

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
