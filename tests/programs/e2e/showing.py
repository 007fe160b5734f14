"""An external plugin: a scheduler that shows a second image in its second turn, and asks once more in a third one.

The images that it reports are those of the whole conversation, in order. With PLAYED, it adds a recording as well.
"""

from __future__ import annotations

import os
from typing import Any

from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Showing(MultiTurnScheduler):
    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn == 3

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        question = "Again?"
        if current_turn == 1:
            infer_request.images = [*infer_request.images, os.environ["SHOWN"]]
            question = "<image>And this one?"
            if "PLAYED" in os.environ:
                infer_request.audios = [*infer_request.audios, os.environ["PLAYED"]]
                question += "<audio>"
        infer_request.messages.append({"role": "user", "content": question})
        return {"infer_request": infer_request, "rollout_infos": {"images": list(infer_request.images)}}


multi_turns["showing"] = Showing
