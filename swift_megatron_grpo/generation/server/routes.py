"""This package's routes: status, completions, images, weights; and the state that they share.

One request is one completion, or one conversation with --multi_turn_scheduler; vLLM batches concurrent requests.
Weights have a version. The server generates nothing while new weights arrive, and a failed transfer leaves it without
weights.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import StreamingResponse
from swift.utils import get_logger

from swift_megatron_grpo import __version__
from swift_megatron_grpo.data.images import MAX_PIXELS, check_sent, digest_of
from swift_megatron_grpo.data.recordings import check_heard
from swift_megatron_grpo.data.videos import MAGIC, Frames
from swift_megatron_grpo.generation.conversations.agents import is_agent
from swift_megatron_grpo.generation.conversations.groups import answers_groups
from swift_megatron_grpo.generation.protocol import messages
from swift_megatron_grpo.generation.server import gate, pipe, schema
from swift_megatron_grpo.generation.server.arguments import GRPORolloutArguments
from swift_megatron_grpo.generation.server.health import EngineHealth
from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, new_secret

T = TypeVar("T")
logger = get_logger()
_CLIENT_CLOSED_REQUEST = 499  # the status that web servers log for it; it is never received
_EVERY_INTERFACE = ("", "0.0.0.0", "::")
_LONGEST_NAME = 256  # of a run


def run_of(client: Request) -> messages.RunIdentity | None:
    """Return the run that sends a request, None for a client without one."""
    name, secret = client.headers.get(messages.RUN_HEADER), client.headers.get(messages.RUN_SECRET_HEADER)
    if name is None or not secret:
        return None
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise HTTPException(messages.INVALID, f"the header {messages.RUN_HEADER} must be printable and short")
    return messages.RunIdentity(name, secret)


Run = Annotated[messages.RunIdentity | None, Depends(run_of)]


class RunLease:
    """A lease that at most one run holds, which its secret identifies: a server has one set of weights."""

    def __init__(self) -> None:
        self._run: messages.RunIdentity | None = None
        self._last_seen = 0.0

    def touch(self, run: messages.RunIdentity | None, now: float) -> bool:
        """Record a request from `run`. Returns True if it acquires the lease, that is, no other run is active."""
        acquires = run is not None and not self.is_held_by(run) and self.holder(now) is None
        if acquires:
            self._run = run
        if self.is_held_by(run):
            self._last_seen = now
        return acquires

    def release(self, run: messages.RunIdentity | None) -> None:
        """Release the lease if `run` holds it, so that another run can acquire it at once."""
        if self.is_held_by(run):
            self._run = None

    def is_held_by(self, run: messages.RunIdentity | None) -> bool:
        """Return True if `run` acquired the lease last. It may have expired since, but no other run has acquired it."""
        if run is None or self._run is None:
            return False
        return run.name == self._run.name and hmac.compare_digest(run.secret.encode(), self._run.secret.encode())

    def holder(self, now: float) -> str | None:
        """Return the name of the run that holds the lease; None if that run has been idle for RUN_IDLE_SECONDS."""
        return self._run.name if self._run is not None and now - self._last_seen < messages.RUN_IDLE_SECONDS else None


class RolloutRoutes:
    """The routes of one server, for the engine that it has started."""

    def __init__(
        self,
        args: GRPORolloutArguments,
        commands: pipe.Commands,
        health: EngineHealth,
        engine_settings: Mapping[str, Any],  # as the engine process describes them
    ) -> None:
        self._args = args
        self._commands = commands
        self._health = health
        self._engine_settings = engine_settings
        self._instance = uuid.uuid4().hex
        self._lease = RunLease()
        self.weights_version = messages.NO_WEIGHTS
        self._has_checksums = False  # a load that collected them is complete
        self._hub: Hub | None = None  # at which the processes of the current group meet
        self._joining: asyncio.Task[Any] | None = None
        self.router = APIRouter()
        self.router.get(messages.Routes.STATUS)(self.status)
        self.router.post(messages.Routes.GENERATE)(self.generate)
        self.router.post(messages.Routes.GENERATE_BATCH)(self.generate_batch)
        self.router.put(messages.Routes.IMAGES + "{digest}")(self.put_image)
        self.router.post(messages.Routes.DRAFTS)(self.take_draft_counts)
        self.router.post(messages.Routes.SCORE)(self.score_text)
        self.router.get(messages.Routes.HELD_WEIGHTS)(self.held_weights)
        self.router.post(messages.Routes.JOIN)(self.join)
        self.router.post(messages.Routes.RECEIVE)(self.receive)
        self.router.post(messages.Routes.LEAVE)(self.leave)

    async def status(self, run: Run) -> dict[str, Any]:
        """Return the server's status. A run that requests it acquires the lease if no other run holds it."""
        refuse_if_failed(self._health)
        args = self._args
        conversations = None
        if args.multi_turn_scheduler:
            conversations = messages.ConversationSettings(
                args.multi_turn_scheduler, args.max_turns, args.gym_env, bool(args.use_gym_env),
                reads_media=not (is_agent(args.multi_turn_scheduler) or answers_groups(args.multi_turn_scheduler)),
                answers_groups=answers_groups(args.multi_turn_scheduler),
            )  # fmt: skip
        now = time.monotonic()
        if self._lease.touch(run, now):
            self.weights_version = messages.NO_WEIGHTS  # they belong to another run
            self._joining = None
        return asdict(
            messages.ServerStatus(
                plugin=__version__,
                protocol=messages.PROTOCOL,
                instance=self._instance,
                run=self._lease.holder(now),
                weights_version=self.weights_version,
                world_size=args.world_size,
                enable_lora=args.vllm_enable_lora,
                max_lora_rank=args.vllm_max_lora_rank,
                quantization=args.rollout_quantization,
                batch_invariant=args.batch_invariant,
                drafts=args.drafts,
                returns_experts=args.returns_experts,
                conversations=conversations,
                **self._engine_settings["status"],
            )
        )

    async def generate(self, client: Request, run: Run) -> dict[str, Any]:
        """Generate a completion with the weights that the trainer expects."""
        body: schema.GenerateRequest = gate.checked_body(client.scope)
        self._require_weights(run, body.weights_version, body.newer_weights)
        return await while_connected(client, self._complete(run, body))

    async def generate_batch(self, client: Request, run: Run) -> StreamingResponse:
        """Generate completions, and send each as soon as it ends. Starlette cancels the rest if the client leaves."""
        body: schema.GenerateBatch = gate.checked_body(client.scope)
        for version, newer in {(request.weights_version, request.newer_weights) for request in body.requests}:
            self._require_weights(run, version, newer)
        lines = answer_lines(body.requests, partial(self._complete, run))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _complete(self, run: messages.RunIdentity | None, body: schema.GenerateRequest) -> dict[str, Any]:
        # again: the event loop has served others in between
        self._require_weights(run, body.weights_version, body.newer_weights)
        arguments = body.model_dump(exclude={"weights_version", "newer_weights"}, exclude_unset=True)
        completion = await self._commands.call("generate", **arguments)
        self._health.record_token()
        return completion

    async def take_draft_counts(self, run: Run) -> dict[str, Any]:
        """Return what drafts did for the requests that have ended since the last call."""
        self._require_lease(run)
        if not self._args.drafts:
            raise HTTPException(messages.INVALID, "this server's engine verifies no drafts (--speculative_rollouts)")
        return await self._commands.call("take_draft_counts")

    async def put_image(self, digest: str, client: Request, run: Run) -> dict[str, Any]:
        """Keep an image, a recording or a video, which requests may name by its digest until others need the room."""
        self._require_lease(run)
        content = await client.body()
        if not self._engine_settings["accepts_media"]:
            raise HTTPException(messages.INVALID, "this server's model takes text only")
        if digest_of(content) != digest:
            raise HTTPException(messages.INVALID, "the body does not have the digest in the path")
        kind = "audio" if content[8:12] == b"WAVE" else "video" if content.startswith(MAGIC) else "image"
        try:
            if kind == "audio":
                check_heard(content)
            elif kind == "video":
                Frames.of_file(content)
            else:
                check_sent(content, MAX_PIXELS)
        except ValueError as error:
            raise HTTPException(messages.INVALID, f"the body {error}") from None
        encoded = base64.b64encode(content).decode("ascii")
        return await self._commands.call("put_image", kind=kind, digest=digest, image=encoded)

    async def score_text(self, client: Request, run: Run) -> dict[str, Any]:
        """Return the log-probs of every token but the first, from each replica of the model."""
        body: schema.ScoreRequest = gate.checked_body(client.scope)
        self._require_weights(run, body.weights_version)
        return await self._commands.call("score_text", **body.model_dump(exclude={"weights_version"}))

    async def held_weights(self, run: Run) -> dict[str, Any]:
        """Return what each worker has of the weights that it received last."""
        if run is not None:  # a client without a run may read them
            self._require_lease(run)
        if not self._has_checksums:
            raise HTTPException(messages.CONFLICT, "no weights have been received with collect_checksums true")
        return await self._commands.call("held_weights")

    async def leave(self, run: Run) -> dict[str, Any]:
        """Release the lease, so that the next run need not wait for it to expire."""
        self._lease.release(run)
        return {}

    def _require_weights(self, run: messages.RunIdentity | None, version: int, or_newer: bool = False) -> None:
        self._require_lease(run)
        is_newer = or_newer and self.weights_version > version
        if self.weights_version == messages.NO_WEIGHTS or not (self.weights_version == version or is_newer):
            raise HTTPException(messages.CONFLICT, f"this server has weights {self.weights_version}, not {version}")

    def _require_lease(self, run: messages.RunIdentity | None) -> None:
        self._refuse_if_taken(run)
        if not self._lease.is_held_by(run):
            raise HTTPException(
                messages.CONFLICT, f"this server has no weights of this run; POST {messages.Routes.JOIN} first"
            )

    def _refuse_if_taken(self, run: messages.RunIdentity | None) -> None:
        holder = self._lease.holder(time.monotonic())
        if holder is not None and not self._lease.is_held_by(run):
            raise HTTPException(messages.TAKEN, messages.serves_another(holder))

    async def join(self, client: Request, run: Run) -> dict[str, Any]:
        """Open a rendezvous, to which the trainer connects next. It replaces an earlier one."""
        body: schema.JoinRequest = gate.checked_body(client.scope)
        if run is None:
            raise HTTPException(
                messages.INVALID, f"the headers {messages.RUN_HEADER} and {messages.RUN_SECRET_HEADER} are missing"
            )
        self._refuse_if_taken(run)
        self._lease.touch(run, time.monotonic())
        self.weights_version = messages.NO_WEIGHTS
        everywhere = self._args.host in _EVERY_INTERFACE
        if self._hub is not None:
            self._hub.close()
        size = self._args.world_size + 1
        secret = new_secret()
        try:
            self._hub = Hub(self._args.host or "::", body.port, size, secret)
        except OSError as error:
            reason = f"'port': cannot listen on it: {error.strerror}; use 0, any free port"
            raise HTTPException(messages.INVALID, reason) from error
        host = body.host if everywhere else self._args.host
        rendezvous = Rendezvous(host, self._hub.port, size, secret, body.timeout)
        self._joining = asyncio.create_task(self._without_tokens("join", rendezvous=asdict(rendezvous)))
        self._joining.add_done_callback(partial(_close_unless_joined, self._hub))
        return asdict(rendezvous) | {"host": body.host}

    async def receive(self, client: Request, run: Run) -> dict[str, Any]:
        """Receive the weights that the trainer is sending; respond once all are loaded."""
        body: schema.ReceiveRequest = gate.checked_body(client.scope)
        self._require_lease(run)
        if self._joining is None:
            raise HTTPException(
                messages.CONFLICT, f"no trainer has joined this server; POST {messages.Routes.JOIN} first"
            )
        if body.in_flight:
            self._check_in_flight(body.version)
        else:
            self.weights_version = messages.NO_WEIGHTS
        try:
            await self._joining
            report = await self._without_tokens("receive", **body.model_dump())
        except HTTPException:
            self.weights_version = messages.NO_WEIGHTS
            self._joining = None  # the workers have left the group
            self._has_checksums = False
            raise
        self._has_checksums = self._has_checksums or body.collect_checksums
        if self._lease.is_held_by(run):
            self.weights_version = body.version
        return report

    def _check_in_flight(self, version: int) -> None:
        """Refuse weights with which requests cannot continue. The versions of a completion's tokens ascend."""
        if not self._engine_settings["status"]["updates_in_flight"]:
            raise HTTPException(messages.INVALID, "'in_flight': this server's engine loads weights only while idle")
        if not messages.NO_WEIGHTS < self.weights_version < version:
            reason = f"'in_flight': this server has weights {self.weights_version}, and {version} cannot follow them"
            raise HTTPException(messages.CONFLICT, reason)

    async def _without_tokens(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Run a command during which the engine generates nothing."""
        with self._health.suspended():
            return await self._commands.call(command, **arguments)


def refuse_if_failed(health: EngineHealth) -> None:
    """Refuse a request for the status of a server whose engine is stuck: it is about to end."""
    if health.failure is not None:
        raise HTTPException(messages.ENGINE_GONE, health.failure)


def _close_unless_joined(hub: Hub, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        hub.close()
        logger.error(f"a trainer requested a rendezvous but did not connect: {task.exception()}")


# ---- responses that take long: each part is sent as soon as it is known, and a client may leave before


async def answer_lines(
    requests: Sequence[T], complete: Callable[[T], Awaitable[dict[str, Any]]]
) -> AsyncIterator[bytes]:
    """Yield lines of JSON in any order, several together if they are known at the same time.

    A line has `place`, the request's place in the batch, and either `completion` or `status` and `detail`, with which
    the request alone would have been refused. Ending this early cancels the rest.
    """
    known: asyncio.Queue[bytes] = asyncio.Queue()

    async def respond(place: int, request: T) -> None:
        try:
            outcome: dict[str, Any] = {"completion": await complete(request)}
        except HTTPException as refusal:
            outcome = {"status": refusal.status_code, "detail": refusal.detail}
        except Exception:
            outcome = {"status": 500, "detail": gate.log_failure("a request of a batch")}
        known.put_nowait(json.dumps({"place": place} | outcome).encode() + b"\n")

    tasks = [asyncio.create_task(respond(place, request)) for place, request in enumerate(requests)]
    try:
        missing = len(tasks)
        while missing:
            lines = [await known.get()]
            while not known.empty():
                lines.append(known.get_nowait())
            missing -= len(lines)
            yield b"".join(lines)
    finally:
        for task in tasks:
            task.cancel()


async def while_connected(client: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it if the client disconnects. The request body must have been read."""

    async def disconnect() -> None:
        while (await client.receive())["type"] != "http.disconnect":
            pass

    working, disconnecting = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([working, disconnecting], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client has disconnected")
        return working.result()
    finally:
        working.cancel()
        disconnecting.cancel()
