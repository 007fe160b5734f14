"""An external plugin: a scheduler that truncates the first answer and appends a hint, like ms-swift's math_tip_trick.

It then sends user messages until no room is left. The first token of the answer is excluded from the loss.
"""

from __future__ import annotations

from typing import Any

from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

HINT = " wait, "
KEPT = 5


class Hints(MultiTurnScheduler):
    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return False

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        if current_turn > 1:
            infer_request.messages.append({"role": "user", "content": f"Turn {current_turn}."})
            return {"infer_request": infer_request}
        ids = list(response_choice.token_ids)[:KEPT]
        hint = self.tokenizer.encode(HINT, add_special_tokens=False)
        infer_request.messages[-1]["content"] = self.tokenizer.decode(ids) + HINT
        logprobs = self._extract_logprobs_from_choice(response_choice)[:KEPT]
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + hint,
            "response_loss_mask": [0] + [1] * (len(ids) - 1) + [0] * len(hint),
            "rollout_logprobs": logprobs[1:],
        }


multi_turns["hints"] = Hints
