"""Compares drafts of the kernels with plain Python: on a GPU, or on the CPU in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.unit.generation.vllm.draft_kernel_cases     runs the cases
python -m tests.unit.generation.vllm.draft_kernel_cases compile       compiles them for an H100 or H200, without a GPU
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch

from swift_megatron_grpo.generation.vllm import draft_kernel
from swift_megatron_grpo.generation.vllm.draft_kernel import Kept, Running, blocks_of, propose
from swift_megatron_grpo.generation.vllm.texts import MOST_MATCHED

SLOTS, LONGEST, SOURCES, DEPTH = 6, 600, 4, 3
Text = tuple[Sequence[int], int]  # tokens, and the first place behind which a draft may begin


def expected(own: Sequence[int], texts: Sequence[Text]) -> list[int]:
    """Return the draft behind the longest match, of the first text that has one, at its last place."""
    best: tuple[int, int, int, Sequence[int]] = (0, 0, 0, ())
    for order, (tokens, start) in enumerate(texts):
        for place in range(start, len(tokens) - 1):
            matched = 0
            while matched < min(MOST_MATCHED, len(own), place + 1) and tokens[place - matched] == own[-1 - matched]:
                matched += 1
            if matched:
                best = max(best, (matched, -order, place, tokens), key=lambda found: found[:3])
    draft = list(best[3][best[2] + 1 :][:DEPTH]) if best[0] else []
    return draft + [own[-1]] * (DEPTH - len(draft))


def check(device: str, cases: int) -> int:
    rng = random.Random(0)
    found_any = 0
    for _ in range(cases):
        alphabet, longest = rng.choice([2, 5, 50]), rng.choice([5, 40, LONGEST])
        rows = [[rng.randrange(alphabet) for _ in range(rng.randint(2, longest))] for _ in range(SLOTS)]
        prompts = [rng.randint(1, len(row) - 1) for row in rows]
        kept = [[rng.randrange(alphabet) for _ in range(rng.randint(1, longest))] for _ in range(5)]
        starts = [rng.randrange(len(tokens)) for tokens in kept]
        sources = [rng.sample([*range(SLOTS + len(kept)), -1, -1], k=SOURCES - 1) + [slot] for slot in range(SLOTS)]
        for row in sources:
            rng.shuffle(row)
        slots = rng.sample(range(SLOTS), k=rng.randint(1, SLOTS))
        sampled = [rng.randint(0, 1) for _ in slots]
        drafts = drafted(device, rows, prompts, kept, starts, sources, slots, sampled)
        for row, (slot, has_sampled) in enumerate(zip(slots, sampled, strict=True)):
            texts = [
                (kept[text - SLOTS], starts[text - SLOTS])
                if text >= SLOTS
                else (rows[text], 0 if text == slot else prompts[text] - 1)
                for text in sources[slot]
                if text >= 0
            ]
            wanted = expected(rows[slot], texts if has_sampled else [])
            # texts that are not given keep their number, so the order of those that are is the same
            assert drafts[row] == wanted, (drafts[row], wanted, rows[slot], sources[slot])
            found_any += wanted != [rows[slot][-1]] * DEPTH
    assert found_any > cases
    return cases


def drafted(
    device: str, rows: list[list[int]], prompts: list[int], kept: list[list[int]], starts: list[int],
    sources: list[list[int]], slots: list[int], sampled: list[int],
) -> list[list[int]]:  # fmt: skip
    tokens = torch.full((SLOTS, LONGEST), 7, dtype=torch.int32)  # what vLLM leaves behind a row is anything
    for slot, row in enumerate(rows):
        tokens[slot, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(text) for text in kept])

    def sent(values: torch.Tensor | Sequence[Sequence[int]] | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values).to(device, dtype)

    running = Running(
        sent(tokens, torch.int32), sent([len(row) for row in rows], torch.int32), sent(prompts, torch.int32)
    )
    flat = Kept(
        sent([token for text in kept for token in text], torch.int32),
        sent(lengths.cumsum(0) - lengths, torch.int64),
        sent(starts, torch.int32),
        sent(lengths, torch.int32),
    )
    drafts = torch.full((len(slots), DEPTH), -5, dtype=torch.int64, device=device)
    scores = torch.full((len(slots), SOURCES, blocks_of(LONGEST)), -5, dtype=torch.int64, device=device)
    last = sent([[row[-1]] for row in rows], torch.int64)
    propose(running, flat, sent(sources, torch.int32), sent(slots, torch.int32), sent(sampled, torch.int32), last,
            scores, drafts)  # fmt: skip
    return drafts.tolist()  # type: ignore[no-any-return]


def compile_for_hopper() -> None:
    """Compile for arguments as in a launch; the interpreter accepts much that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    texts = {"run_tokens": "*i32", "stride": "i32", "run_lengths": "*i32", "run_prompts": "*i32", "tokens": "*i32",
             "begins": "*i64", "starts": "*i32", "lengths": "*i32", "sources": "*i32", "slots_in_all": "i32",
             "slots": "*i32"}  # fmt: skip
    both = {"SOURCES": 32, "BLOCKS": 16}
    match = {**texts, "sampled": "*i32", "scores": "*i64"}
    follow = {**texts, "last": "*i64", "scores": "*i64", "drafts": "*i64", "draft_stride": "i32", "depth": "i32"}
    kernels = (
        (draft_kernel._match, match, {**both, "PLACES": draft_kernel._PLACES, "MOST": MOST_MATCHED}),
        (draft_kernel._continue, follow, {**both, "SCORES": draft_kernel._SCORES, "WIDTH": 4}),
    )
    for kernel, signature, constants in kernels:
        source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_for_hopper()
        print("compiled")
        sys.exit()
    on_gpu = torch.cuda.is_available()
    print(f"{check('cuda' if on_gpu else 'cpu', 1000 if on_gpu else 12)} cases")
