r"""pass@k and maj@k: how often several completions of a prompt solve it.

pass@k is the chance that at least one of k completions is correct, and maj@k the chance that the answer which most of k
completions give is correct. Answers are compared as texts, so \frac12 and 0.5 are two answers.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\f?boxed\s*\{")
_MARKED = re.compile(r"####\s*([^\n]*)")  # as in the solutions of GSM8K
_LAYOUT = re.compile(r"\\left|\\right|\\[,!;: ]|[\s$]")  # of LaTeX, without a meaning


class Try(NamedTuple):
    """One completion of a prompt."""

    correct: bool
    answer: str | None  # None: none was found


def pass_at(k: int, tries: int, correct: int) -> float:
    """Return the chance that k of these tries, drawn without replacement, have a correct one: unbiased for pass@k."""
    return 1 - math.comb(tries - correct, k) / math.comb(tries, k)


def majority(tries: Sequence[Try]) -> float:
    """Return the chance that the most frequent answer is correct; equally frequent ones are drawn by lot.

    Tries without an answer have no vote; without a vote the result is 0. Where a reward function does not grade all
    tries with one answer alike, the answer is correct to the share that it accepts.
    """
    votes = Counter(one.answer for one in tries if one.answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = sum(one.correct for one in tries if one.answer in winners)
    return right / (most * len(winners))


def sizes_up_to(tries: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and all tries."""
    return sorted({2**power for power in range(tries.bit_length()) if 2**power <= tries} | {tries})


def tries_metrics(prompts: Sequence[Sequence[Try]], tries: int) -> dict[str, float]:
    """Return pass@k and, if any completion gives an answer, maj@k. The k are those of `tries` completions.

    A prompt with fewer graded completions counts up to its number of them.
    """
    metrics = {}
    for k in sizes_up_to(tries):
        chances = [pass_at(k, len(group), sum(one.correct for one in group)) for group in prompts if len(group) >= k]
        if chances:
            metrics[f"pass@{k}"] = math.fsum(chances) / len(chances)
    graded = [group for group in prompts if group]
    if tries > 1 and any(one.answer is not None for group in graded for one in group):
        metrics[f"maj@{tries}"] = math.fsum(majority(group) for group in graded) / len(graded)
    return metrics


def answer_of(text: str) -> str | None:
    r"""Return the answer that a completion gives, as a text to compare; None if it gives none.

    It is the content of <answer>, as ms-swift's accuracy reads it, otherwise of the last \boxed, otherwise of the last
    line with ####.
    """
    tagged = _TAGGED.search(text)
    scope = tagged[1] if tagged else text
    boxed = _last_boxed(scope)
    if boxed is not None:
        return _normal(boxed)
    if tagged:
        return _normal(scope)
    marked = _MARKED.findall(text)
    return _normal(marked[-1]) if marked else None


def _last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed whose braces are closed."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None


def _normal(answer: str) -> str | None:
    """Return one text for answers that differ in layout only; None for an empty one."""
    plain = _LAYOUT.sub("", answer).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").casefold().rstrip(".")
    if not plain:
        return None
    try:
        number = Decimal(re.sub(r"(?<=\d),(?=\d{3})", "", plain))
    except InvalidOperation:
        return plain
    if not number.is_finite() or abs(number.adjusted()) >= 100:
        return plain
    text = f"{number if number else abs(number):f}"  # all digits; normalize() would round to 28, and keep -0
    return text.rstrip("0").rstrip(".") if "." in text else text
