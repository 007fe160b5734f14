"""Dynamic sampling: what is found is kept, what is missing is generated, and what happens when the rounds run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.grading import resample
from swift_megatron_grpo.grading.filters import has_spread
from swift_megatron_grpo.types import Graded, Prompt, Rollout


def group(name: str, rewards: Sequence[float | None]) -> list[Graded]:
    prompt = Prompt(name, {"messages": []})
    return [Graded(Rollout(prompt, [1], [2], None, "", "stop", 0), [r], r, 0.0) for r in rewards]


def names(graded: Sequence[Graded]) -> list[str]:
    return [each.rollout.prompt.prompt_id for each in graded[::2]]


def never(groups: int) -> list[Graded]:
    raise AssertionError("nothing was missing")


def draws(*rounds: Sequence[Sequence[float | None]]) -> tuple[Callable[[int], list[Graded]], list[int]]:
    """What is generated in each round, and how many groups were asked for."""
    asked: list[int] = []

    def draw(groups: int) -> list[Graded]:
        asked.append(groups)
        found = rounds[len(asked) - 1]
        assert len(found) == groups
        return [each for i, rewards in enumerate(found) for each in group(f"{len(asked)}.{i}", rewards)]

    return draw, asked


EQUAL, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_nothing_is_generated_when_nothing_is_missing() -> None:
    first = group("a", MIXED) + group("b", MIXED)
    found = resample(first, 2, 3, never)
    assert found.graded == first and found.rounds == 0
    assert found.metrics()["dynamic_sample/generated_groups"] == 2


def test_valid_groups_are_kept_and_only_the_missing_ones_generated() -> None:
    """ms-swift generates a whole batch each time, and drops what it has found when the rounds run out."""
    first = group("a", EQUAL) + group("b", MIXED) + group("c", EQUAL) + group("d", EQUAL)
    draw, asked = draws([MIXED, EQUAL, EQUAL], [EQUAL, MIXED], [MIXED])
    found = resample(first, 2, 3, draw)
    assert asked == [3, 2, 1]
    assert names(found.graded) == ["b", "1.0", "2.1", "3.0"]
    assert (found.rounds, found.generated, found.uniform) == (3, 10, 0)


def test_when_the_rounds_run_out_uniform_groups_fill_the_batch() -> None:
    first = group("a", EQUAL) + group("b", MIXED) + group("c", EQUAL)
    draw, asked = draws([EQUAL, EQUAL], [EQUAL, MIXED])
    found = resample(first, 2, 2, draw)
    assert asked == [2, 2]
    assert names(found.graded) == ["b", "2.1", "a"]
    assert found.uniform == 1


def test_a_group_with_one_valid_reward_teaches_nothing() -> None:
    assert not has_spread(group("a", (1.0, None, None)))
    assert not has_spread(group("a", (None, None)))
    assert not has_spread(group("a", (0.1 + 0.2, 0.1 + 0.2)))
    assert has_spread(group("a", (1.0, None, 2.0)))


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_the_batch_keeps_its_size_and_every_valid_group(valid: list[bool], times: int, rng: object) -> None:
    first = [each for i, ok in enumerate(valid) for each in group(f"0.{i}", MIXED if ok else EQUAL)]
    kept = [f"0.{i}" for i, ok in enumerate(valid) if ok]
    drawn: list[str] = []

    def draw(groups: int) -> list[Graded]:
        found = []
        for _ in range(groups):
            name, ok = f"d{len(drawn)}", rng.random() < 0.5  # type: ignore[attr-defined]
            drawn.append(name)
            kept.extend([name] if ok else [])
            found += group(name, MIXED if ok else EQUAL)
        return found

    found = resample(first, 2, times, draw)
    assert len(found.graded) == len(first)
    assert names(found.graded)[: len(kept)] == kept
    assert found.uniform == len(valid) - len(kept)
    assert found.generated == len(valid) + len(drawn)
