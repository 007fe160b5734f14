"""vLLM: in the training processes (--vllm_mode colocate), or behind `swift rollout` (--vllm_mode server)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from swift_megatron_grpo.settings.config import RemoteTurnsConfig
from swift_megatron_grpo.settings.facts import DataShape
from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, Range, flag, rule

DEFAULT_PORT = 8000
# flags of servers, with the values at which they say nothing
_SILENT: Mapping[str, Any] = {
    "vllm_server_base_url": None,
    "vllm_server_host": None,
    "vllm_server_port": [DEFAULT_PORT],
    "vllm_server_timeout": 240.0,
    "vllm_server_group_port": None,
    "vllm_server_pass_dataset": False,
}


@dataclass(frozen=True, kw_only=True)
class Servers(Flags):
    """Addresses and time limits of rollout servers, and the conversations that they conduct; generation reads them."""

    vllm_mode: Literal["server", "colocate"] | None = flag(
        "colocate",
        "Where vLLM runs: in the training processes (colocate), or behind `swift rollout` (server). ms-swift "
        "has no default, and stops without one. Default: colocate.",
    )
    vllm_server_base_url: list[str] | None
    vllm_server_host: list[str] | None
    vllm_server_port: list[int]
    vllm_server_group_port: list[int] | int | None
    vllm_server_timeout: Annotated[float, Above(0, use=240)]
    vllm_request_timeout: Annotated[float, Above(0, use=3600)] = flag(
        3600.0,
        "Time limit in seconds for a rollout server to complete one request or to load new weights; a "
        "request that exceeds it is resent to another server. It must be longer than the longest completion takes, "
        "time in the queue included; with several turns, longer than the longest conversation. Default: 3600.",
        example="7200",
    )
    vllm_server_pass_dataset: bool
    multi_turn_scheduler: str | None
    max_turns: int | None
    gym_env: str | None
    use_gym_env: bool | None
    reward_funcs: list[Any]
    rollout_replay: str | None

    @rule
    def flags_of_servers_need_servers(self) -> Faults:
        given = [f"--{name}" for name, silent in _SILENT.items() if getattr(self, name) not in (silent, {})]
        if given and not self.used:
            yield f"{given[0]} requires --vllm_mode server; set that as well, or leave {given[0]} out"

    @rule
    def addresses_are_complete(self) -> Faults:
        if self.used:
            yield from self._faults_of_urls()
            yield from _faults_of_group_ports(self.vllm_server_group_port, len(self.urls))

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
            return tuple(ports[0] + i for i in range(len(self.urls)))
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
        if not self.used or (typed is None and self.reward_funcs):
            return None
        return RemoteTurnsConfig(typed, self.multi_turn_scheduler, self.max_turns, self.gym_env)

    def _faults_of_urls(self) -> Faults:
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


@dataclass(frozen=True, kw_only=True)
class ApiKey(Flags):
    """The key of the servers: in a class of its own, because no class with it may be written or printed."""

    vllm_server_api_key: str | None = flag(
        None,
        "The --api_key of the rollout servers. Servers and trainer also read it from the environment variable "
        "SWIFT_ROLLOUT_API_KEY, or from the file that SWIFT_ROLLOUT_API_KEY_FILE names. As a flag it is visible in "
        "process listings until the command has read it. It is never written to args.json. Default: none.",
        example="KEY",
    )


def _faults_of_group_ports(given: list[int] | int | None, servers: int) -> Faults:
    ports = _listed(given)
    if len(ports) > 1 and len(ports) != servers:
        yield (
            f"--vllm_server_group_port has {len(ports)} values for {servers} servers; use one for each, only the "
            "first one, or leave it out"
        )


def _listed(ports: Iterable[int] | int | None) -> list[int]:
    return [ports] if isinstance(ports, int) else list(ports or [])


def _url_host(host: str) -> str:
    if host == "0.0.0.0":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


# flags of a vLLM inside the training processes, with ms-swift's defaults
_OF_ENGINE: Mapping[str, Any] = {
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_tensor_parallel_size": 1,
    "vllm_max_model_len": None,
    "vllm_max_num_seqs": None,
    "vllm_enforce_eager": False,
    "vllm_enable_prefix_caching": True,
    "vllm_disable_cascade_attn": False,
    "vllm_limit_mm_per_prompt": None,
    "vllm_mm_processor_cache_gb": None,
    "vllm_engine_kwargs": None,
    "sleep_level": 0,
    "offload_model": False,
    "offload_optimizer": False,
    "offload_grad": False,
}


@dataclass(frozen=True, kw_only=True)
class Engine(Flags):
    """vLLM in the training processes; generation reads it."""

    vllm_mode: str | None
    vllm_gpu_memory_utilization: Annotated[float, Range(0, 0.5, high=1, above_low=True)]
    vllm_tensor_parallel_size: int
    vllm_max_model_len: int | None
    vllm_max_num_seqs: Annotated[int | None, AtLeast(1, use=256)]
    vllm_enforce_eager: bool
    vllm_enable_prefix_caching: bool
    vllm_disable_cascade_attn: bool
    vllm_limit_mm_per_prompt: Any
    vllm_mm_processor_cache_gb: Annotated[float | None, AtLeast(0, use=4)]
    vllm_engine_kwargs: Any
    sleep_level: int
    offload_model: bool
    offload_optimizer: bool
    offload_grad: bool

    @rule
    def rows_fit_the_limit_of_images(self, rows: DataShape) -> Faults:
        # a kind that the flag does not name is not limited, and a server has its own limit
        limits = None if self.vllm_mode == "server" else self.vllm_limit_mm_per_prompt
        if limits is not None and limits.get("image", rows.images) < rows.images:
            yield (
                f"--vllm_limit_mm_per_prompt allows {limits['image']} images, and a row of the dataset has "
                f"{rows.images}; use --vllm_limit_mm_per_prompt "
                f"""'{{"image": {rows.images}, "video": 0}}', or leave it out"""
            )

    def notes(self) -> list[str]:
        """Return a note for the start-up log on flags without effect."""
        given = [f"--{name}" for name, silent in _OF_ENGINE.items() if getattr(self, name) not in (silent, {})]
        moved = [f"--{name}" for name in ("offload_model", "offload_optimizer", "offload_grad") if getattr(self, name)]
        if given and self.vllm_mode == "server":
            server = "where the flags of `swift rollout` apply"
            return [f"{', '.join(given)}: without effect with --vllm_mode server, {server}"]
        if not moved or self.sleep_level:
            return []
        return [
            f"{', '.join(moved)}: nothing is offloaded once vLLM has started, because at --sleep_level 0 vLLM keeps "
            "its GPU memory; use --sleep_level 2 to let trainer and vLLM alternate"
        ]
