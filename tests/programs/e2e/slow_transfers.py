"""External plugin for a trainer under test: each transfer of weights to a server lasts three seconds.

TRANSFERS is a folder in which a file tells, while a rank sends, how many transfers it has begun. No number changes.
"""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

from swift_megatron_grpo.generation.remote.weight_sender import Message, WeightConnection

SECONDS = 3.0
original_finish, begun = WeightConnection.finish, count(1)


def slow_finish(self: WeightConnection, end: Message) -> Exception | None:
    sending = Path(os.environ["TRANSFERS"], f"rank {os.environ['RANK']}")
    sending.write_text(str(next(begun)))
    time.sleep(SECONDS)
    sending.unlink()
    return original_finish(self, end)


WeightConnection.finish = slow_finish  # type: ignore[method-assign]
