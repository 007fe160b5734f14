"""Keeps what fast_schedule.py and fast_outputs.py know of the requests that vLLM's scheduler runs.

Tests: tests/unit/generation/vllm/test_fast_decoding.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind


@dataclass(slots=True)
class RunningRequest:
    """A request of vLLM's scheduler, and its lists, which vLLM never replaces while the request runs."""

    request: Any
    tokens: list[int]  # prompt and output
    output: list[int]
    most_by_params: int  # of prompt and output
    most_tokens: int  # the same within the length of the model
    has_logprobs: bool
    tokens_with_images: int  # of the prompt; 0: none
    stop_tokens: frozenset[int | None]
    may_be_scheduled: bool
    may_be_held: bool  # its output may reach the output processor late
    sent: int  # tokens of its output that have reached the output processor
    logprobs: list[float] = field(default_factory=list)  # of the tokens that have not
    ranks: list[int] = field(default_factory=list)


class RunningRequests(dict[str, RunningRequest]):
    """Maps a request's id to what is known of it."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._longest: int = scheduler.max_model_len
        self._block_size: int = scheduler.kv_cache_manager.block_pool.hash_block_size

    def remember(self, request: Any) -> RunningRequest:
        """Return what is known of a request that the scheduler runs, and keep it."""
        params = request.sampling_params
        generates = params is not None and not request.resumable
        # A request whose tokens depend on grammars or sessions is left to vLLM.
        plain = generates and not request.structured_output_request and request.prompt_embeds is None
        if request._block_hasher is not None:  # has a hash for each full block
            plain = plain and len(request.block_hashes) == len(request._all_token_ids) // self._block_size
        running = self[request.request_id] = RunningRequest(
            request=request,
            tokens=request._all_token_ids,
            output=request._output_token_ids,
            most_by_params=request.num_prompt_tokens + request.max_tokens,
            most_tokens=min(self._longest, request.num_prompt_tokens + request.max_tokens),
            has_logprobs=generates and params.num_logprobs is not None,
            stop_tokens=frozenset((params.eos_token_id, *(params.stop_token_ids or ()))) if generates else frozenset(),
            tokens_with_images=request.num_prompt_tokens if request.mm_features else 0,
            may_be_scheduled=plain,
            may_be_held=plain and _is_read_at_the_end(params) and request.client_index == 0,
            sent=len(request._output_token_ids),
        )
        return running


def _is_read_at_the_end(params: Any) -> bool:
    """Return True if nothing looks at the tokens of a request before its last one."""
    return (
        params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not params.stop
        and params.repetition_detection is None
        and params.num_logprobs in (None, 0)
    )
