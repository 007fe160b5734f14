"""Tools that block a thread, such as a request by a library without asyncio: others continue while they wait.

An environment or a scheduler of a plugin says so by an attribute of its class, `blocks = True`. All others run in the
main thread, because signals work there only: in a thread, math_verify would grade every answer with 0.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from swift.rollout import MultiTurnScheduler
from swift.rollout.multi_turn import GYMScheduler, OpenEnvScheduler

T = TypeVar("T")
_HOOKS = ("on_trajectory_start", "on_turn_end")  # of a scheduler, both of which wait for tools
_METHODS = ("reset", "step", "close")  # of an environment


def run_blocking_tools_in_threads(scheduler: MultiTurnScheduler) -> None:
    """Move the hooks of a scheduler that blocks, or the methods of its environments that block, into threads.

    The hooks of ms-swift's OpenEnvScheduler block, except where a subclass replaces them.
    """
    for name in _HOOKS:
        if _blocks(scheduler) or vars(OpenEnvScheduler)[name] is inspect.getattr_static(type(scheduler), name):
            setattr(scheduler, name, in_threads(getattr(scheduler, name)))
    if isinstance(scheduler, GYMScheduler):
        create = scheduler._create_env

        def create_environment(config: dict[str, Any]) -> Any:
            environment = create(config)
            for name in _METHODS if _blocks(environment) else ():
                setattr(environment, name, in_threads(getattr(environment, name)))
            return environment

        scheduler._create_env = create_environment


def _blocks(tool: Any) -> bool:
    return hasattr(type(tool), "blocks") and bool(type(tool).blocks)


def in_threads(function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Awaitable[T]]:
    """Return a function that runs a coroutine in a thread and an event loop of its own.

    The thread does not keep the process from ending, because a tool may never return. One that waits with `await` is
    cancelled with its conversation.
    """

    async def in_thread(*arguments: Any) -> T:
        result: Future[T] = Future()
        begun: Future[Callable[[], object]] = Future()  # with what cancels the coroutine

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            begun.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
            return await function(*arguments)

        def run() -> None:
            try:
                result.set_result(asyncio.run(cancellable()))
            except BaseException as error:
                result.set_exception(error)

        result.set_running_or_notify_cancel()  # the thread may end after its conversation was cancelled
        Thread(target=run, name="tool", daemon=True).start()
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            begun.add_done_callback(_cancel)
            raise

    return in_thread


def _cancel(begun: "Future[Callable[[], object]]") -> None:
    with suppress(RuntimeError):  # it has ended, and its loop is closed
        begun.result()()
