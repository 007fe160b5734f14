"""Checks of the flags of `--vllm_mode server`: addresses, ports, timeouts and combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from swift_megatron_grpo.arguments.advice import typed_value

DEFAULT_PORT = 8000
_COLOCATE_ONLY = {
    # flags of a vLLM inside the training processes, with ms-swift's defaults
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
# flags that request several turns
_TURN_FLAGS = ("multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env", "vllm_server_pass_dataset")


def server_urls(base_urls: Sequence[str] | None, hosts: Sequence[str] | None, ports: Sequence[int]) -> tuple[str, ...]:
    """Return the addresses of the servers, without a trailing slash. Raises if one is invalid or listed twice."""
    if base_urls:
        urls = [url.rstrip("/") for url in base_urls]
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(
                    f"--vllm_server_base_url {url} is not the address of a server; use the form "
                    f"http://HOST:{DEFAULT_PORT}"
                )
    elif hosts:
        if len(ports) != len(hosts):
            raise ValueError(
                f"--vllm_server_port has {len(ports)} values for the {len(hosts)} of --vllm_server_host; use one for "
                f"each host: --vllm_server_port {' '.join(str(ports[0]) for _ in hosts)}"
            )
        wrong = [port for port in ports if not 0 < port < 2**16]
        if wrong:
            raise ValueError(
                f"--vllm_server_port {wrong[0]} is no port (1 to 65535); use --vllm_server_port {DEFAULT_PORT}"
            )
        urls = [f"http://{_url_host(host)}:{port}" for host, port in zip(hosts, ports, strict=True)]
    else:
        raise ValueError(
            "--vllm_mode server needs the address of a running `swift rollout`; use --vllm_server_host 127.0.0.1 "
            f"--vllm_server_port {DEFAULT_PORT}, or --vllm_server_base_url http://127.0.0.1:{DEFAULT_PORT}"
        )
    duplicates = sorted({url for url in urls if urls.count(url) > 1})
    if duplicates:
        raise ValueError(f"the rollout server {duplicates[0]} is listed twice; list every server once")
    return tuple(urls)


def _url_host(host: str) -> str:
    if host == "0.0.0.0":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def group_ports(given: Sequence[int] | int | None, servers: int) -> tuple[int, ...]:
    """Return one port per server, 0 for any free one; a single value is incremented per server, as in ms-swift."""
    ports = [given] if isinstance(given, int) else list(given or [])
    if not ports:
        return (0,) * servers
    if len(ports) == 1:
        ports = [ports[0] + i for i in range(servers)]
    if len(ports) != servers:
        raise ValueError(
            f"--vllm_server_group_port has {len(ports)} values for {servers} servers; use one for each, only the "
            "first one, or leave it out"
        )
    return tuple(ports)


def check_mode(mode: str | None, values: Mapping[str, Any]) -> None:
    """Refuse flags of servers in another mode."""
    if mode != "server":
        given = [flag for flag in _given(_SERVER_ONLY, values)]
        if given:
            raise ValueError(f"{given[0]} requires --vllm_mode server; set that as well, or leave {given[0]} out")


def turn_flags(values: Mapping[str, Any]) -> str | None:
    """Return the flags that request conversations from a server, as typed; None if there are none.

    Scripts for ms-swift's trainer have only --vllm_server_pass_dataset; the other flags are on the server.
    """
    return " ".join(f"--{flag} {typed_value(values[flag])}" for flag in _TURN_FLAGS if values[flag]) or None


def check_combinations(rollout_replay: str | None) -> None:
    """Refuse flags that exclude servers."""
    if rollout_replay is not None:
        raise ValueError(
            f"--rollout_replay {rollout_replay} does not generate, so no server is needed; use --vllm_mode colocate, "
            "which does not start vLLM for a replay"
        )


def start_up_notes(mode: str | None, values: Mapping[str, Any]) -> list[str]:
    """Return a note for the start-up log on flags without effect, because the server has its own."""
    given = _given(_COLOCATE_ONLY, values) if mode == "server" else []
    if not given:
        return []
    return [f"{', '.join(given)}: without effect with --vllm_mode server, where the flags of `swift rollout` apply"]


def _given(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    return [f"--{flag}" for flag, default in defaults.items() if values[flag] not in (default, {})]


def check_timeouts(server: float, request: float) -> None:
    """Check --vllm_server_timeout and --vllm_request_timeout."""
    for flag, value in (("vllm_server_timeout", server), ("vllm_request_timeout", request)):
        if value <= 0:
            raise ValueError(f"{flag} must be > 0 seconds, got {value}; use --{flag} 240")
