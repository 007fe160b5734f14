"""Replays a dumped rollout as an engine with drafts would decode it: a draft is accepted where it is the dumped token.

With noise that belongs to a position of a request, as `--seed_completions true` draws it, this is what an engine does:
drafts decide how many steps a completion takes and never what it says. With vLLM's own verification it is unbiased,
because a draft is accepted with its probability.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swift_megatron_grpo.generation.vllm.texts import Texts


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens of a request. Those that an environment wrote between turns are prompts, not sampled."""

    prompt: tuple[int, ...]
    tokens: Sequence[int]
    sampled: Sequence[bool] | None = None  # None: all


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of the steps in which one number of requests was running."""

    steps: int = 0
    requests: int = 0  # running in each of them, summed
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.steps + other.steps,
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


class _Request:
    """A completion on its way: its text so far, and the draft that the next step verifies."""

    def __init__(self, completion: Completion) -> None:
        self._tokens = completion.tokens
        self._sampled = completion.sampled or [True] * len(completion.tokens)
        self.prompt = completion.prompt
        self.text = list(completion.prompt)
        self.draft: Sequence[int] = ()
        self.remembered = len(self.text)  # tokens that Texts has
        self.begins_turn = True  # its next step decodes a prompt, so it verifies no draft
        self._take(0)

    @property
    def is_complete(self) -> bool:
        return len(self.text) == len(self.prompt) + len(self._tokens)

    def verify(self) -> Tally:
        """Append the accepted tokens and the one that the step samples after them."""
        place = len(self.text) - len(self.prompt)
        rest = next((i for i in range(place, len(self._tokens)) if not self._sampled[i]), len(self._tokens)) - place
        accepted = 0
        for drafted, token in zip(self.draft, self._tokens[place : place + rest], strict=False):
            if drafted != token:
                break
            accepted += 1
        new = min(accepted + 1, rest)
        self._take(new)
        self.begins_turn = new == rest
        return Tally(0, 1, new, len(self.draft), accepted)

    def _take(self, count: int) -> None:
        """Append `count` tokens, and those of an environment behind them."""
        place = len(self.text) - len(self.prompt)
        end = place + count
        while end < len(self._tokens) and not self._sampled[end]:
            end += 1
        self.text += self._tokens[place:end]


def replay(
    rollout: Sequence[Completion], earlier: Iterable[Completion], depth: int, most_running: int
) -> Mapping[int, Tally]:
    """Return what the steps of a rollout did, by the number of requests that were running.

    All drafts of a step come from what was sampled before it. `earlier`: completions of earlier rollouts. Requests
    begin in their order, as many at one time as `most_running`. The step of a prompt samples one token.
    """
    texts = {completion.prompt: Texts(completion.prompt) for completion in rollout}
    for completion in earlier:
        if completion.prompt in texts:
            text = [*completion.prompt, *completion.tokens]
            texts[completion.prompt].add(text, begin=len(completion.prompt))
    waiting = deque(request for request in map(_Request, rollout) if not request.is_complete)
    running: list[_Request] = []
    tallies: defaultdict[int, Tally] = defaultdict(Tally)
    while waiting or running:
        while waiting and len(running) < most_running:
            running.append(waiting.popleft())
        step = Tally(steps=1)
        for request in running:
            step += request.verify()
        tallies[len(running)] += step
        for request in running:
            texts[request.prompt].add(request.text, begin=request.remembered)
            request.remembered = len(request.text)
        running = [request for request in running if not request.is_complete]
        for request in running:
            starts = request.begins_turn or not depth
            request.draft = () if starts else texts[request.prompt].draft(request.text, depth)
    return dict(tallies)
