"""pass@k and maj@k against brute force, and the answers of completions."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from swift_megatron_grpo.grading.tries import Try, answer_of, majority, pass_at, sizes_up_to, tries_metrics


@pytest.mark.parametrize("tries", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_one(tries: int) -> None:
    for correct in range(tries + 1):
        drawn = [True] * correct + [False] * (tries - correct)
        for k in range(1, tries + 1):
            draws = list(combinations(drawn, k))
            assert pass_at(k, tries, correct) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_maj_at_k_is_the_share_of_equally_likely_winners_that_are_correct() -> None:
    """Over all votes of 1 to 5 tries on three answers, of which a is correct; None has no vote."""
    for votes in (votes for size in range(1, 6) for votes in product(("a", "b", "c", None), repeat=size)):
        given = [vote for vote in votes if vote is not None]
        winners = [answer for answer in set(given) if given.count(answer) == max(map(given.count, given))]
        expected = winners.count("a") / len(winners) if winners else 0.0
        assert majority([Try(vote == "a", vote) for vote in votes]) == pytest.approx(expected)


def test_an_answer_that_is_not_always_accepted_counts_by_its_share() -> None:
    assert majority([Try(True, "a"), Try(False, "a"), Try(True, "b")]) == 0.5


def test_pass_at_k_is_reported_for_powers_of_two_and_all_tries() -> None:
    assert [sizes_up_to(tries) for tries in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_metrics_are_means_over_prompts_with_enough_graded_tries() -> None:
    right, wrong = Try(True, "4"), Try(False, "5")
    prompts = [[right, wrong, wrong, wrong], [right, right], []]
    metrics = tries_metrics(prompts, 4)
    assert metrics == {"pass@1": (0.25 + 1) / 2, "pass@2": (0.5 + 1) / 2, "pass@4": 1.0, "maj@4": (0 + 1) / 2}


def test_maj_at_k_is_left_out_without_answers_and_for_one_try() -> None:
    assert set(tries_metrics([[Try(True, None), Try(False, None)]], 2)) == {"pass@1", "pass@2"}
    assert set(tries_metrics([[Try(True, "1")]], 1)) == {"pass@1"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{ \dfrac{1}{2} }.", r"\frac{1}{2}"),
        (r"<think>\boxed{2}</think><answer> 3.0 </answer>", "3"),
        (r"<answer>It is \boxed{7}</answer> \boxed{8}", "7"),
        ("3 + 4 = 7\n#### 1,200.50\n", "1200.5"),
        (r"\boxed{\left( 1,\, 2 \right)}", "(1,2)"),
        (r"\boxed{Yes.}", "yes"),
        (r"\boxed{1e5}", "100000"),
        (r"\boxed{1e999999}", "1e999999"),
        (r"\boxed{-0}", "0"),
        (r"\boxed{-0.00}", "0"),
        (r"\boxed{+10}", "10"),
        (r"\boxed{-12,345,678,901,234,567,890,123,456,789,012.50}", "-12345678901234567890123456789012.5"),
        (r"\boxed{nan}", "nan"),
        (r"\boxed{open", None),
        (r"\boxed{}", None),
        ("the answer is 4", None),
        ("", None),
    ],
)
def test_the_answer_of_a_completion_is_found_and_compared_by_value(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer
