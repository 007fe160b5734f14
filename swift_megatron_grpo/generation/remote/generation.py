"""One generation: every completion asked for once, of whichever servers are there, and told as groups complete.

It goes on by itself, in the servers' event loop, while the trainer grades what it has been told, or trains. A server
that is lost takes nothing with it: what it was answering is asked again elsewhere, or of itself when it is back with
weights. Of several generations the older one is served first, so that what is trained next is complete first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from swift.utils import get_logger

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.interface import Progress, Request
from swift_megatron_grpo.generation.remote.client import Refused, ServerFailure, Slow, Unreachable
from swift_megatron_grpo.generation.remote.dispatcher import Assignment, Dispatcher
from swift_megatron_grpo.generation.remote.event_loop import EventLoopThread
from swift_megatron_grpo.generation.remote.lost_requests import LostRequests
from swift_megatron_grpo.generation.remote.servers import Server, Servers
from swift_megatron_grpo.generation.requests import conversation_in_words, infer_request, request_config
from swift_megatron_grpo.protocol.messages import CONFLICT, SERVER_UNUSABLE, Completion
from swift_megatron_grpo.types import Rollout

logger = get_logger()

_TRIES = 2  # of a request that a server refuses which is well


class RemoteGeneration:
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
        self._asking: dict[str, set[asyncio.Task[None]]] = {}  # by server
        self._finished: dict[int, Rollout] = {}  # by place in `requests`; not told yet
        self._recoveries = LostRequests()
        self._failure: Exception | None = None
        self._changed, self._moved = asyncio.Event(), asyncio.Event()
        self._running = events.start(self._run())

    @property
    def is_running(self) -> bool:
        return self._dispatcher.unfinished > 0 and self._failure is None

    @property
    def waits(self) -> bool:
        """Whether it would take more slots than there are."""
        return self._dispatcher.waits

    def next(self, newest: int) -> Progress:
        """Waits until there is something to tell."""
        return self._events.run(self._next(newest))

    async def _next(self, newest: int) -> Progress:
        while True:
            if self._failure is not None:
                raise self._failure
            units, lacking = self._complete_units(), self._lacks_weights(newest)
            if units or lacking:
                told = {self._requests[place].index: self._finished.pop(place) for unit in units for place in unit}
                return Progress(told, needs_weights=lacking)
            # Not before: while the trainer trains, a server has time to come back.
            self._servers.refuse_to_wait_for_ever()
            await self._moved.wait()
            self._moved.clear()

    def _lacks_weights(self, newest: int) -> bool:
        """Whether a server that is there waits for the trainer's weights, and this generation for the server. Where the
        trainer has moved on, weights are sent when none is left that has the old ones: the others go on."""
        if not self._dispatcher.unfinished:
            return False
        version = self._servers.version_to_ask(self._version)
        if version == newest:
            return bool(self._servers.without_weights(newest))
        return bool(self._servers.present) and not self._servers.verified_servers(version)

    async def stop(self) -> None:
        """What is not answered yet is not wanted any more."""
        self._failure = self._failure or RuntimeError("the run has ended, and this generation with it")
        self._changed.set()
        await asyncio.wrap_future(self._running)

    def _complete_units(self) -> list[range]:
        firsts = {place - place % self._group_size for place in self._finished}
        units = [range(first, first + self._group_size) for first in sorted(firsts)]
        return [unit for unit in units if all(place in self._finished for place in unit)]

    # ---- in the event loop, until all is answered

    async def _run(self) -> None:
        self._servers.listeners.append(self._changed.set)
        try:
            while self._dispatcher.unfinished and self._failure is None:
                self._follow_servers()
                for assignment in self._assign():
                    self._start(assignment)
                await self._wait()
        except Exception as error:
            self._failure = error
        finally:
            self._servers.listeners.remove(self._changed.set)
            for server in list(self._asking):
                self._stop_asking(server)
            self._older.clear()
            self._moved.set()

    async def _wait(self) -> None:
        """For an answer, or a server that comes or goes. All of them out is found by looking at the clock."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout=1)
        self._changed.clear()
        self._moved.set()

    def _assign(self) -> list[Assignment]:
        """What older generations leave."""
        self._older = [generation for generation in self._older if generation.is_running]
        if any(generation.waits for generation in self._older):
            return []
        of_others = {server.url: server.asked - len(self._asking.get(server.url, ())) for server in self._servers.all}
        return self._dispatcher.assign(of_others)

    def _follow_servers(self) -> None:
        self._version = self._servers.version_to_ask(self._version)
        ready = {server.url: server for server in self._servers.verified_servers(self._version)}
        for url in self._dispatcher.servers - set(ready):
            lost = self._dispatcher.lose(url)
            self._stop_asking(url)
            self._recoveries.lost(url, lost, time.monotonic())
            if lost:
                logger.warning(f"{len(lost)} unfinished completions of {url} are asked again")
        for url in set(ready) - self._dispatcher.servers:
            status = ready[url].status
            assert status is not None
            # a few more than it runs at a time, so that the next is there when one ends
            self._dispatcher.admit(url, status.max_num_seqs + max(status.max_num_seqs // 8, 1))

    def _stop_asking(self, url: str) -> None:
        for task in self._asking.pop(url, ()):
            task.cancel()

    def _start(self, assignment: Assignment) -> None:
        server = next(server for server in self._servers.all if server.url == assignment.server)
        task = asyncio.create_task(self._ask(assignment.request, server))
        asking = self._asking.setdefault(server.url, set())
        asking.add(task)
        server.asked += 1
        task.add_done_callback(partial(self._stopped, asking, server))

    def _stopped(self, asking: set[asyncio.Task[None]], server: Server, task: asyncio.Task[None]) -> None:
        asking.discard(task)
        server.asked -= 1
        self._servers.tell_change()  # a slot is free

    async def _ask(self, place: int, server: Server) -> None:
        request = self._requests[place]
        try:
            answer = await server.client.generate(self._asked(request), self._servers.config.request_timeout)
        except Slow as failure:
            self._refused(place, server, failure)
        except Unreachable as failure:
            self._servers.lose(server, str(failure))
        except Refused as failure:
            if failure.status == CONFLICT:
                server.drop_connection()  # somebody else's weights; it gets ours again
            elif failure.status in SERVER_UNUSABLE:
                self._servers.lose(server, str(failure))
            else:
                self._refused(place, server, failure)
        except Exception as error:
            self._failure = error
        else:
            if self._dispatcher.finish(place, server.url):
                self._finished[place] = _rollout(request, answer)
                for recovery in self._recoveries.finished(place, time.monotonic()):
                    logger.warning(recovery)

    def _asked(self, request: Request) -> dict[str, Any]:
        one_turn = self._servers.config.turns is None
        return {
            "request": asdict(infer_request(request.prompt)) if one_turn else conversation_in_words(request),
            "sampling": asdict(request_config(self._sampling, request.seed)),
            "weights_version": self._version,
        }

    def _refused(self, place: int, server: Server, failure: ServerFailure) -> None:
        prompt = self._requests[place].prompt
        if self._dispatcher.refuse(place, server.url) < _TRIES:
            logger.warning(f"{server.url} did not complete prompt {prompt.prompt_id}, which is asked again: {failure}")
            return
        self._failure = RuntimeError(
            f"prompt {prompt.prompt_id} could not be completed in {_TRIES} tries, the last by {server.url}: {failure}"
        )


def _rollout(request: Request, answer: Completion) -> Rollout:
    return Rollout(
        prompt=request.prompt,
        prompt_ids=answer.prompt_ids,
        completion_ids=answer.completion_ids,
        logprobs=answer.logprobs,
        text=answer.text,
        finish_reason=answer.finish_reason,
        weights_version=answer.weights_version,
        sampled=answer.sampled,
        messages=answer.messages,
        infos=answer.infos,
    )
