"""The cases that run for every change have every value and every part of a layout that the nightly ones have."""

from __future__ import annotations

import pytest

from tests.dist.conftest import LAYOUTS
from tests.support.choice import covering, rest_nightly

CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]


def test_every_value_and_pair_of_parts_is_chosen() -> None:
    cases = [("a", "tp2"), ("a", "tp4+sp"), ("b", "tp2+sp"), ("b", "dp2+sp"), ("b", "tp2+dp2"), ("a", "dp2")]
    assert covering(cases) == [("a", "tp4+sp"), ("b", "dp2+sp"), ("b", "tp2+dp2")]
    assert covering(cases, also=[("b", "tp2+sp")])[0] == ("b", "tp2+sp")


def test_the_chosen_layouts_are_fewer_and_have_every_part() -> None:
    chosen = covering(CASES)
    assert len(chosen) < len(CASES) / 2
    for number in range(2):
        assert {case[number] for case in chosen} == {case[number] for case in CASES}
    every, of_chosen = (
        {part.rstrip("0123456789") for *_, layout in some for part in layout.split("+")} for some in (CASES, chosen)
    )
    assert of_chosen == every


def test_the_rest_is_nightly_and_keeps_its_place() -> None:
    one, other = rest_nightly([(1, "a"), (2, "b")], [(2, "b")])
    assert other == (2, "b")
    assert one == pytest.param(1, "a", marks=pytest.mark.nightly)
    with pytest.raises(AssertionError):
        rest_nightly(["a"], ["b"])
