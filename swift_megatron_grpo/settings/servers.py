"""vLLM: in the training processes (--vllm_mode colocate), or behind `swift rollout` (--vllm_mode server)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, Range, flag, rule
from swift_megatron_grpo.settings.layout import DataShape

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class RemoteTurnsConfig:
    """Requirements of this run on conversations that servers conduct. None: the server's setting applies."""

    requested_by: str | None  # flags that request several turns, as typed; None: there is no reward function
    scheduler: str | None = None
    max_turns: int | None = None
    gym_env: str | None = None


class Servers(Flags):
    """Addresses and time limits of rollout servers, and the conversations that they conduct; generation reads them."""

    vllm_mode: Literal["server", "colocate"] | None = flag(
        "colocate",
        "Where vLLM runs: in the training processes (colocate), or behind `swift rollout` (server). ms-swift "
        "has no default, and stops without one. Default: colocate.",
    )
    vllm_server_base_url: list[str] | None = None
    vllm_server_host: list[str] | None = None
    vllm_server_port: list[int] = field(default_factory=lambda: [DEFAULT_PORT])
    vllm_server_group_port: list[int] | int | None = None
    vllm_server_timeout: Annotated[float, Above(0, use=240)] = 240.0
    vllm_request_timeout: Annotated[float, Above(0, use=3600)] = flag(
        3600.0,
        "Time limit in seconds for a rollout server to complete one request or to load new weights; a "
        "request that exceeds it is resent to another server. It must be longer than the longest completion takes, "
        "time in the queue included; with several turns, longer than the longest conversation. Default: 3600.",
        example="7200",
    )
    vllm_server_pass_dataset: bool = False
    agent: str | None = flag(
        None,
        "The agent of each rollout (docs/agents.md). FILE.py:FUNCTION is a coroutine of a file. Anything else is a "
        "command, which gets the row as JSON on its standard input, and the address and the key of the policy in its "
        "environment. It sets --multi_turn_scheduler and, if left out, --use_gym_env true. With --vllm_mode server, "
        "give it to `swift rollout`. Default: none.",
        example="my_agent.py:my_agent",
    )
    multi_turn_scheduler: str | None
    max_turns: int | None
    gym_env: str | None
    use_gym_env: bool | None
    reward_funcs: list[Any]
    reward_model: list[str] | None
    rollout_replay: str | None

    @rule
    def flags_of_servers_need_servers(self) -> Faults:
        given = self.changed("vllm_server_")
        if given and not self.used:
            yield f"{given[0]} requires --vllm_mode server; set that as well, or leave {given[0]} out"

    @rule
    def addresses_are_complete(self) -> Faults:
        if not self.used:
            return
        hosts, ports = self.vllm_server_host or [], self.vllm_server_port
        if not self.vllm_server_base_url and not hosts:
            yield (
                "--vllm_mode server needs the address of a running `swift rollout`; use --vllm_server_host 127.0.0.1 "
                f"--vllm_server_port {DEFAULT_PORT}, or --vllm_server_base_url http://127.0.0.1:{DEFAULT_PORT}"
            )
        if not self.vllm_server_base_url and hosts and len(ports) != len(hosts):
            yield (
                f"--vllm_server_port has {len(ports)} values for the {len(hosts)} of --vllm_server_host; use one for "
                f"each host: --vllm_server_port {' '.join(str(ports[0]) for _ in hosts)}"
            )
        for port in [port for port in ports if not 0 < port < 2**16][:1]:
            yield f"--vllm_server_port {port} is not a port (1 to 65535); use --vllm_server_port {DEFAULT_PORT}"
        for url in self.urls if self.vllm_server_base_url else ():
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                yield (
                    f"--vllm_server_base_url {url} is not the address of a server; use the form "
                    f"http://HOST:{DEFAULT_PORT}"
                )
        for url in sorted({url for url in self.urls if self.urls.count(url) > 1}):
            yield f"the rollout server {url} is listed twice; list every server once"
        group_ports = len(_listed(self.vllm_server_group_port))
        if group_ports > 1 and group_ports != len(self.urls):
            yield (
                f"--vllm_server_group_port has {group_ports} values for {len(self.urls)} servers; use one for each, "
                "only the first one, or leave it out"
            )

    @rule
    def a_replay_needs_no_servers(self) -> Faults:
        if self.used and self.rollout_replay is not None:
            yield (
                f"--rollout_replay {self.rollout_replay} does not generate, so no server is needed; use --vllm_mode "
                "colocate, which does not start vLLM for a replay"
            )

    @property
    def used(self) -> bool:
        return self.vllm_mode == "server"

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the servers, without a trailing slash."""
        if self.vllm_server_base_url:
            return tuple(url.rstrip("/") for url in self.vllm_server_base_url)
        hosts = zip(self.vllm_server_host or [], self.vllm_server_port, strict=False)
        return tuple(f"http://{_url_host(host)}:{port}" for host, port in hosts)

    @property
    def group_ports(self) -> tuple[int, ...]:
        """One port per server, 0 for any free one; a single value is incremented per server, as in ms-swift."""
        ports = _listed(self.vllm_server_group_port)
        if len(ports) == 1:
            return tuple(ports[0] and ports[0] + i for i in range(len(self.urls)))
        return tuple(ports) or (0,) * len(self.urls)

    @property
    def turns(self) -> RemoteTurnsConfig | None:
        """Requirements on conversations that servers conduct; None: completions are single turns.

        Without a reward function only environments of the servers can grade, so completions are conversations. Scripts
        for ms-swift's trainer have only --vllm_server_pass_dataset; the other flags are on the server.
        """
        flags = ("multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env", "vllm_server_pass_dataset")
        given = {name: getattr(self, name) for name in flags}
        typed = " ".join(f"--{name} {str(v).lower() if v is True else v}" for name, v in given.items() if v) or None
        if not self.used or (typed is None and (self.reward_funcs or self.reward_model)):
            return None
        return RemoteTurnsConfig(typed, self.multi_turn_scheduler, self.max_turns, self.gym_env)


class ApiKey(Flags):
    """The key of the servers: in a class of its own, because no class with it may be written or printed."""

    vllm_server_api_key: str | None = flag(
        None,
        "The --api_key of the rollout servers. Servers and trainer also read it from the environment variable "
        "SWIFT_ROLLOUT_API_KEY, or from the file that SWIFT_ROLLOUT_API_KEY_FILE names. As a flag it is visible in "
        "process listings until the command has read it. It is never written to args.json. Default: none.",
        example="KEY",
    )


def _listed(ports: Iterable[int] | int | None) -> list[int]:
    return [ports] if isinstance(ports, int) else list(ports or [])


def _url_host(host: str) -> str:
    if host == "0.0.0.0":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


class Engine(Flags):
    """vLLM in the training processes; generation reads it."""

    vllm_mode: str | None
    vllm_gpu_memory_utilization: Annotated[float, Range(0, 0.5, high=1, above_low=True)] = 0.9
    vllm_tensor_parallel_size: int = 1
    vllm_max_model_len: int | None = None
    vllm_max_num_seqs: Annotated[int | None, AtLeast(1, use=256)] = None
    vllm_enforce_eager: bool = False
    vllm_enable_prefix_caching: bool = True
    vllm_disable_cascade_attn: bool = False
    vllm_limit_mm_per_prompt: Any = None
    vllm_mm_processor_cache_gb: Annotated[float | None, AtLeast(0, use=4)] = None
    vllm_engine_kwargs: Any = None
    sleep_level: int = 0
    offload_model: bool = False
    offload_optimizer: bool = False
    offload_grad: bool = False

    @rule
    def rows_fit_the_limits_of_media(self, rows: DataShape) -> Faults:
        # a kind that the flag does not name is not limited, and a server has its own limits
        limits = {} if self.vllm_mode == "server" else self.vllm_limit_mm_per_prompt or {}
        needed = {"image": rows.images, "video": rows.videos} | ({"audio": rows.recordings} if rows.recordings else {})
        for kind, number in needed.items():
            limit = limits.get(kind, number)  # a number, or with the sizes for which vLLM plans memory
            most = limit.get("count", number) if isinstance(limit, dict) else limit
            if most < number:
                yield (
                    f"--vllm_limit_mm_per_prompt allows {most} of {kind}, and a row of the dataset has {number}; use "
                    f"--vllm_limit_mm_per_prompt '{json.dumps(needed)}', or leave it out"
                )

    def notes(self) -> list[str]:
        """Return a note for the start-up log on flags without effect."""
        given, moved = self.changed(), self.changed("offload_")
        if given and self.vllm_mode == "server":
            server = "where the flags of `swift rollout` apply"
            return [f"{', '.join(given)}: without effect with --vllm_mode server, {server}"]
        if not moved or self.sleep_level:
            return []
        return [
            f"{', '.join(moved)}: nothing is offloaded once vLLM has started, because at --sleep_level 0 vLLM keeps "
            "its GPU memory; use --sleep_level 2 to let trainer and vLLM alternate"
        ]
