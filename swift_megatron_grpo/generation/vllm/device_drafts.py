"""Drafts for the requests that run in vLLM's second model runner, from the texts of their prompt on the device.

The second runner schedules a step before the tokens of the last one are known to the host. So drafts are looked for on
the device, in vLLM's own rows of running requests and in completions that have ended (draft_kernel.py). The host knows
which texts have a prompt in common. Ranks that share an engine have the same tokens, and so the same drafts.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from swift_megatron_grpo.generation.vllm.drafts import COMPLETIONS_OF_A_PROMPT, ROWS, key_of_prompt
from swift_megatron_grpo.generation.vllm.kept_texts import KeptTexts
from swift_megatron_grpo.generation.vllm.texts import MOST_MATCHED
from swift_megatron_grpo.types import DraftCounts

METHOD = "ngram_gpu"  # of vLLM, in whose place `DeviceDrafts` is built (second_runner.py)
SOURCES = 32  # texts in which the drafts of a request are looked for


def depth_of(most: int, running: int) -> int:
    """Return how many drafts of each request a step verifies while so many run: 0, 1, 3, 7 or 15.

    One row more than drafts is then a power of two. vLLM 0.32 looks only among the next larger CUDA graphs of a whole
    step, and with 5 rows of a request that is often one of 2 or 3 rows, which it cannot use. It then launches layer by
    layer.
    """
    room = min(most, ROWS // running)
    return (1 << ((room + 1).bit_length() - 1)) - 1


def engine_settings(most: int, at_once: int) -> dict[str, Any]:
    """Return vLLM's settings of an engine that runs up to `at_once` requests, each with up to `most` drafts."""
    depths = [depth_of(most, running) for running in range(1, at_once + 1)]
    firsts = [place for place in range(at_once) if place == 0 or depths[place] != depths[place - 1]]
    ranges = [
        (first + 1, end, depths[first]) for first, end in zip(firsts, [*firsts[1:], at_once], strict=True)
    ]  # of running requests, and the drafts of each
    return {
        "speculative_config": {
            "method": METHOD,
            "num_speculative_tokens": depths[0],
            "prompt_lookup_min": 1,
            "prompt_lookup_max": MOST_MATCHED,
            "num_speculative_tokens_per_batch_size": ranges,
        }
    }


@dataclass(slots=True)
class _Prompt:
    """The texts of a prompt."""

    slots: list[int] = field(default_factory=list)  # of requests that run, in vLLM's state
    kept: deque[int] = field(default_factory=deque)  # numbers of completions, the newest first


class DeviceDrafts:
    """Stands in for vLLM's n-gram speculator. vLLM's model runner reads the attributes without a line of ours."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0

    def __init__(self, vllm_config: Any, device: torch.device, state: Any) -> None:
        """`state`: vLLM's RequestState, whose rows are read, and which says when a request begins and ends."""
        from swift_megatron_grpo.generation.vllm.draft_kernel import blocks_of

        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._state = state
        self._prompts: dict[bytes, _Prompt] = {}
        self._prompt_of_slot: dict[int, bytes] = {}
        self._prompt_of_text: dict[int, bytes] = {}
        self._ended = set[int]()  # texts of this generation, which `remember` brings again
        self._kept = KeptTexts(device, self._forget)
        self._changed = set[bytes]()  # prompts whose texts have changed since they were sent to the device
        self._sources_here = np.full((state.max_num_reqs, SOURCES), -1, np.int32)
        self._sources = torch.full((state.max_num_reqs, SOURCES), -1, dtype=torch.int32, device=device)
        self._drafts = torch.zeros((state.max_num_reqs, self._most), dtype=torch.int64, device=device)
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)  # steps of requests, drafts, sampled tokens
        self._tokens = 0  # of completions
        self._remembers = False
        shape = (state.max_num_reqs, SOURCES, blocks_of(state.max_model_len))
        self._scores = torch.zeros(shape, dtype=torch.int64, device=device)
        self._add, self._remove = state.add_request, state.remove_request
        state.add_request, state.remove_request = self._begin, self._end

    # ---- what vLLM calls

    def init_cudagraph_manager(self, *_: Any) -> None: ...

    def capture(self) -> None: ...

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: Any,
        last_sampled: torch.Tensor,
        *_: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        """Return drafts [requests, most] of a step, which has sampled `num_sampled` [requests] tokens of each.

        The names are vLLM's, because its dummy runs pass every argument by name.
        """
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        depth = self._most if num_speculative_tokens is None else num_speculative_tokens
        new = num_sampled[: input_batch.num_reqs]
        steps = (new > 0).sum()
        self._counts += torch.stack([steps, steps * depth, new.sum()])
        if depth:
            from swift_megatron_grpo.generation.vllm.draft_kernel import Kept, Running, propose

            self._send_sources()
            state, kept = self._state, self._kept
            running = Running(state.all_token_ids.gpu, state.total_len.gpu, state.prompt_len.gpu)
            ended = Kept(kept.tokens, kept.begins, kept.starts, kept.lengths)
            propose(running, ended, self._sources, input_batch.idx_mapping, num_sampled, last_sampled,
                    self._scores[: input_batch.num_reqs], drafts)  # fmt: skip
        return drafts

    def _begin(self, req_id: str, prompt_len: int, all_token_ids: Sequence[int], **others: Any) -> None:
        self._add(req_id=req_id, prompt_len=prompt_len, all_token_ids=all_token_ids, **others)
        slot, key = self._state.req_id_to_index[req_id], key_of_prompt(all_token_ids[:prompt_len])
        self._prompt_of_slot[slot] = key
        self._prompts.setdefault(key, _Prompt()).slots.append(slot)
        self._changed.add(key)

    def _end(self, req_id: str) -> int | None:
        slot: int | None = self._remove(req_id)
        if slot is not None and (key := self._prompt_of_slot.pop(slot, None)) is not None:
            self._prompts[key].slots.remove(slot)
            self._changed.add(key)
            state = self._state
            begin = max(int(state.prompt_len.np[slot]) - MOST_MATCHED, 0)
            end = min(int(state.max_seq_len[slot]), state.max_model_len)
            row, length = state.all_token_ids.gpu[slot, begin:end], state.total_len.gpu[slot] - begin
            number = self._kept.copy(row, length, int(state.prompt_len.np[slot]) - begin - 1)
            self._keep(number, key)
            if number is not None:
                self._ended.add(number)
        return slot

    # ---- what the engine calls; all of its ranks make the same calls

    def follow(self, runner: Any, remembers: bool = False) -> None:
        """`remembers`: nobody calls `remember` or `end_generation`. What ends is kept anyway."""
        self._remembers = remembers

    def remember(self, completions: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Draft from these prompts and completions from now on."""
        for prompt, completion in completions:
            end = list(prompt[-MOST_MATCHED:])
            self._keep(self._kept.add([*end, *completion], len(end) - 1), key_of_prompt(prompt))

    def end_generation(self, tokens: int) -> None:
        """Forget what this generation has completed, so many tokens: `remember` brings it, with that of other ranks."""
        self._tokens += tokens
        for number in sorted(self._ended):
            self._forget(number)

    def take_counts(self) -> DraftCounts:
        """Return the counts since the last call; on a server, with the tokens behind stop tokens."""
        steps, drafted, sampled = self._counts.tolist()
        counts = DraftCounts(sampled if self._remembers else self._tokens, steps, drafted)
        self._counts.zero_()
        self._tokens = 0
        return counts

    def _keep(self, number: int | None, key: bytes) -> None:
        if number is None:
            return
        texts = self._prompts.setdefault(key, _Prompt())
        texts.kept.appendleft(number)
        self._prompt_of_text[number] = key
        self._changed.add(key)
        if len(texts.kept) > COMPLETIONS_OF_A_PROMPT:
            self._forget(texts.kept[-1])

    def _forget(self, number: int) -> None:
        self._ended.discard(number)
        key = self._prompt_of_text.pop(number, None)
        if key is None:
            return
        texts = self._prompts[key]
        texts.kept.remove(number)
        self._changed.add(key)
        if not texts.kept and not texts.slots:
            del self._prompts[key]

    def _send_sources(self) -> None:
        """Send which texts belong to each running request: itself, the rest of its group, and the newest that ended."""
        if not self._changed:
            return
        slots = self._state.max_num_reqs
        for key in self._changed & self._prompts.keys():
            texts = self._prompts[key]
            for slot in texts.slots:
                others = [other for other in texts.slots if other != slot]
                row = [slot, *others, *(slots + number for number in texts.kept)][:SOURCES]
                self._sources_here[slot] = [*row, *[-1] * (SOURCES - len(row))]
        self._changed.clear()
        sent = torch.tensor(self._sources_here)  # a copy: these rows may change before it has arrived
        self._sources.copy_(sent.pin_memory() if self._sources.is_cuda else sent, non_blocking=True)
