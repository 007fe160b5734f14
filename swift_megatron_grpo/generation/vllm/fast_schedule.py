"""Schedules a step in which every running request gets one token and its drafts, as in almost every step of a rollout.

vLLM's scheduler goes through all of its features for each request: 5 microseconds each, so 0.6 ms a step for 128
requests. Most requests need nothing in such a step, neither a block of the cache nor the hash of a full one, which
comparisons of integers show. This schedule lets vLLM's own do a step without running requests, so that everything else
is done as always, and adds the requests to its output. Any other step, such as one with a prompt or without enough free
blocks, is vLLM's alone.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState

from swift_megatron_grpo.generation.vllm.known_scheduler import KnownScheduler


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


class FastSchedule:
    """Replaces the method `schedule` of one scheduler."""

    def __init__(self, scheduler: Any, known: KnownScheduler, running: RunningRequests) -> None:
        self._scheduler, self._known, self._running = scheduler, known, running
        self._stock = scheduler.schedule
        [self._blocks_of_requests] = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._pool = scheduler.kv_cache_manager.block_pool
        self._caches: bool = scheduler.kv_cache_manager.enable_caching
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._stagger: int = getattr(scheduler, known.stagger) if self._is_async else 0
        self._keeps_eligible_step = self._is_async and scheduler.use_v2_model_runner
        self._tracks_previous = known.always_tracks_previous or not scheduler.use_v2_model_runner
        self._most_tokens = min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)
        # Drafts of a request by the number of scheduled ones. The device looks for them, so here they are placeholders.
        self._depths: list[int] | None = scheduler.dynamic_sd_lookup if scheduler.num_spec_tokens else None

    def __call__(self, *throttle: bool) -> Any:
        """Return what `schedule` returns, with the same changes of the scheduler's state."""
        scheduler = self._scheduler
        for request_id in scheduler.finished_req_ids:
            self._running.pop(request_id, None)
        if any(throttle) or not self._is_ordinary():
            return self._stock(*throttle)
        chosen = self._choose()
        if not chosen:
            return self._stock(*throttle)
        previous = set(scheduler.prev_step_scheduled_req_ids) if self._tracks_previous else None
        output = self._schedule_nothing(*throttle)
        self._add(output, chosen, previous)
        return output

    def _is_ordinary(self) -> bool:
        """Return True if no request can start in this step, and all running ones can have a token."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        return (
            scheduler._pause_state is PauseState.UNPAUSED
            and not scheduler._inflight_prefills
            and scheduler.num_waiting_for_streaming_input == 0
            and 0 < running <= self._most_tokens
            and (waiting == 0 or running >= getattr(scheduler, self._known.most_running))
        )

    def _choose(self) -> list[tuple[RunningRequest, int, bool]]:
        """Return the requests with tokens, how many each, and whether blocks change; nothing: vLLM must schedule."""
        scheduler, known_requests = self._scheduler, self._running
        blocks, cached = self._blocks_of_requests.req_to_blocks, self._blocks_of_requests.num_cached_block
        block_size, longest, caches = self._blocks_of_requests.block_size, scheduler.max_model_len, self._caches
        next_step = scheduler.current_step + 1
        drafts = self._depths is not None
        chosen = []
        new_blocks = total = 0
        for request in scheduler.running:
            request_id = request.request_id
            running = known_requests.get(request_id)
            if running is None or running.request is not request:
                running = known_requests.remember(request)
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if placeholders > 0 and computed + 2 - placeholders >= running.most_by_params:
                continue  # its last token is being generated
            tokens, count = len(running.tokens), 1 + len(request.spec_token_ids)
            own = blocks.get(request_id)
            if (
                not running.may_be_scheduled
                or own is None
                or tokens + placeholders - computed != 1
                or (count > 1 and not drafts)
                or computed < running.tokens_with_images
                or computed + count + 1 > longest
                or next_step < request.next_decode_eligible_step
            ):
                return []
            missing = max(-(-(computed + count) // block_size) - len(own), 0)
            new_blocks += missing
            total += count
            changes_blocks = missing > 0 or (caches and tokens // block_size > cached.get(request_id, 0))
            chosen.append((running, count, changes_blocks))
        return chosen if new_blocks <= self._pool.get_num_free_blocks() and total <= self._most_tokens else []

    def _schedule_nothing(self, *throttle: bool) -> Any:
        """Let vLLM schedule a step in which no request runs and none may start."""
        scheduler, limit = self._scheduler, self._known.most_running
        running, most_running = scheduler.running, getattr(scheduler, limit)
        scheduler.running = []
        setattr(scheduler, limit, 0)
        try:
            return self._stock(*throttle)
        finally:
            scheduler.running = running
            setattr(scheduler, limit, most_running)

    def _add(self, output: Any, chosen: list[tuple[RunningRequest, int, bool]], previous: set[str] | None) -> None:
        """Give each request its tokens, and add it to the output."""
        scheduler, data = self._scheduler, output.scheduled_cached_reqs
        allocate = scheduler.kv_cache_manager.allocate_slots
        is_async, keeps_eligible_step = self._is_async, self._keeps_eligible_step
        counts_in_flight = self._known.counts_in_flight
        eligible_step = scheduler.current_step + self._stagger
        if self._depths is not None:
            depth = output.num_spec_tokens_to_schedule = self._depths[len(chosen)]
            scheduler._spec_token_placeholders = [-1] * depth
        for running, count, changes_blocks in chosen:
            request = running.request
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            new_blocks = allocate(request, count).get_block_ids(allow_none=True) if changes_blocks else None
            data.req_ids.append(request.request_id)
            data.new_block_ids.append(new_blocks)
            data.num_computed_tokens.append(computed)
            data.num_output_tokens.append(len(running.output) + placeholders)
            if previous is not None and request.request_id not in previous:
                data.all_token_ids[request.request_id] = running.tokens.copy()
            output.num_scheduled_tokens[request.request_id] = count
            if self._depths is not None:
                if count > 1:
                    output.scheduled_spec_decode_tokens[request.request_id] = request.spec_token_ids
                request.spec_token_ids = scheduler._spec_token_placeholders
            request.num_computed_tokens = computed + count
            request.is_prefill_chunk = False
            if is_async:
                request.num_output_placeholders = placeholders + count
                if keeps_eligible_step:
                    request.next_decode_eligible_step = eligible_step
            if counts_in_flight:
                request.num_in_flight_tokens += count
            output.total_num_scheduled_tokens += count
        if previous is not None:
            scheduler.prev_step_scheduled_req_ids.update(data.req_ids)
        if self._known.has_common_prefix:
            output.num_common_prefix_blocks = scheduler.kv_cache_manager.get_num_common_prefix_blocks(
                scheduler.running[0].request_id
            )
