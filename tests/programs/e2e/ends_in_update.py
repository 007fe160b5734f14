"""An external plugin of `swift rollout`: when it has a part of weights that arrive in flight, it is killed or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from swift_megatron_grpo.generation.server import weight_receiver
from swift_megatron_grpo.generation.server.engine_thread import EngineThread

update, unpack = EngineThread._update, weight_receiver.unpack
ENDED = Path(os.environ["ENDED"])  # exists once it has happened
TENSORS = 5  # that it loads before its end
tokens: list[int] = []  # of each request that is being generated


@wraps(update)
def update_once(self: EngineThread, engine: Any, *args: Any, **kwargs: Any) -> None:
    requests = engine.engine_core.engine_core.scheduler.requests.values()
    tokens[:] = [request.num_output_tokens for request in requests]
    update(self, engine, *args, **kwargs)


@wraps(unpack)
def unpack_a_part(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    for number, item in enumerate(unpack(*args, **kwargs)):
        if any(tokens) and number == TENSORS and not ENDED.exists():
            ENDED.write_text(str(tokens))
            if "HANGS" in os.environ:
                time.sleep(3600)
            for process in (os.getppid(), os.getpid()):
                os.kill(process, signal.SIGKILL)
        yield item


EngineThread._update = update_once  # type: ignore[method-assign]
weight_receiver.unpack = unpack_a_part
