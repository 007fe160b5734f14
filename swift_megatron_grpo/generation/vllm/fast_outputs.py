"""Appends the tokens of a step to their requests, and passes them on in batches. Installs fast_schedule.py as well.

vLLM makes an object for the token of each request, another one for its log-prob, and hands both to the output
processor, which looks for a reason to report them: 6 microseconds per request, 0.8 ms a step for 128 requests. Nothing
is reported before the last token of a request that is read at its end. Its tokens are therefore passed on `BATCH` at a
time, in the form in which vLLM passes on several tokens of one step. A token that may end its request, and one of a
request with any other feature, is left to vLLM.
"""

from copy import copy
from operator import attrgetter
from typing import Any

import numpy as np
from swift.utils import get_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from swift_megatron_grpo.generation.vllm.fast_schedule import FastSchedule, RunningRequest, RunningRequests
from swift_megatron_grpo.generation.vllm.known_scheduler import KnownScheduler, known_scheduler

logger = get_logger()

# Tokens of a request that are passed on together. The prober of a server (health.py) takes each passing on for a
# sign of life, so there must not be many steps between two of them.
BATCH = 32


def speed_up_decoding(engine: Any) -> bool:
    """Install FastSchedule and FastOutputs in vLLM's LLMEngine. Return False if vLLM's own functions must run."""
    if type(engine.engine_core) is not InprocClient:
        return False
    scheduler = engine.engine_core.engine_core.scheduler
    known = known_scheduler(scheduler)
    if known is None:
        logger.info("vLLM's scheduler or its settings are not those that this package speeds up; generation is slower")
        return False
    running = RunningRequests(scheduler)
    scheduler.schedule = FastSchedule(scheduler, known, running)
    scheduler.update_from_output = FastOutputs(scheduler, known, running)
    return True


class FastOutputs:
    """Replaces the method `update_from_output` of one scheduler."""

    def __init__(self, scheduler: Any, known: KnownScheduler, running: RunningRequests) -> None:
        self._scheduler, self._running = scheduler, running
        self._stock = scheduler.update_from_output
        self._stale_output = attrgetter(known.stale_output)
        self._prompt_outputs = ("prompt_logprobs_dict", *known.other_prompt_outputs)
        self._counts_in_flight = known.counts_in_flight
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._verifies = scheduler.num_spec_tokens > 0

    def __call__(self, scheduler_output: Any, model_output: Any) -> dict[int, Any]:
        """Return what `update_from_output` returns, without the outputs that are held back."""
        if not self._is_ordinary(scheduler_output, model_output):
            outputs: dict[int, Any] = self._stock(scheduler_output, model_output)
            self._pass_on(outputs, [])
            return outputs
        rest, full = self._append(scheduler_output, model_output)
        left = copy(scheduler_output)
        left.num_scheduled_tokens = rest
        outputs = self._stock(left, model_output)
        if rest or full:
            self._pass_on(outputs, full)
        return outputs

    def _is_ordinary(self, scheduler_output: Any, model_output: Any) -> bool:
        """Return True if the runner returns nothing but tokens, and log-probs of the sampled ones at most."""
        logprobs = model_output.logprobs
        return (
            bool(model_output.sampled_token_ids)
            and (self._verifies or not scheduler_output.scheduled_spec_decode_tokens)
            and not model_output.pooler_output
            and model_output.kv_connector_output is None
            and not model_output.num_nans_in_logits  # the first runner returns an empty one
            and not any(getattr(model_output, name) for name in self._prompt_outputs)
            and (
                logprobs is None
                or (
                    (self._verifies or logprobs.cu_num_generated_tokens is None)
                    and logprobs.logprob_token_ids.shape[1] == 1
                )
            )
        )

    def _append(self, scheduled: Any, model_output: Any) -> tuple[dict[str, int], list[RunningRequest]]:
        """Append the tokens that vLLM need not see. Return the requests left to it, and those with a full batch."""
        scheduler, known_requests = self._scheduler, self._running
        manager = scheduler.kv_cache_manager
        [blocks] = manager.coordinator.single_type_managers
        block_size, cached, caches = blocks.block_size, blocks.num_cached_block, manager.enable_caching
        requests, rows, sampled = scheduler.requests, model_output.req_id_to_index, model_output.sampled_token_ids
        is_async, counts_in_flight, stale_output = self._is_async, self._counts_in_flight, self._stale_output
        embedded = scheduler.encoder_cache_manager.get_cached_input_ids
        logprob_tokens, logprobs, ranks, begins = _columns(model_output.logprobs)
        drafts = scheduled.scheduled_spec_decode_tokens
        rest: dict[str, int] = {}
        full: list[RunningRequest] = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            running = known_requests.get(request_id)
            row = rows[request_id]
            new = sampled[row]
            drafted = len(drafts.get(request_id, ()))
            if running is None or not 0 < len(new) <= drafted + 1:
                rest[request_id] = count
                continue
            request, tokens = running.request, running.tokens
            with_logprob = running.has_logprobs
            first = row if begins is None else begins[row]  # of its log-probs
            end = first + len(new)
            if (
                not running.may_be_held
                or requests.get(request_id) is not request
                or request.status is not RequestStatus.RUNNING
                or stale_output(request)
                or request.prefill_stats is not None
                or (running.tokens_with_images and embedded(request))  # some may be freed
                or not running.stop_tokens.isdisjoint(new)
                or len(tokens) + len(new) >= running.most_tokens
                or (with_logprob and (logprob_tokens is None or logprob_tokens[first:end] != new))
                or (drafted and request.spec_decode_metrics is not None)
            ):
                rest[request_id] = count
                continue
            running.output.extend(new)
            tokens.extend(new)
            if drafted:
                rejected = drafted + 1 - len(new)
                request.num_computed_tokens -= rejected
                request.num_output_placeholders -= rejected
            if request._block_hasher is not None and (len(request.block_hashes) + 1) * block_size <= len(tokens):
                request.update_block_hashes()
            if counts_in_flight:
                request.num_in_flight_tokens -= count
            if is_async:
                request.num_output_placeholders -= len(new)
                assert request.num_output_placeholders >= 0
                computed = request.num_computed_tokens - request.num_output_placeholders
                if caches and computed // block_size > cached.get(request_id, 0):
                    manager.cache_blocks(request, computed)
            if with_logprob:
                running.logprobs.extend(logprobs[first:end])
                running.ranks.extend(ranks[first:end])
            if len(running.output) - running.sent >= BATCH:
                full.append(running)
        return rest, full

    def _pass_on(self, outputs: dict[int, Any], full: list[RunningRequest]) -> None:
        """Pass on what is held of the requests in the outputs, before them, and of those with a full batch."""
        own = outputs.get(0)
        passed: list[Any] = []
        for output in own.outputs if own is not None else ():
            running = self._running.get(output.request_id)
            if running is not None:
                held = len(running.output) - running.sent - len(output.new_token_ids)
                if held:
                    passed.append(_output(running, held))
                running.sent = len(running.output)
            passed.append(output)
        for running in full:
            passed.append(_output(running, len(running.output) - running.sent))
            running.sent = len(running.output)
        if own is not None:
            own.outputs = passed
        elif passed:
            outputs[0] = EngineCoreOutputs(outputs=passed)


def _columns(logprobs: Any) -> tuple[Any, Any, Any, Any]:
    """Return the tokens, log-probs and ranks of all rows, and where those of each request begin; None: one row each."""
    if logprobs is None:
        return None, None, None, None
    return (
        logprobs.logprob_token_ids[:, 0].tolist(),
        logprobs.logprobs[:, 0].tolist(),
        logprobs.sampled_token_ranks.tolist(),
        logprobs.cu_num_generated_tokens,
    )


def _output(running: RunningRequest, held: int) -> Any:
    """Return the next tokens of a request in the form in which the scheduler returns several of one step."""
    tokens = running.output[running.sent : running.sent + held]
    logprobs = None
    if running.logprobs:
        # in fp64, which Python's numbers are: they must not change
        logprobs = LogprobsLists(
            np.array(tokens)[:, None], np.array(running.logprobs)[:, None], np.array(running.ranks), None
        )
        running.logprobs.clear()
        running.ranks.clear()
    return EngineCoreOutput(request_id=running.request.request_id, new_token_ids=tokens, new_logprobs=logprobs)
