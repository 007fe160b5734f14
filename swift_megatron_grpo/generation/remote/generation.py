"""One generation: every request is sent to one of the available servers, and completed groups are returned.

It runs in the servers' event loop while the trainer grades what it has received, or trains. Nothing is lost with a
server: its requests are retried on others, or on itself once it is back with weights. Older generations get free slots
first, so that what is trained next is complete first.

A request is known by its number, its place in this generation. `Request.index` is its place among all requests of the
rollout; a resumed run generates only some of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from swift.template import Template
from swift.utils import get_logger

from swift_megatron_grpo.data.images import digest_of, files_of
from swift_megatron_grpo.data.recordings import heard_files_of
from swift_megatron_grpo.data.videos import shown_videos
from swift_megatron_grpo.generation.interface import AnsweredRequest, Progress, Request
from swift_megatron_grpo.generation.protocol.messages import (
    CONFLICT,
    MISSING_IMAGES,
    MOST_IN_BATCH,
    SERVER_UNUSABLE,
    Completion,
)
from swift_megatron_grpo.generation.remote.client import Accept
from swift_megatron_grpo.generation.remote.completion_checks import problem_of
from swift_megatron_grpo.generation.remote.dispatcher import Dispatcher, LostRequests
from swift_megatron_grpo.generation.remote.servers import MAX_ATTEMPTS, EventLoopThread, Server, Servers
from swift_megatron_grpo.generation.requests import (
    conversation_payload,
    infer_request,
    request_config,
    to_rollout,
    without_media,
)
from swift_megatron_grpo.runtime.http import Refused, RequestTimeout, ServerFailure
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import Prompt, Rollout

logger = get_logger()


class _Payloads:
    """Requests in JSON types. The completions of a prompt share its request and its images, which are read once."""

    def __init__(
        self, sampling: SamplingConfig, has_turns: bool, newer_weights: bool, videos: Mapping[str, list[bytes]]
    ) -> None:
        """`videos`: what servers are sent of those of each prompt; sampling them here would hold up the event loop."""
        self._newer_weights = newer_weights
        self._videos = {name: [(digest_of(file), file) for file in files] for name, files in videos.items()}
        self._sampling = sampling
        self._has_turns = has_turns
        self._media: dict[str, dict[str, list[tuple[str, bytes]]]] = {}  # by prompt, by kind
        self._requests: dict[str, dict[str, Any]] = {}  # by prompt

    def _media_of(self, prompt: Prompt) -> dict[str, list[tuple[str, bytes]]]:
        name, row = prompt.prompt_id, prompt.row
        if name not in self._media:
            videos = self._videos.get(name, [])
            self._media[name] = {"image": files_of(row), "video": videos, "audio": heard_files_of(row)}
        return self._media[name]

    def media(self, prompt: Prompt) -> list[tuple[str, bytes]]:
        return list(itertools.chain.from_iterable(self._media_of(prompt).values()))

    def payload(self, request: Request, version: int, group: int | None) -> dict[str, Any]:
        sampling, name = self._sampling, request.prompt.prompt_id
        media = self._media_of(request.prompt)
        text_only = replace(request, prompt=without_media(request.prompt))
        if not self._has_turns and name not in self._requests:  # with its uuid, which only schedulers read
            self._requests[name] = asdict(infer_request(text_only.prompt))
        return {
            "request": conversation_payload(text_only) if self._has_turns else self._requests[name],
            "sampling": asdict(request_config(sampling, request.seed)),
            "tokens_of_all_turns": (
                sampling.max_completion_length if sampling.limits_conversations and self._has_turns else None
            ),
            **{f"{kind}_digests": [digest for digest, _ in of_kind] for kind, of_kind in media.items()},
            "experts": request.returns_experts,
            "group": group,
            "weights_version": version,
            "newer_weights": self._newer_weights,
        }


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
        template: Template | None = None,  # samples the videos of prompts; None: they have none
        whole_groups: bool = False,  # a server answers all completions of a prompt together
    ) -> None:
        self._events, self._servers = events, servers
        self._older = list(older)
        self._requests, self._group_size, self._version = requests, group_size, version
        self._sampling = sampling
        self._unit = group_size if whole_groups else 1  # requests that are sent as one
        self._dispatcher = Dispatcher(len(requests) // self._unit)
        self._whole_groups = whole_groups
        self._tasks: dict[str, set[asyncio.Task[None]]] = defaultdict(set)  # by server; each sends a batch
        # Groups of completions that have not been returned yet, and for each the server and the tokens of the prompt of
        # its first completion: by place of the group, and by number of the request.
        self._groups: dict[int, dict[int, Rollout]] = defaultdict(dict)
        self._first: dict[int, tuple[str, list[int]]] = {}
        self._lost_requests = LostRequests()
        rows = {request.prompt.prompt_id: request.prompt.row for request in requests}
        videos = {name: shown_videos(template, row) for name, row in rows.items()} if template else {}
        self._payloads = _Payloads(sampling, servers.config.turns is not None, servers.config.updates_in_flight, videos)
        # Completions that wait for the check of the weights that generated their last tokens.
        self._unverified: list[tuple[int, Server, Completion, int]] = []
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
            complete = sorted(place for place, group in self._groups.items() if len(group) == self._group_size)
            needs_weights = self._needs_weights(newest)
            if complete or needs_weights:
                groups = [self._groups.pop(place) for place in complete]
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
        if self._servers.config.updates_in_flight:
            return any(not server.generates for server in self._servers.present)
        version = self._servers.version_to_request(self._version)
        if version == newest:
            return bool(self._servers.without_weights(newest))
        return bool(self._servers.present) and not self._servers.verified_servers(version)

    async def stop(self) -> None:
        self._failure = self._failure or RuntimeError("the run has ended, and this generation with it")
        self._wake_up.set()
        await asyncio.wrap_future(self._running)

    # ---- in the event loop, until all requests are finished

    async def _run(self) -> None:
        self._servers.listeners.append(self._wake_up.set)
        try:
            while self._dispatcher.unfinished and self._failure is None:
                self._update_servers()
                self._accept_verified()
                self._start()
                with suppress(TimeoutError):  # of one second: `_next` finds out by the clock that all servers are lost
                    await asyncio.wait_for(self._wake_up.wait(), timeout=1)
                self._wake_up.clear()
                self._advanced.set()
        except Exception as error:
            self._failure = error
        finally:
            self._servers.listeners.remove(self._wake_up.set)
            for task in itertools.chain(*self._tasks.values()):
                task.cancel()
            self._older.clear()
            self._advanced.set()

    def _update_servers(self) -> None:
        """Admit servers that have the weights, and retry the requests of those that no longer do."""
        if not self._servers.config.updates_in_flight:
            self._version = self._servers.version_to_request(self._version)
        ready = {server.url: server for server in self._servers.generating_from(self._version)}
        for url in self._dispatcher.servers - set(ready):
            lost = self._dispatcher.mark_lost(url)
            self._unverified = [held for held in self._unverified if held[1].url != url]
            for task in self._tasks[url]:
                task.cancel()
            self._lost_requests.record_loss(url, lost, time.monotonic())
            if lost:
                logger.warning(f"{len(lost)} unfinished completions of {url} will be retried")
        for url in set(ready) - self._dispatcher.servers:
            status = ready[url].status
            assert status is not None
            # a few more than it runs at a time, so that the next one is queued there when one ends
            slots = status.max_num_seqs + max(status.max_num_seqs // 8, 1)
            self._dispatcher.admit(url, max(slots // self._unit, 1))

    def _start(self) -> None:
        """Send requests to the slots that older generations leave free, in batches but for those with images."""
        self._older = [generation for generation in self._older if generation.is_running]
        if any(generation.has_waiting for generation in self._older):
            return
        servers, running = self._servers.all, self._dispatcher.running
        used_by_others = {one.url: one.requests_in_flight - len(running.get(one.url, ())) for one in servers}
        assigned: dict[str, list[int]] = defaultdict(list)
        for number, url in self._dispatcher.assign(used_by_others):
            assigned[url].append(number)
        for server in servers:
            numbers = assigned[server.url]
            with_images = {number for number in numbers if self._payloads.media(self._first_of(number).prompt)}
            together = [number for number in numbers if number not in with_images]
            batches = [together[begin : begin + MOST_IN_BATCH] for begin in range(0, len(together), MOST_IN_BATCH)]
            for batch in [*([number] for number in with_images), *batches]:
                self._start_task(batch, server)

    def _start_task(self, numbers: Sequence[int], server: Server) -> None:
        missing = set(numbers)
        server.requests_in_flight += len(numbers)
        task = asyncio.create_task(self._complete(numbers, server, missing))
        self._tasks[server.url].add(task)

        def ended(_: object) -> None:  # also if the task was cancelled before it began
            self._tasks[server.url].discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = self._failure or error  # otherwise the trainer would wait for its requests
            self._free_slots(server, len(missing))

        task.add_done_callback(ended)

    def _free_slots(self, server: Server, count: int) -> None:
        server.requests_in_flight -= count
        self._servers.notify_listeners()

    async def _complete(self, numbers: Sequence[int], server: Server, missing: set[int]) -> None:
        """Send a batch of requests to a server and record their completions or failures.

        If the server refuses the batch, each is sent alone, so that only the one at fault is refused. `missing`: those
        without a response.
        """
        version, began = self._version, time.time()

        def accept(place: int, response: Completion | Refused) -> None:
            if isinstance(response, Refused) and response.status == MISSING_IMAGES:
                raise response
            missing.remove(numbers[place])
            self._record(numbers[place], server, response, version, began)
            self._free_slots(server, 1)

        try:
            await self._send(numbers, server, version, accept)
        except ServerFailure as failure:
            at_fault = isinstance(failure, Refused) and failure.status not in (CONFLICT, *SERVER_UNUSABLE)
            for number in sorted(missing):
                if at_fault and len(numbers) > 1:
                    self._start_task([number], server)
                else:
                    self._record(number, server, failure, version, began)

    async def _send(self, numbers: Sequence[int], server: Server, version: int, accept: Accept) -> None:
        """Send requests after their images; once more if the server no longer has these."""
        requests = [self._first_of(number) for number in numbers]
        group = self._unit if self._whole_groups else None
        payloads = [self._payloads.payload(request, version, group) for request in requests]
        images = dict(image for request in requests for image in self._payloads.media(request.prompt))
        timeout = self._servers.config.request_timeout
        await server.images.send(images, timeout)
        try:
            return await server.client.generate_batch(payloads, timeout, accept)
        except Refused as failure:
            if failure.status != MISSING_IMAGES:
                raise
        server.images.forget(images)
        await server.images.send(images, timeout)
        await server.client.generate_batch(payloads, timeout, accept)

    def _record(
        self, number: int, server: Server, response: Completion | ServerFailure, version: int, began: float
    ) -> None:
        """Record a request's completion, or what its failure means for the server."""
        if isinstance(response, Completion):
            self._servers.answered.append(AnsweredRequest(server.url, began, time.time() - began))
            self._accept(number, server, response, version)
        elif isinstance(response, RequestTimeout) or not self._servers.blame(server, response):
            self._retry_or_fail(number, server, response)

    def _accept(self, number: int, server: Server, completion: Completion, version: int) -> None:
        """Record a completion, unless the server was lost in the meantime or the completion cannot be right."""
        if server.status is None:
            return
        requests = self._requests[number * self._unit : (number + 1) * self._unit]
        completions = [completion, *completion.others]
        place, request = number * self._unit // self._group_size, requests[0]
        newest = self._servers.newest if self._servers.config.updates_in_flight else version
        problems = (
            problem_of(
                each, range(version, newest + 1), server.status.max_model_len, self._sampling, self._servers.config
            )
            or self._other_prompt(place, request.prompt, server, each)
            for each in completions
        )
        problem = next(filter(None, problems), None)
        if len(completions) != len(requests):
            problem = f"it is {len(completions)} completions, and {len(requests)} were requested"
        if problem is not None:
            self._servers.exclude(server, f"its completion of prompt {request.prompt.prompt_id} is invalid: {problem}")
        elif not all(self._is_verified(server, each) for each in completions):
            self._unverified.append((number, server, completion, version))
        elif self._failure is None and self._dispatcher.finish(number, server.url):
            for index, (each, its) in enumerate(zip(requests, completions, strict=True), number * self._unit):
                self._groups[place][index] = to_rollout(each, its, its.weights_version)
            for recovery in self._lost_requests.record_completion(number, time.monotonic()):
                logger.warning(recovery)

    def _first_of(self, number: int) -> Request:
        """Return the first of the requests that are sent under this number."""
        return self._requests[number * self._unit]

    def _is_verified(self, server: Server, completion: Completion) -> bool:
        """Return True unless weights that arrived in flight, and are not known to be right, generated its last tokens.

        If they turn out to be wrong, the server needs weights again, and all of its requests are retried.
        """
        if not self._servers.config.updates_in_flight:
            return True
        return completion.newest_version <= server.verified_version

    def _accept_verified(self) -> None:
        verified = [held for held in self._unverified if self._is_verified(*held[1:3])]
        self._unverified = [held for held in self._unverified if held not in verified]
        for held in verified:
            self._accept(*held)

    def _other_prompt(self, place: int, prompt: Prompt, server: Server, completion: Completion) -> str | None:
        """Compare the prompt's tokens with those of the group's first completion; environments may change prompts."""
        if self._servers.config.turns is not None:
            return None
        first_server, first_ids = self._first.setdefault(place, (server.url, completion.prompt_ids))
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
        prompt = self._first_of(number).prompt
        if self._dispatcher.refuse(number, server.url) < MAX_ATTEMPTS:
            logger.warning(f"{server.url} did not complete prompt {prompt.prompt_id}, which will be retried: {failure}")
            return
        self._failure = RuntimeError(
            f"prompt {prompt.prompt_id} was not completed in {MAX_ATTEMPTS} attempts, the last one by {server.url}: "
            f"{failure}"
        )
