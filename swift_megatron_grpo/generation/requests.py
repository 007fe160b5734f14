"""What is asked of vLLM, in ms-swift's words."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rl_core.data import OnPolicySample
from swift.utils import remove_response

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.protocol.messages import as_json
from swift_megatron_grpo.types import Prompt


def request_config(sampling: SamplingConfig, seed: int | None = None) -> RequestConfig:
    return RequestConfig(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop_words),
        seed=seed,
        return_details=True,
        logprobs=True,
    )


def infer_request(prompt: Prompt, include_extra: bool = False) -> RolloutInferRequest:
    sample = OnPolicySample.from_row(prompt.row)  # a copy
    remove_response(sample.messages)
    request: RolloutInferRequest = sample.to_infer_request(include_extra=include_extra)
    return request


def conversation_request(request: Request) -> RolloutInferRequest:
    """With all of the dataset's columns, and a name of its own, wherever it is led: environments are kept by it."""
    asked = infer_request(request.prompt, include_extra=True)
    asked.uuid = f"{request.prompt.prompt_id}-{request.index}"
    return asked


def conversation_in_words(request: Request) -> dict[str, Any]:
    """For a server, which is told in JSON."""
    asked = asdict(conversation_request(request))
    columns = {name: as_json(f"dataset's column {name}", value) for name, value in asked["data_dict"].items()}
    return asked | {"data_dict": {name: json.loads(value) for name, value in columns.items()}}
