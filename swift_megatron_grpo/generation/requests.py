"""Conversion of requests to ms-swift's types, and of completions to rollouts."""

from dataclasses import asdict, fields
from typing import Any

from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rl_core.data import OnPolicySample
from swift.utils import remove_response

from swift_megatron_grpo.data.recordings import sent_recordings
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.protocol.messages import Completion, as_json
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import Prompt, Rollout, TokenSequence


def request_config(sampling: SamplingConfig, seed: int | None = None) -> RequestConfig:
    return RequestConfig(
        max_tokens=sampling.max_completion_length, temperature=sampling.temperature, top_p=sampling.top_p,
        top_k=sampling.top_k, min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop_words), seed=seed,
        structured_outputs_regex=sampling.regex, return_details=True, logprobs=sampling.logprobs,
    )  # fmt: skip


def infer_request(prompt: Prompt, include_extra: bool = False) -> RolloutInferRequest:
    sample = OnPolicySample.from_row(prompt.row)  # a copy
    remove_response(sample.messages)
    request: RolloutInferRequest = sample.to_infer_request(include_extra=include_extra)
    request.audios = sent_recordings(prompt.row)
    return request


def without_media(prompt: Prompt) -> Prompt:
    """Return the prompt without its media, which a server is sent separately."""
    others = {name: value for name, value in prompt.row.items() if name not in ("images", "audios", "videos")}
    return Prompt(prompt.prompt_id, others)


def conversation_request(request: Request) -> RolloutInferRequest:
    """Create the request of a conversation, with all columns of the dataset and an id that is the same anywhere."""
    conversation = infer_request(request.prompt, include_extra=True)
    conversation.uuid = f"{request.prompt.prompt_id}-{request.place}"
    return conversation


def conversation_payload(request: Request) -> dict[str, Any]:
    """Create the request of a conversation for a server. Columns are encoded as texts: JSON excludes NaN."""
    payload = asdict(conversation_request(request))
    columns = {
        name: as_json(f"column {name} of prompt {request.prompt.prompt_id}", value)
        for name, value in payload["data_dict"].items()
    }
    return payload | {"data_dict": columns}


def to_rollout(request: Request, completion: Completion, weights_version: int) -> Rollout:
    values = {field.name: getattr(completion, field.name) for field in fields(completion) if field.name != "others"}
    earlier = tuple(
        TokenSequence(**{field.name: getattr(sequence, field.name) for field in fields(sequence)})
        for sequence in completion.earlier
    )
    rows = completion.routed_experts if request.returns_experts else None
    of_run = {"weights_version": weights_version, "routed_experts": rows, "earlier": earlier}
    return Rollout(request.prompt, **values | of_run)
