"""Why a server cannot serve a run: what differs between their flags, models and versions, and what to do about it."""

import os
from collections.abc import Mapping

from swift_megatron_grpo.generation.protocol.messages import PROTOCOL, ConversationSettings, ServerStatus
from swift_megatron_grpo.runtime.http import Refused
from swift_megatron_grpo.settings.config import ServerConfig
from swift_megatron_grpo.settings.servers import RemoteTurnsConfig
from swift_megatron_grpo.weights.load.quantization import mismatch

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# Parts of a model, the kinds of media that they embed, and the limits with which vLLM leaves them out.
_PARTS = (
    ("image and video part", {"image", "video"}, """{"image": 0, "video": 0}"""),
    ("audio part", {"audio"}, """{"audio": 0}"""),
)
_PLUGIN_HINT = "and --external_plugins with the file that registers whatever is not part of ms-swift"


def problems_of(status: ServerStatus, config: ServerConfig) -> list[str]:
    """Return the reasons why a server with this status cannot serve this run."""
    if status.protocol != PROTOCOL:
        return [
            f"it runs swift_megatron_grpo {status.plugin}, which uses another protocol version; "
            "install the same version"
        ]
    rank = config.lora_rank
    problems = {
        f"its vllm_max_model_len ({status.max_model_len}) is shorter than the text that verifies its weights; "
        f"start it with --vllm_max_model_len {config.needed_length}": status.max_model_len < config.least_length,
        f"it accepts {status.images_per_prompt} images in a prompt, and a row of the dataset has {config.images}; "
        f"""start it with --vllm_limit_mm_per_prompt '{{"image": {config.images}, "video": {config.videos}}}'""": (
            status.images_per_prompt < config.images
        ),
        f"it accepts {status.videos_per_prompt} videos in a prompt, and a row of the dataset has {config.videos}; "
        f"""start it with --vllm_limit_mm_per_prompt '{{"image": {config.images}, "video": {config.videos}}}'""": (
            status.videos_per_prompt < config.videos
        ),
        f"it accepts {status.recordings_per_prompt} recordings in a prompt, and a row of the dataset has "
        f"{config.recordings}; start it with --vllm_limit_mm_per_prompt "
        f"""'{{"image": {config.images}, "video": {config.videos}, "audio": {config.recordings}}}'""": (
            status.recordings_per_prompt < config.recordings
        ),
        "it was started with max_logprobs 0 in --vllm_engine_kwargs, so it cannot return the log-probs of sampled "
        "tokens, which measure how far the policy has moved since; leave that setting out": status.max_logprobs == 0,
        "it loads weights only while it generates nothing, because its engine runs on several devices or takes media, "
        "and --in_flight_weight_updates true updates it while it generates; start one `swift rollout` per GPU, with "
        """--vllm_limit_mm_per_prompt '{"image": 0, "video": 0, "audio": 0}', or leave that flag out""": (
            config.updates_in_flight and not status.updates_in_flight
        ),
        "it does not report the experts that its routers choose, which --router_replay_mode R3 and "
        "--router_agreement_samples read; start it with --vllm_engine_kwargs "
        """'{"enable_return_routed_experts": true}'""": config.returns_experts and not status.returns_experts,
        "--vllm_enable_lora true must be set for the server as well; start it with --vllm_enable_lora true": (
            rank is not None and not status.enable_lora
        ),
        "it runs an agent, whose calls have messages of text, and rows of the dataset have images, videos or "
        "recordings; start it with a scheduler that has step(), or train rows of text": (
            status.conversations is not None
            and not status.conversations.reads_media
            and max(config.images, config.videos, config.recordings) > 0
        ),
        "its scheduler runs all conversations of a prompt together, and --completion_length_limit_scope total limits "
        "each; use per_round": (
            status.conversations is not None and status.conversations.answers_groups and config.limits_conversations
        ),
        "its completions depend on what else it generates, and this run has --batch_invariant true; start it with "
        "--batch_invariant true": config.batch_invariant and not status.batch_invariant,
        f"its vllm_max_lora_rank ({status.max_lora_rank}) is below --lora_rank {rank}; start it with "
        f"--vllm_max_lora_rank {rank}": rank is not None and status.enable_lora and status.max_lora_rank < rank,
    }
    if status.drafts != config.drafts:
        flags = f"history --speculative_tokens {config.drafts}" if config.drafts else "off"
        problems[
            f"it verifies up to {status.drafts} drafts of a request in a step, and this run has "
            f"--speculative_rollouts {flags}; start it with --speculative_rollouts {flags}"
        ] = True
    quantization = mismatch(config.quantization, status.quantization)
    return [
        *_other_model(status.model, config.model),
        *(problem for problem, is_present in problems.items() if is_present),
        *([] if quantization is None else [quantization]),
        *conflicts_with_run(status.conversations, config.turns),
    ]


def _other_model(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    different = [key for key in there if key in here and here[key] != there[key]]
    if not different:
        return []
    values = ", ".join(f"{key} is {there[key]!r} there and {here[key]!r} here" for key in different)
    advice = "start it with the --model of this run"
    if "torch_dtype" in different:
        advice += f", and with --torch_dtype {here['torch_dtype']}"
    if any(key.startswith("rope_") for key in different):
        advice += """, and with --vllm_engine_kwargs '{"hf_overrides": {"rope_parameters": {...}}}' if that has """
        advice += "--rope_scaling"
    return [f"it runs another model: {values}; {advice}"]


def notes_on(status: ServerStatus, config: ServerConfig) -> list[str]:
    """Return what a user should know about a server that can serve this run."""
    if status.max_model_len >= config.needed_length:
        return []
    return [
        f"its vllm_max_model_len ({status.max_model_len}) is less than max_length and max_completion_length together "
        f"({config.needed_length}): completions of longer prompts are cut, and a prompt that leaves no room stops the "
        f"run; started with --vllm_max_model_len {config.needed_length} it has room for all"
    ]


def refusal(url: str, failure: Refused) -> str:
    """Describe why a server rejected the first status request, and what to do."""
    if failure.status == 404:
        return (
            f"rollout server {url} has no swift_megatron_grpo, or it is disabled there; run "
            "`pip install .` in a clone of it, in the server's environment, and start `swift rollout` again"
        )
    if failure.status == 401:
        return (
            f"rollout server {url} requires its --api_key: {failure}; set SWIFT_ROLLOUT_API_KEY or "
            "SWIFT_ROLLOUT_API_KEY_FILE in this run's environment, or --vllm_server_api_key"
        )
    return f"rollout server {url} rejected the status request: {failure}"


def unreachable(url: str, waited: float, reason: str) -> str:
    """Describe a server that has not responded in time, and what to do."""
    names = [name for proxy in _PROXIES for name in (proxy, proxy.upper())]
    proxies = {name: os.environ[name] for name in names if name in os.environ}
    settings = ", ".join(f"{name}={value}" for name, value in proxies.items())
    hint = f" ({settings} is set but not used: servers are contacted directly)" if proxies else ""
    return (
        f"rollout server {url} did not answer within {waited:.0f} s{hint}: {reason}. Start it with `swift rollout "
        "--model ... --port ...` (with --host, if it runs on another machine: it listens on 127.0.0.1 only), see "
        "--vllm_server_base_url or --vllm_server_host and _port, or wait longer with --vllm_server_timeout"
    )


def conflicts_between(statuses: Mapping[str, ServerStatus]) -> list[str]:
    """Return the conflicts between the servers of one run, by URL: all receive the same tensors and requests."""
    conflicts = []
    if len({status.conversations for status in statuses.values()}) > 1:
        listed = "; ".join(
            f"{url}: {'none' if status.conversations is None else _as_flags(status.conversations)}"
            for url, status in statuses.items()
        )
        conflicts += [
            f"the rollout servers have different multi-turn flags; start all of them with the same ones ({listed})"
        ]
    for part, kinds, limits in _PARTS:
        holding = [url for url, status in statuses.items() if kinds & {*status.held_media}]
        if 0 < len(holding) < len(statuses):
            conflicts += [
                f"some rollout servers hold the {part} of the model ({', '.join(holding)}) and others do not; start "
                f"all of them with --vllm_limit_mm_per_prompt '{limits}', or all without"
            ]
    return conflicts


def conflicts_with_run(server: ConversationSettings | None, run: RemoteTurnsConfig | None) -> list[str]:
    """Return the conflicts between one server and this run. Settings that the run leaves out are the server's."""
    if server is None:
        return [] if run is None else [_not_configured(run)]
    if run is None:
        return [
            f"it runs multi-turn conversations ({_as_flags(server)}), but this run requests single-turn completions; "
            f"add --multi_turn_scheduler {server.scheduler} here (or --vllm_server_pass_dataset true, as scripts for "
            "ms-swift's trainer do), or start it without"
        ]
    values = {
        "multi_turn_scheduler": (server.scheduler, run.scheduler),
        "max_turns": (server.max_turns, run.max_turns),
        "gym_env": (server.gym_env, run.gym_env),
    }
    return [
        f"its --{flag} is {'not set' if of_server is None else of_server}, and this run's is {of_run}; give both the "
        "same, or leave it out here"
        for flag, (of_server, of_run) in values.items()
        if of_run is not None and of_server != of_run
    ]


def _not_configured(run: RemoteTurnsConfig) -> str:
    begin = "it was started without --multi_turn_scheduler, but this run"
    if run.requested_by is None:
        return (
            f"{begin} has no reward function, so an environment of the server must grade; use --reward_funcs here, or "
            "start it with --multi_turn_scheduler gym_scheduler --use_gym_env true --gym_env NAME, "
            f"{_PLUGIN_HINT}"
        )
    flags = _as_flags(ConversationSettings(run.scheduler or "NAME", run.max_turns, run.gym_env, use_gym_env=False))
    return (
        f"{begin} requests multi-turn conversations ({run.requested_by}); start it with {flags}, {_PLUGIN_HINT}, or "
        f"leave {run.requested_by} out here"
    )


def _as_flags(settings: ConversationSettings) -> str:
    """Format settings as on the server's command line."""
    values = {
        "multi_turn_scheduler": settings.scheduler,
        "max_turns": settings.max_turns,
        "gym_env": settings.gym_env,
        "use_gym_env": "true" if settings.use_gym_env else None,
    }
    return " ".join(f"--{flag} {value}" for flag, value in values.items() if value is not None)
