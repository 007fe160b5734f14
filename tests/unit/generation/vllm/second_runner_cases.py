"""Samples requests with vLLM's own state and sampler of its second model runner, with and without drafts.

vLLM cannot start that runner on a CPU. Its state and its noise run here in Triton's interpreter; a table of logits
stands in for the model.

TRITON_INTERPRET=1 python -m tests.unit.generation.vllm.second_runner_cases
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from swift_megatron_grpo.generation.vllm import device_drafts
from swift_megatron_grpo.generation.vllm.device_drafts import DeviceDrafts

CPU = torch.device("cpu")
VOCABULARY, LONGEST, MOST, LENGTH = 12, 60, 3, 14
PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 4, 5], [1, 2, 3], [4, 5, 6, 4, 5]]
AT_ONCE = 4  # of the five: one begins when another has ended


def use_interpreter() -> None:
    """Let vLLM find Triton and no pinned memory, as it does on a GPU and on a CPU."""
    import triton
    import triton.language as tl
    import vllm

    assert vllm
    found: Any = ModuleType("vllm.triton_utils")
    found.HAS_TRITON, found.triton, found.tl = True, triton, tl
    sys.modules["vllm.triton_utils"] = found
    buffers: Any = importlib.import_module("vllm.v1.worker.gpu.buffer_utils")
    buffers.is_uva_available = lambda: False


def logits_of(text: list[int]) -> torch.Tensor:
    """Return logits that depend on the last two tokens; they are sharp enough for texts to repeat."""
    generator = torch.Generator().manual_seed(31 * text[-1] + text[-2])
    return torch.randn(VOCABULARY, generator=generator) * 8


class Engine:
    def __init__(self, drafts: bool) -> None:
        from vllm.v1.worker.gpu.states import RequestState

        self.state = RequestState(AT_ONCE, LONGEST, 64, MOST, VOCABULARY, CPU, use_dense_all_token_ids=True)
        settings = SimpleNamespace(num_speculative_tokens=MOST)
        self.drafts = DeviceDrafts(SimpleNamespace(speculative_config=settings), CPU, self.state) if drafts else None
        self.steps = 0

    def generate(self, seeds: list[int]) -> list[list[int]]:
        waiting = list(range(len(PROMPTS)))
        texts: dict[int, list[int]] = {}
        proposed: dict[int, list[int]] = {}  # drafts of running requests
        done: dict[int, list[int]] = {}
        while len(done) < len(PROMPTS):
            for number in [number for number in texts if number not in done and self.is_done(number, texts[number])]:
                done[number] = texts[number][: len(PROMPTS[number]) + LENGTH]
                self.state.remove_request(str(number))
            while waiting and self.state.free_indices:
                number = waiting.pop(0)
                texts[number], proposed[number] = list(PROMPTS[number]), []
                prompt = texts[number]
                self.state.add_request(
                    req_id=str(number), prompt_len=len(prompt), all_token_ids=list(prompt), num_computed_tokens=0,
                    max_tokens=LENGTH,
                )  # fmt: skip
            self.state.apply_staged_writes()
            running = [number for number in texts if number not in done]
            if running:
                self.step(running, texts, proposed, seeds)
        if self.drafts is not None:
            self.drafts.end_generation(sum(len(text) for text in done.values()))
        return [done[number][len(prompt) :] for number, prompt in enumerate(PROMPTS)]

    def is_done(self, number: int, text: list[int]) -> bool:
        return len(text) >= len(PROMPTS[number]) + LENGTH

    def step(
        self, running: list[int], texts: dict[int, list[int]], proposed: dict[int, list[int]], seeds: list[int]
    ) -> None:
        """Sample every row as vLLM does: the row of the last token, and one for each draft."""
        from swift_megatron_grpo.generation.vllm.second_runner import verify

        state = self.state
        slots = torch.tensor([state.req_id_to_index[str(number)] for number in running])
        inputs, positions, logits, rows, ends = [], [], [], [], [0]
        for number, slot in zip(running, slots.tolist(), strict=True):
            for at in range(len(proposed[number]) + 1):
                text = texts[number] + proposed[number][:at]
                inputs.append(text[-1])
                positions.append(len(text) - 1)
                logits.append(logits_of(text))
                rows.append(slot)
            ends.append(len(inputs))
        seed_of_slot = torch.zeros(AT_ONCE, dtype=torch.int64)
        for number, slot in zip(running, slots.tolist(), strict=True):
            seed_of_slot[slot] = seeds[number]
        tokens, counts = verify(
            torch.stack(logits), None, torch.tensor(inputs), torch.tensor(ends, dtype=torch.int32),
            torch.tensor(positions), slots, torch.tensor(rows), torch.zeros(len(rows)), torch.ones(AT_ONCE),
            seed_of_slot, MOST, None,
        )  # fmt: skip
        self.steps += len(running)
        last = torch.zeros(AT_ONCE, 1, dtype=torch.int64)
        for row, (number, slot) in enumerate(zip(running, slots.tolist(), strict=True)):
            new = tokens[row, : counts[row]].tolist()
            size = len(texts[number])
            texts[number] += new
            state.all_token_ids.gpu[slot, size : size + len(new)] = torch.tensor(new, dtype=torch.int32)
            state.total_len.gpu[slot] = len(texts[number])
            last[slot] = new[-1]
            proposed[number] = []
        if self.drafts is not None:
            batch = SimpleNamespace(num_reqs=len(running), idx_mapping=slots)
            drafts = self.drafts.propose(batch, None, None, None, None, counts, None, last, num_speculative_tokens=2)
            proposed.update({number: drafts[row, :2].tolist() for row, number in enumerate(running)})


def check_given_texts() -> None:
    """Sample given texts with drafts, as benchmarks/drafts.py does: a seed is the place of a text."""
    from benchmarks.harness.drafts.engine import Forced
    from benchmarks.harness.drafts.texts import Completion, Work

    texts = [[(5 * place + at * at) % VOCABULARY for at in range(LENGTH)] for place in range(len(PROMPTS))]
    given = [Completion(prompt, text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    Forced(second_runner=True).begin(Work(given, []))
    drafted = Engine(drafts=True)
    assert drafted.generate(list(range(len(PROMPTS)))) == texts
    assert drafted.steps < LENGTH * len(PROMPTS)  # squares repeat themselves


def main() -> None:
    use_interpreter()
    device_drafts.SOURCES = 6  # the interpreter takes milliseconds for each
    seeds = [11, 12, 13, 14, 15]
    plain, drafted = Engine(drafts=False), Engine(drafts=True)
    expected = plain.generate(seeds)
    assert len({tuple(completion) for completion in expected}) == len(PROMPTS)
    assert drafted.generate(seeds) == expected
    first = drafted.steps
    assert first < 0.9 * plain.steps, (first, plain.steps)
    assert drafted.drafts is not None
    counts = drafted.drafts.take_counts()
    assert counts.steps == first and counts.drafted == 2 * first
    assert counts.tokens == sum(map(len, expected)) + sum(map(len, PROMPTS))
    drafted.drafts.remember(zip(PROMPTS, expected, strict=True))
    assert drafted.generate(seeds) == expected  # its own completions are remembered: nearly all is guessed
    second = drafted.steps - first
    assert second < first, (first, second)
    check_given_texts()
    print(f"{plain.steps} steps of requests without drafts, {first} with drafts, and {second} when they are remembered")


if __name__ == "__main__":
    main()
