"""The flags of `--vllm_mode server`: which servers, and what of them must be known before they are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

DEFAULT_PORT = 8000
_COLOCATE_ONLY = {
    # what of a vLLM in the training processes does not concern a server, with ms-swift's defaults
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
_SERVER_ONLY = {
    "vllm_server_base_url": None,
    "vllm_server_host": None,
    "vllm_server_port": [DEFAULT_PORT],
    "vllm_server_timeout": 240.0,
    "vllm_server_group_port": None,
    "vllm_server_api_key": None,
    "vllm_server_pass_dataset": False,
}
# which ask for several turns
_TURN_FLAGS = ("multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env", "vllm_server_pass_dataset")


def server_urls(base_urls: Sequence[str] | None, hosts: Sequence[str] | None, ports: Sequence[int]) -> tuple[str, ...]:
    """Without a slash at the end, and each once."""
    if base_urls:
        urls = [url.rstrip("/") for url in base_urls]
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(
                    f"--vllm_server_base_url {url} is no address of a server; give it as http://HOST:{DEFAULT_PORT}"
                )
    elif hosts:
        if len(ports) != len(hosts):
            raise ValueError(
                f"--vllm_server_port has {len(ports)} values for the {len(hosts)} of --vllm_server_host; give one for "
                f"each: --vllm_server_port {' '.join(str(ports[0]) for _ in hosts)}"
            )
        urls = [f"http://{_in_url(host)}:{port}" for host, port in zip(hosts, ports, strict=True)]
    else:
        raise ValueError(
            "--vllm_mode server: no server is named; use --vllm_server_host 127.0.0.1 --vllm_server_port "
            f"{DEFAULT_PORT}, or --vllm_server_base_url http://127.0.0.1:{DEFAULT_PORT}, of a running `swift rollout`"
        )
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise ValueError(f"the rollout server {twice[0]} is named twice; name each once")
    return tuple(urls)


def _in_url(host: str) -> str:
    if host == "0.0.0.0":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def group_ports(given: Sequence[int] | int | None, servers: int) -> tuple[int, ...]:
    """One per server, 0 for any; of a single value the others count up, as in ms-swift."""
    ports = [given] if isinstance(given, int) else list(given or [])
    if not ports:
        return (0,) * servers
    if len(ports) == 1:
        ports = [ports[0] + i for i in range(servers)]
    if len(ports) != servers:
        raise ValueError(
            f"--vllm_server_group_port has {len(ports)} values for {servers} servers; give one for each, the first "
            "one only, or leave it out"
        )
    return tuple(ports)


def check_mode(mode: str | None, values: Mapping[str, Any]) -> None:
    """Flags of servers without servers are a mistake."""
    if mode != "server":
        given = [flag for flag in _given(_SERVER_ONLY, values)]
        if given:
            raise ValueError(f"{given[0]} is for --vllm_mode server; set that as well, or leave {given[0]} out")


def turn_flags(values: Mapping[str, Any]) -> str | None:
    """The flags that ask a server for conversations, as typed. Scripts for ms-swift's trainer have
    --vllm_server_pass_dataset alone, and the others on the server."""
    return " ".join(f"--{flag} {_typed(values[flag])}" for flag in _TURN_FLAGS if values[flag]) or None


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_combinations(rollout_replay: str | None) -> None:
    """What servers are not for."""
    if rollout_replay is not None:
        raise ValueError(
            f"--rollout_replay {rollout_replay} generates nothing, so no server is asked; use --vllm_mode colocate, "
            "which then starts no vLLM"
        )


def notes(mode: str | None, values: Mapping[str, Any]) -> list[str]:
    """What is given and has no effect because the server decides it."""
    given = _given(_COLOCATE_ONLY, values) if mode == "server" else []
    if not given:
        return []
    return [f"{', '.join(given)}: for vLLM in the training processes; with --vllm_mode server, `swift rollout` decides"]


def _given(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    return [f"--{flag}" for flag, default in defaults.items() if values[flag] not in (default, {})]


def check_timeouts(server: float, request: float) -> None:
    for flag, value in (("vllm_server_timeout", server), ("vllm_request_timeout", request)):
        if value <= 0:
            raise ValueError(f"{flag} must be > 0 seconds, got {value}; use --{flag} 240")
