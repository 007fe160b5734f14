"""Texts whose drafts are accepted as often as wanted: they copy from an earlier completion of their prompt.

After each token a text continues behind it with the same probability, and jumps elsewhere otherwise. So engines look
for drafts, find and verify them as in training. There, unlike here, acceptance also depends on the place in a text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.lengths import Lengths
from swift_megatron_grpo.cli.simulate_drafts.command import total
from swift_megatron_grpo.cli.simulate_drafts.replay import Completion, replay

SOURCE_TOKENS = 4096
SAMPLED = 2  # prompts by whose texts the probability is chosen
ROUNDS = 10  # of bisection


@dataclass(frozen=True)
class Work:
    """The requests of a round, and what their prompts were completed with before."""

    completions: list[Completion]
    earlier: list[Completion]  # of each prompt one


@dataclass(frozen=True)
class Sizes:
    requests: int
    group: int  # requests of a prompt
    prompt_tokens: int
    lengths: str
    vocabulary: int


def draw(sizes: Sizes, right: float, seed: int) -> Work:
    """Draw the requests of a round. `right`: the probability that the next token is the one behind the last copy."""
    rng = random.Random(seed)
    source_tokens = min(SOURCE_TOKENS, sizes.vocabulary // 2)
    lengths = iter(Lengths(sizes.lengths).draw(sizes.requests, rng))
    completions, earlier = [], []
    for _ in range(sizes.requests // sizes.group):
        prompt = tuple(rng.choices(range(sizes.vocabulary), k=sizes.prompt_tokens))
        source = rng.sample(range(sizes.vocabulary), source_tokens)
        earlier.append(Completion(prompt, source))
        texts = (copied(source, next(lengths), right, rng) for _ in range(sizes.group))
        completions += [Completion(prompt, text) for text in texts]
    return Work(completions, earlier)


def copied(source: Sequence[int], length: int, right: float, rng: random.Random) -> list[int]:
    text, place = list[int](), rng.randrange(len(source))
    while len(text) < length:
        text.append(source[place])
        place = (place + 1) % len(source) if rng.random() < right else rng.randrange(len(source))
    return text


def accepted_a_step(work: Work, depth: int) -> float:
    """Return the tokens that a step adds to a request beyond one if each has `depth` drafts."""
    tally = total(replay(work.completions, work.earlier, depth, len(work.completions)))
    return tally.tokens / tally.requests - 1


def probability_of(accepted: float, depth: int, sizes: Sizes) -> float:
    """Return the probability with which texts accept so many drafts a step."""
    sample = replace(sizes, requests=SAMPLED * sizes.group)
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if accepted_a_step(draw(sample, middle, seed=0), depth) < accepted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
