"""Completions in arrays are those of the objects that are made from them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from swift_megatron_grpo.packing.arrays import joined, pick
from swift_megatron_grpo.packing.completions import (
    Facts,
    OutlinedRollouts,
    all_have_logprobs,
    spans,
    versions,
)
from swift_megatron_grpo.types import Prompt, Rollout


def draw(rng: random.Random, count: int) -> OutlinedRollouts:
    """Return completions that stay on their ranks; weights of two versions generated some."""

    def integers(most: int) -> np.ndarray:
        return np.array([rng.randrange(most) for _ in range(count)], np.int64)

    facts = Facts(
        prompt=integers(9), completion=integers(9) + 4, sampled=integers(5) + 2, first=integers(3), home=integers(4),
        version=integers(3), has_logprobs=np.array([rng.random() < 0.9 for _ in range(count)], np.bool_),
        truncated=integers(2) == 1, asked=np.fromiter((Prompt(str(i), {}) for i in range(count)), np.object_, count),
        rare=np.full(count, None),
    )  # fmt: skip
    for place in range(count):
        version, sampled = int(facts.version[place]), int(facts.sampled[place])
        if rng.random() < 0.2:
            facts.rare[place] = ("stop", {}, [(version, 1), (version + 2, sampled - 1)])
        elif rng.random() < 0.1:
            facts.rare[place] = ("abort", {"num_turns": 1}, None)
    return OutlinedRollouts(facts)


def same(ours: object, theirs: object) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))  # type: ignore[call-overload]


@pytest.mark.parametrize("seed", range(100))
def test_spans_and_versions_are_those_of_the_objects(seed: int) -> None:
    rng = random.Random(seed)
    outlined = draw(rng, rng.randrange(1, 20))
    objects = list(outlined)
    assert same(spans(outlined), spans(objects)) and versions(outlined).tolist() == versions(objects).tolist()
    assert all_have_logprobs(outlined) == all_have_logprobs(objects) == all(one.logprobs is not None for one in objects)


@pytest.mark.parametrize("seed", range(50))
def test_parts_have_the_same_objects(seed: int) -> None:
    rng = random.Random(seed)
    parts = [draw(rng, rng.randrange(0, 6)) for _ in range(3)]
    whole = joined(parts)
    objects = [one for part in parts for one in part]
    assert len(whole) == len(objects) and all(one is other for one, other in zip(whole, objects, strict=True))
    if objects:
        places = np.array(rng.sample(range(len(objects)), rng.randrange(1, len(objects) + 1)))
        chosen = pick(whole, places)
        assert all(one is objects[place] for one, place in zip(chosen, places.tolist(), strict=True))
        assert same(spans(chosen), spans(list(chosen)))


def test_completions_with_tokens_make_a_list_of_the_parts() -> None:
    known = Rollout(Prompt("known", {}), [1], [2], [-1.0], "", "stop", 5)
    outlined = draw(random.Random(0), 3)
    assert joined([outlined, [known]]) == [*outlined, known]
    assert versions([known]).tolist() == [5] and spans([known]).tokens.tolist() == [1]
