"""Choose the cases that run for every change; the others are marked `nightly`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import combinations

import pytest

Case = tuple[object, ...]


def rest_nightly(cases: Sequence[object], chosen: Collection[object]) -> list[object]:
    """Mark the cases that are not chosen."""
    assert chosen and not [case for case in chosen if case not in cases]
    return [case if case in chosen else _nightly(case) for case in cases]


def _nightly(case: object) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)


def covering(cases: Sequence[Case], also: Sequence[Case] = ()) -> list[Case]:
    """Choose cases with every value of their parameters, and every pair of parts of a layout, their last parameter.

    Its parts are those of dp2+ep2, of any size. A part that is wrong on one model is wrong on most of them, so one has
    to show it; what two parts do to each other shows where a layout has both. `also` are chosen in any case.
    """
    covered = {case: _covered(case) for case in cases}
    chosen = list(also)
    missing = set[object]().union(*covered.values()).difference(*(covered[case] for case in chosen))
    while missing:
        chosen.append(max(cases, key=lambda case: len(covered[case] & missing)))
        missing -= covered[chosen[-1]]
    return chosen


def _covered(case: Case) -> set[object]:
    *values, layout = case
    parts = {re.sub(r"\d+$", "", part) for part in str(layout).split("+")}
    return {*enumerate(values), *parts, *(frozenset(pair) for pair in combinations(parts, 2))}
