"""A second prompt for the teacher, from the column `teacher_prompt`: what the policy shall know without being told."""

from collections.abc import Callable, Sequence
from typing import Any

from swift.template import Template

from swift_megatron_grpo.data.encoders import encoder_of
from swift_megatron_grpo.types import Prompt, Rollout, TokenSequence

COLUMN = "teacher_prompt"  # ms-swift's name: the text takes the place of the last turn of the user


def teacher_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt that the teacher reads: the policy's own, if the row has no other."""
    text, messages = prompt.row.get(COLUMN), list(prompt.row["messages"])
    if not text:
        return prompt
    place = max(place for place, message in enumerate(messages) if message["role"] == "user")
    messages[place] = {**messages[place], "content": text}
    return Prompt(prompt.prompt_id, {**prompt.row, "messages": messages})


class TeacherPrompts:
    """Puts completions behind the prompts of the teacher. `request`: turns a prompt into what the template encodes."""

    def __init__(self, template: Template, request: Callable[[Prompt], Any]) -> None:
        self._encoder, self._request = encoder_of(template), request

    def tokens(self, rollouts: Sequence[Rollout]) -> list[list[int] | None]:
        """Return the teacher's tokens for each sequence of the completions; None: its row has no second prompt."""
        encoded: dict[str, list[int]] = {}  # by prompt: its completions share one

        def behind(rollout: Rollout, sequence: TokenSequence) -> list[int] | None:
            prompt = rollout.prompt
            if not prompt.row.get(COLUMN):
                return None
            if prompt.prompt_id not in encoded:
                encoded[prompt.prompt_id] = self._encode(teacher_prompt(prompt))
            return encoded[prompt.prompt_id] + self._completion(rollout, sequence)

        return [behind(rollout, sequence) for rollout in rollouts for sequence in rollout.sequences]

    def _completion(self, rollout: Rollout, sequence: TokenSequence) -> list[int]:
        if rollout.messages is None:
            return sequence.completion_ids
        # With several turns, the tokens before the first trained one may include turns that the teacher reads as well.
        own = self._encode(rollout.prompt)
        if sequence.prompt_ids[: len(own)] != own:
            raise RuntimeError(
                f"the conversation of prompt {rollout.prompt.prompt_id} does not begin with its prompt: an environment "
                f"or a scheduler has changed it, so the column {COLUMN} cannot take its place; remove the column"
            )
        return sequence.prompt_ids[len(own) :] + sequence.completion_ids

    def _encode(self, prompt: Prompt) -> list[int]:
        return list(self._encoder.encode(self._request(prompt))["input_ids"])
