"""Dynamic sampling: informative groups are kept, missing groups are generated, and the number of rounds is limited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.grading.resampling import resample, with_spread
from swift_megatron_grpo.types import Graded, Prompt, Rollout


def group(name: str, rewards: Sequence[float | None]) -> list[Graded]:
    prompt = Prompt(name, {"messages": []})
    return [Graded(Rollout(prompt, [1], [2], None, "", "stop", 0), [r], r, 0.0) for r in rewards]


def table(graded: Iterable[Graded]) -> GradedRollouts:
    return GradedRollouts.of(graded, functions=1)


def names(graded: Sequence[Graded]) -> list[str]:
    return [completion.rollout.prompt.prompt_id for completion in graded[::2]]


def never(groups: int) -> GradedRollouts:
    raise AssertionError("nothing was missing")


def draws(*rounds: Sequence[Sequence[float | None]]) -> tuple[Callable[[int], GradedRollouts], list[int]]:
    """Return a draw function that generates these groups round by round, and the list of requested group counts."""
    requested: list[int] = []

    def draw(groups: int) -> GradedRollouts:
        requested.append(groups)
        number = len(requested)
        generated = rounds[number - 1]
        assert len(generated) == groups
        return table(graded for i, rewards in enumerate(generated) for graded in group(f"{number}.{i}", rewards))

    return draw, requested


EQUAL, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_no_groups_are_generated_if_none_are_missing() -> None:
    first = group("a", MIXED) + group("b", MIXED)
    result = resample(table(first), 2, 3, never)
    assert list(result.graded) == first and result.rounds == 0
    assert result.metrics()["dynamic_sample/generated_groups"] == 2


def test_groups_with_a_spread_are_kept_and_only_missing_ones_generated() -> None:
    """ms-swift generates a whole batch in every round, and drops the groups that it has kept if the rounds run out."""
    first = group("a", EQUAL) + group("b", MIXED) + group("c", EQUAL) + group("d", EQUAL)
    draw, requested = draws([MIXED, EQUAL, EQUAL], [EQUAL, MIXED], [MIXED])
    result = resample(table(first), 2, 3, draw)
    assert requested == [3, 2, 1]
    assert names(result.graded) == ["b", "1.0", "2.1", "3.0"]
    assert (result.rounds, result.generated, result.uniform) == (3, 10, 0)


def test_uniform_groups_fill_the_batch_when_the_rounds_run_out() -> None:
    first = group("a", EQUAL) + group("b", MIXED) + group("c", EQUAL)
    draw, requested = draws([EQUAL, EQUAL], [EQUAL, MIXED])
    result = resample(table(first), 2, 2, draw)
    assert requested == [2, 2]
    assert names(result.graded) == ["b", "2.1", "a"]
    assert result.uniform == 1


def test_a_group_with_one_valid_reward_has_no_spread() -> None:
    rewards = [(1.0, None, None), (None, None, None), (0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2), (1.0, None, 2.0)]
    graded = table(graded for number, of_group in enumerate(rewards) for graded in group(str(number), of_group))
    assert with_spread(graded, 3).tolist() == [False, False, False, True]


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_the_batch_keeps_its_size_and_every_group_with_a_spread(valid: list[bool], times: int, rng: object) -> None:
    first = [graded for i, ok in enumerate(valid) for graded in group(f"0.{i}", MIXED if ok else EQUAL)]
    kept = [f"0.{i}" for i, ok in enumerate(valid) if ok]
    drawn: list[str] = []

    def draw(groups: int) -> GradedRollouts:
        generated = []
        for _ in range(groups):
            name, ok = f"d{len(drawn)}", rng.random() < 0.5  # type: ignore[attr-defined]
            drawn.append(name)
            kept.extend([name] if ok else [])
            generated += group(name, MIXED if ok else EQUAL)
        return table(generated)

    result = resample(table(first), 2, times, draw)
    assert len(result.graded) == len(first)
    assert names(result.graded)[: len(kept)] == kept
    assert result.uniform == len(valid) - len(kept)
    assert result.generated == len(valid) + len(drawn)


def test_groups_of_equal_sums_are_kept_where_gdpo_gives_them_advantages() -> None:
    rows = [[1.0, 0.0], [0.0, 2.0]]  # 2 in both, with weights 2 and 1
    pairs = zip(group("a", (2.0, 2.0)), rows, strict=True)
    graded = GradedRollouts.of([replace(of_group, rewards=row) for of_group, row in pairs], functions=2)
    assert with_spread(graded, 2).tolist() == [False]
    assert with_spread(graded, 2, (2.0, 1.0)).tolist() == [True]
    assert with_spread(graded, 2, (0.0, 0.0)).tolist() == [False]
    assert resample(graded, 2, 1, lambda _: graded, (2.0, 1.0)).rounds == 0
