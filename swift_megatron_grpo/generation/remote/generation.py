"""One generation: every request is sent to one of the available servers, and completed groups are returned.

It runs in the servers' event loop while the trainer grades what it has received, or trains. Nothing is lost with a
server: its requests are retried on others, or on itself once it is back with weights. Older generations get free slots
first, so that what is trained next is complete first.

A request is known by its number, its place in this generation. `Request.index` is its place among all requests of the
rollout; a resumed run generates only some of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from swift.utils import get_logger

from swift_megatron_grpo.data.images import files_of
from swift_megatron_grpo.generation.interface import AnsweredRequest, Progress, Request
from swift_megatron_grpo.generation.protocol.messages import (
    CONFLICT,
    MISSING_IMAGES,
    MOST_IN_BATCH,
    SERVER_UNUSABLE,
    Completion,
    ServerStatus,
)
from swift_megatron_grpo.generation.remote.client import (
    InvalidResponse,
    Refused,
    RequestTimeout,
    ServerFailure,
    Unreachable,
)
from swift_megatron_grpo.generation.remote.completion_checks import Expected, problem_of
from swift_megatron_grpo.generation.remote.dispatcher import Assignment, Dispatcher, LostRequests
from swift_megatron_grpo.generation.remote.servers import MAX_ATTEMPTS, EventLoopThread, Server, Servers
from swift_megatron_grpo.generation.requests import (
    conversation_payload,
    infer_request,
    request_config,
    to_rollout,
    without_images,
)
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import Prompt, Rollout

logger = get_logger()
Complete = Callable[[Sequence[int], Server, set[int]], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _InFlight:
    """The requests of one server in this generation."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # each sends a batch
    requests: int = 0


@dataclass(slots=True)
class _Group:
    """The completions of one prompt, which are returned together."""

    finished: dict[int, Rollout] = field(default_factory=dict)  # by number of the request
    first: tuple[str, list[int]] | None = None  # the first completion's server, and its prompt's tokens


class _Payloads:
    """Requests in JSON types. The completions of a prompt share its request and its images, which are read once."""

    def __init__(self, sampling: SamplingConfig, has_turns: bool) -> None:
        self._sampling = sampling
        self._has_turns = has_turns
        self._images: dict[str, list[tuple[str, bytes]]] = {}  # by prompt
        self._requests: dict[str, dict[str, Any]] = {}  # by prompt

    def images(self, prompt: Prompt) -> list[tuple[str, bytes]]:
        """Return digest and content of each image of a prompt."""
        if prompt.prompt_id not in self._images:
            self._images[prompt.prompt_id] = files_of(prompt.row)
        return self._images[prompt.prompt_id]

    def payload(self, request: Request, version: int) -> dict[str, Any]:
        sampling = self._sampling
        text_only = replace(request, prompt=without_images(request.prompt))
        return {
            "request": conversation_payload(text_only) if self._has_turns else self._prompt_request(text_only.prompt),
            "sampling": asdict(request_config(sampling, request.seed)),
            "tokens_of_all_turns": (
                sampling.max_completion_length if sampling.limits_conversations and self._has_turns else None
            ),
            "image_digests": [digest for digest, _ in self.images(request.prompt)],
            "experts": request.returns_experts,
            "weights_version": version,
        }

    def _prompt_request(self, prompt: Prompt) -> dict[str, Any]:
        """Return the request of one turn; completions of a prompt share it, with its uuid.

        Only servers with a scheduler read the uuid, and they are refused by runs of one turn.
        """
        if prompt.prompt_id not in self._requests:
            self._requests[prompt.prompt_id] = asdict(infer_request(prompt))
        return self._requests[prompt.prompt_id]


class RemoteGeneration:
    """Requests in progress on rollout servers. The trainer's thread calls `next`; the work runs in the event loop."""

    def __init__(
        self,
        events: EventLoopThread,
        servers: Servers,
        requests: Sequence[Request],
        group_size: int,
        sampling: SamplingConfig,
        version: int,
        older: Sequence[RemoteGeneration] = (),
    ) -> None:
        self._events, self._servers = events, servers
        self._older = list(older)
        self._requests, self._group_size, self._version = requests, group_size, version
        self._sampling = sampling
        self._dispatcher = Dispatcher(len(requests))
        self._in_flight: dict[str, _InFlight] = defaultdict(_InFlight)  # by server
        self._groups: dict[int, _Group] = defaultdict(_Group)  # by place; not returned yet
        self._lost_requests = LostRequests()
        self._payloads = _Payloads(sampling, has_turns=servers.config.turns is not None)
        self._failure: BaseException | None = None
        self._wake_up = asyncio.Event()  # of `_run`: a request ended, a server came or went, or `stop` was called
        self._advanced = asyncio.Event()  # of `_next`: `_run` has woken up or ended
        self._running = events.submit(self._run())

    @property
    def is_running(self) -> bool:
        return self._dispatcher.unfinished > 0 and self._failure is None

    @property
    def has_waiting(self) -> bool:
        """True while more requests wait than there are free slots."""
        return self._dispatcher.has_waiting

    def next(self, newest: int) -> Progress:
        """Wait until a group is complete or a server needs weights."""
        return self._events.run(self._next(newest))

    async def _next(self, newest: int) -> Progress:
        while True:
            self._servers.check_stop()
            if self._failure is not None:
                raise self._failure
            groups, needs_weights = self._pop_complete_groups(), self._needs_weights(newest)
            if groups or needs_weights:
                finished = {self._requests[number].index: group[number] for group in groups for number in sorted(group)}
                return Progress(finished, needs_weights)
            # Only here, where the trainer waits: while it trains, a server has time to come back.
            self._servers.raise_if_timed_out()
            await self._advanced.wait()
            self._advanced.clear()

    def _needs_weights(self, newest: int) -> bool:
        """Return True if a present server needs the trainer's weights in order to work on this generation.

        If the trainer has moved on, weights are sent only once no server with the old ones is left; until then those
        servers continue.
        """
        if not self._dispatcher.unfinished:
            return False
        version = self._servers.version_to_request(self._version)
        if version == newest:
            return bool(self._servers.without_weights(newest))
        return bool(self._servers.present) and not self._servers.verified_servers(version)

    async def stop(self) -> None:
        """Cancel all unfinished requests."""
        self._failure = self._failure or RuntimeError("the run has ended, and this generation with it")
        self._wake_up.set()
        await asyncio.wrap_future(self._running)

    def _pop_complete_groups(self) -> list[dict[int, Rollout]]:
        complete = [place for place, group in self._groups.items() if len(group.finished) == self._group_size]
        return [self._groups.pop(place).finished for place in sorted(complete)]

    # ---- in the event loop, until all requests are finished

    async def _run(self) -> None:
        self._servers.listeners.append(self._wake_up.set)
        try:
            while self._dispatcher.unfinished and self._failure is None:
                self._update_servers()
                self._start(self._assign())
                await self._wait()
        except Exception as error:
            self._failure = error
        finally:
            self._servers.listeners.remove(self._wake_up.set)
            for url in self._in_flight:
                self._cancel_requests(url)
            self._older.clear()
            self._advanced.set()

    async def _wait(self) -> None:
        """Wait for an event, for at most one second: `_next` finds out by the clock that all servers are lost."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake_up.wait(), timeout=1)
        self._wake_up.clear()
        self._advanced.set()

    def _assign(self) -> list[Assignment]:
        """Assign requests to the slots that older generations leave free."""
        self._older = [generation for generation in self._older if generation.is_running]
        if any(generation.has_waiting for generation in self._older):
            return []
        used_by_others = {
            server.url: server.requests_in_flight - self._in_flight[server.url].requests for server in self._servers.all
        }
        return self._dispatcher.assign(used_by_others)

    def _update_servers(self) -> None:
        """Admit servers that have the weights, and retry the requests of those that no longer do."""
        self._version = self._servers.version_to_request(self._version)
        ready = {server.url: server for server in self._servers.verified_servers(self._version)}
        for url in self._dispatcher.servers - set(ready):
            lost = self._dispatcher.mark_lost(url)
            self._cancel_requests(url)
            self._lost_requests.record_loss(url, lost, time.monotonic())
            if lost:
                logger.warning(f"{len(lost)} unfinished completions of {url} will be retried")
        for url in set(ready) - self._dispatcher.servers:
            status = ready[url].status
            assert status is not None
            # a few more than it runs at a time, so that the next one is queued there when one ends
            self._dispatcher.admit(url, status.max_num_seqs + max(status.max_num_seqs // 8, 1))

    def _cancel_requests(self, url: str) -> None:
        for task in self._in_flight[url].tasks:
            task.cancel()

    def _start(self, assignments: Sequence[Assignment]) -> None:
        """Send requests in batches. One with images is sent alone, because the server may need these again."""
        assigned: dict[str, list[int]] = defaultdict(list)
        for assignment in assignments:
            assigned[assignment.server].append(assignment.request)
        for server in self._servers.all:
            numbers = assigned[server.url]
            with_images = {number for number in numbers if self._payloads.images(self._requests[number].prompt)}
            together = [number for number in numbers if number not in with_images]
            for number in with_images:
                self._start_task([number], server, self._complete_alone)
            for batch in _batches(together):
                self._start_task(batch, server, self._complete)

    def _start_task(self, numbers: Sequence[int], server: Server, complete: Complete) -> None:
        missing = set(numbers)
        in_flight = self._in_flight[server.url]
        in_flight.requests += len(numbers)
        server.requests_in_flight += len(numbers)
        task = asyncio.create_task(complete(numbers, server, missing))
        in_flight.tasks.add(task)

        def ended(_: object) -> None:  # also if the task was cancelled before it began
            in_flight.tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = self._failure or error  # otherwise the trainer would wait for its requests
            self._free_slots(server, len(missing))

        task.add_done_callback(ended)

    def _free_slots(self, server: Server, count: int) -> None:
        self._in_flight[server.url].requests -= count
        server.requests_in_flight -= count
        self._servers.notify_listeners()

    async def _complete(self, numbers: Sequence[int], server: Server, missing: set[int]) -> None:
        """Send a batch of requests to a server and record their completions or failures.

        If the server refuses the batch, each is sent alone, so that only the one at fault is refused. `missing`: those
        without a response.
        """
        version, began = self._version, time.time()

        def accept(place: int, response: Completion | ServerFailure) -> None:
            missing.remove(numbers[place])
            self._record(numbers[place], server, response, version, began)
            self._free_slots(server, 1)

        payloads = [self._payloads.payload(self._requests[number], version) for number in numbers]
        try:
            await server.client.generate_batch(payloads, self._servers.config.request_timeout, accept)
        except Refused as failure:
            if failure.status in (CONFLICT, *SERVER_UNUSABLE):
                self._record_all(missing, server, failure, version, began)
            else:
                for number in sorted(missing):
                    self._start_task([number], server, self._complete_alone)
        except ServerFailure as failure:
            self._record_all(missing, server, failure, version, began)

    def _record_all(
        self, numbers: set[int], server: Server, failure: ServerFailure, version: int, began: float
    ) -> None:
        for number in sorted(numbers):
            self._record(number, server, failure, version, began)

    async def _complete_alone(self, numbers: Sequence[int], server: Server, missing: set[int]) -> None:
        """Send one request to a server and record its completion or failure."""
        [number] = numbers
        request = self._requests[number]
        version = self._version
        began = time.time()
        try:
            payload = self._payloads.payload(request, version)
            completion = await self._generate(server, payload, dict(self._payloads.images(request.prompt)))
            self._record(number, server, completion, version, began)
        except ServerFailure as failure:
            self._record(number, server, failure, version, began)

    def _record(
        self, number: int, server: Server, response: Completion | ServerFailure, version: int, began: float
    ) -> None:
        """Record a request's completion, or what its failure means for the server."""
        if isinstance(response, Completion):
            self._servers.answered.append(AnsweredRequest(server.url, began, time.time() - began))
            self._accept(number, server, response, version)
        elif isinstance(response, RequestTimeout):
            self._retry_or_fail(number, server, response)
        elif isinstance(response, InvalidResponse):
            self._servers.exclude(server, str(response))
        elif isinstance(response, Refused) and response.status == CONFLICT:
            server.drop_connection()  # it has weights of another sender; it will be sent ours again
        elif isinstance(response, Unreachable) or (
            isinstance(response, Refused) and response.status in SERVER_UNUSABLE
        ):
            self._servers.mark_lost(server, str(response))
        else:
            self._retry_or_fail(number, server, response)

    async def _generate(self, server: Server, payload: dict[str, Any], images: Mapping[str, bytes]) -> Completion:
        """Send a request after its images; once more if the server no longer has these."""
        timeout = self._servers.config.request_timeout
        await server.images.send(images, timeout)
        try:
            return await server.client.generate(payload, timeout)
        except Refused as failure:
            if failure.status != MISSING_IMAGES:
                raise
        server.images.forget(images)
        await server.images.send(images, timeout)
        return await server.client.generate(payload, timeout)

    def _accept(self, number: int, server: Server, completion: Completion, version: int) -> None:
        """Record a completion, unless the server was lost in the meantime or the completion cannot be right."""
        if server.status is None:
            return
        request = self._requests[number]
        group = self._groups[number // self._group_size]
        problem = problem_of(completion, self._expected(server.status, version))
        problem = problem or self._other_prompt(group, request.prompt, server, completion)
        if problem is not None:
            self._servers.exclude(server, f"its completion of prompt {request.prompt.prompt_id} is invalid: {problem}")
        elif self._failure is None and self._dispatcher.finish(number, server.url):
            group.finished[number] = to_rollout(request, completion)
            for recovery in self._lost_requests.record_completion(number, time.monotonic()):
                logger.warning(recovery)

    def _expected(self, status: ServerStatus, version: int) -> Expected:
        config = self._servers.config
        return Expected(
            weights_version=version,
            vocab_size=config.model.get("vocab_size"),
            max_completion_length=self._sampling.max_completion_length,
            max_model_len=status.max_model_len,
            has_turns=config.turns is not None,
            takes_images=config.images > 0,
            num_layers=config.model.get("num_hidden_layers"),
            has_logprobs=self._sampling.logprobs,
        )

    def _other_prompt(self, group: _Group, prompt: Prompt, server: Server, completion: Completion) -> str | None:
        """Compare the prompt's tokens with those of the group's first completion; environments may change prompts.

        If two servers disagree, either may be right, so the run ends.
        """
        if self._servers.config.turns is not None:
            return None
        if group.first is None:
            group.first = (server.url, completion.prompt_ids)
        first_server, first_ids = group.first
        if first_ids == completion.prompt_ids:
            return None
        if first_server != server.url:
            self._failure = RuntimeError(
                f"{first_server} and {server.url} encode prompt {prompt.prompt_id} differently; "
                "start all rollout servers with the same --model, --template, --system and --max_length"
            )
            return None
        return "its prompt has other tokens than that of another completion of the same prompt"

    def _retry_or_fail(self, number: int, server: Server, failure: ServerFailure) -> None:
        """Queue a request again that a healthy server did not complete. Fail the generation after MAX_ATTEMPTS."""
        prompt = self._requests[number].prompt
        if self._dispatcher.refuse(number, server.url) < MAX_ATTEMPTS:
            logger.warning(f"{server.url} did not complete prompt {prompt.prompt_id}, which will be retried: {failure}")
            return
        self._failure = RuntimeError(
            f"prompt {prompt.prompt_id} was not completed in {MAX_ATTEMPTS} attempts, the last one by {server.url}: "
            f"{failure}"
        )


def _batches(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(numbers), MOST_IN_BATCH):
        yield numbers[first : first + MOST_IN_BATCH]
