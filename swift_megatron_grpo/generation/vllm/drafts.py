"""Drafts for the requests that run in vLLM's first model runner, on a CPU, from texts that share a prompt.

A draft is what came before after the last tokens of a request: in its prompt, in its group's completions so far, or in
completions of earlier rollouts. vLLM loads `GroupDrafts` by its name, as the `custom_class` of a speculative
configuration, and schedules and verifies what it proposes. Ranks that share an engine schedule each for themselves, so
drafts depend on nothing but tokens, which all of them have.

In the training processes a generation ends for all requests at once, and the trainer brings the completions of all
ranks. A rollout server gets requests one by one: there each is remembered and forgotten as it ends.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from swift_megatron_grpo.generation.vllm.texts import Texts
from swift_megatron_grpo.types import DraftCounts

# Drafts that a step verifies at most. On an H200 up to 64 more rows take 2 to 13 % of a decode step of 1.7B and 8B
# (docs/speculation.md); with more, a step takes longer than accepted drafts shorten it unless most are accepted.
ROWS = 64
HISTORY_BYTES = 2**28
COMPLETIONS_OF_A_PROMPT = 32  # the newest ones; older ones are rarely what matches longest
# Tokens in the index of what runs and what it is drafted from. One takes up to 0.7 KB, and less where texts repeat.
INDEXED_TOKENS = 2**21
_OBJECT_BYTES = 128  # of an array and of what holds it, beyond its tokens


def engine_settings(most: int) -> dict[str, Any]:
    """Return vLLM's settings of an engine that verifies up to `most` drafts of a request in a step."""
    name = f"{GroupDrafts.__module__}.{GroupDrafts.__name__}"
    return {"speculative_config": {"method": "custom_class", "model": name, "num_speculative_tokens": most}}


class History:
    """Completions of earlier rollouts by prompt, in 4 bytes a token. The prompts completed longest ago make room."""

    def __init__(self, most_bytes: int = HISTORY_BYTES) -> None:
        self._most_bytes = most_bytes
        self.bytes = 0
        self._completions: dict[bytes, deque[array[int]]] = {}  # by prompt; the one completed last is last

    def remember(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        key = key_of_prompt(prompt)
        kept = self._completions.pop(key, None)
        if kept is None:
            kept = deque()
            self.bytes += len(key) + _OBJECT_BYTES
        self._completions[key] = kept
        kept.append(array("i", completion))
        self.bytes += _size(kept[-1])
        if len(kept) > COMPLETIONS_OF_A_PROMPT:
            self.bytes -= _size(kept.popleft())
        while self.bytes > self._most_bytes:
            oldest = next(iter(self._completions))
            self.bytes -= len(oldest) + _OBJECT_BYTES + sum(map(_size, self._completions.pop(oldest)))

    def of(self, prompt: Sequence[int]) -> Iterable[array[int]]:
        return self._completions.get(key_of_prompt(prompt), ())


def key_of_prompt(prompt: Sequence[int]) -> bytes:
    return array("i", prompt).tobytes()


def _size(completion: array[int]) -> int:
    return completion.itemsize * len(completion) + _OBJECT_BYTES


@dataclass(slots=True)
class _Prompt:
    """A prompt that runs."""

    key: bytes
    texts: Texts
    indexed: int = 0  # tokens in `texts`
    running: int = 0  # requests


@dataclass(slots=True)
class _Followed:
    """A request that runs."""

    state: Any  # vLLM's; names may be used again
    text: list[int]  # its prompt, and what is sampled so far
    prompt: _Prompt


class GroupDrafts:
    """Proposes drafts in the worker of an engine. `follow` comes before the first request."""

    def __init__(self, vllm_config: Any, indexed_tokens: int = INDEXED_TOKENS) -> None:
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        self._runner: Any = None
        self._remembers = False
        self._history = History()
        self._prompts: dict[bytes, _Prompt] = {}  # that run
        self._room = self._most_indexed = indexed_tokens
        self._followed: dict[str, _Followed] = {}  # by the request's name
        self._counts = DraftCounts()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load nothing: there is no draft model."""

    def follow(self, runner: Any, remembers: bool = False) -> None:
        """Take part in the steps of this model runner, which hands out its requests' names no other way.

        `remembers`: what ends is drafted from, and nobody calls `remember` or `end_generation`.
        """
        self._runner, self._remembers = runner, remembers
        # vLLM asks for no drafts of any request while one is near the end of the context. Here each has its own limit.
        runner.effective_drafter_max_model_len = self._longest + self._most

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return drafts for each request of a step that has sampled these tokens."""
        self._end_requests()
        names = self._runner.input_batch.req_ids
        requests = [
            self._followed_by(name) if new else None for name, new in zip(names, sampled_token_ids, strict=True)
        ]
        for request in requests:
            if request is not None:
                self._catch_up(request)
        depth = min(self._most, ROWS // len(names)) if names else 0
        drafts = [[] if request is None else self._draft(request, depth) for request in requests]
        steps = sum(request is not None for request in requests)
        self._counts += DraftCounts(steps=steps, drafted=sum(map(len, drafts)))
        return drafts

    def remember(self, completions: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Draft from these prompts and completions from now on. Every rank of an engine calls it with the same."""
        for prompt, completion in completions:
            self._history.remember(prompt, completion)

    def end_generation(self, tokens: int) -> None:
        """Forget the requests, which have ended after so many tokens."""
        self._counts += DraftCounts(tokens=tokens)
        self._followed.clear()
        self._prompts.clear()
        self._room = self._most_indexed

    def take_counts(self) -> DraftCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, DraftCounts()
        return counts

    def _end_requests(self) -> None:
        """Remember the completions that have ended, and forget their requests; in order, which ranks have in common."""
        if not self._remembers:
            return
        runs = self._runner.requests
        for name in [name for name, each in self._followed.items() if runs.get(name) is not each.state]:
            request = self._followed.pop(name)
            begin, prompt = len(request.state.prompt_token_ids), request.prompt
            self._history.remember(request.text[:begin], request.text[begin:])
            prompt.running -= 1
            if not prompt.running:
                self._room += self._prompts.pop(prompt.key).indexed

    def _followed_by(self, name: str) -> _Followed | None:
        """Return the request of this name; None: it is not drafted for, because that would not be exact."""
        state = self._runner.requests[name]
        found = self._followed.get(name)
        if found is not None and found.state is state:
            return found
        params = state.sampling_params
        if params.seed is None or params.min_p or params.structured_outputs is not None:
            return None
        prompt: list[int] = list(state.prompt_token_ids)
        self._followed[name] = found = _Followed(state, prompt, self._prompt_of(prompt))
        found.prompt.running += 1
        return found

    def _prompt_of(self, tokens: Sequence[int]) -> _Prompt:
        key = key_of_prompt(tokens)
        if key not in self._prompts:
            self._prompts[key] = prompt = _Prompt(key, Texts(()))
            self._index(prompt, tokens, begin=1)
            for completion in self._history.of(tokens):
                self._index(prompt, [*tokens, *completion], begin=len(tokens))
        return self._prompts[key]

    def _catch_up(self, request: _Followed) -> None:
        """Take over what was sampled since, in one step or while the request was away."""
        begin, state = len(request.text), request.state
        new = state.output_token_ids[begin - len(state.prompt_token_ids) :]
        request.text += new
        self._index(request.prompt, request.text, begin)
        if self._remembers:
            self._counts += DraftCounts(tokens=_up_to_stop(new, state.sampling_params.all_stop_token_ids))

    def _index(self, prompt: _Prompt, text: Sequence[int], begin: int) -> None:
        """Draft from the tokens from `begin` on, unless the index is full."""
        tokens = len(text) - begin
        if tokens <= self._room:
            prompt.texts.add(text, begin)
            prompt.indexed += tokens
            self._room -= tokens

    def _draft(self, request: _Followed, depth: int) -> list[int]:
        """Return up to `depth` tokens, as many as the request has room for behind the token of their step."""
        state, size = request.state, len(request.text)
        generated = size - len(state.prompt_token_ids)
        room = min(self._longest - size, state.sampling_params.max_tokens - generated) - 1
        most = min(depth, room)
        return list(request.prompt.texts.draft(request.text, most)) if most > 0 else []


def _up_to_stop(tokens: Sequence[int], stops: Container[int]) -> int:
    """Return how many of these tokens a completion has, which ends with the first stop token."""
    return next((place for place, token in enumerate(tokens, 1) if token in stops), len(tokens))
