"""Every flag is in exactly one list of the support table, and every help text of this package can be printed."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import MISSING, Field, fields
from typing import Any

from swift_megatron_grpo.arguments.support_table import (
    NO_EFFECT,
    NOT_YET,
    NOTED,
    USED_BY_SWIFT,
    USED_HERE,
    notes_on_flags,
    unsupported_flags,
)


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]


def test_every_flag_is_in_exactly_one_list() -> None:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    lists = {
        "NOT_YET": set(NOT_YET),
        "NOTED": set(NOTED),
        "USED_HERE": USED_HERE,
        "USED_BY_SWIFT": USED_BY_SWIFT,
        "NO_EFFECT": NO_EFFECT,
    }
    places = Counter(flag for flags in lists.values() for flag in flags)
    flags = {field.name for field in fields(GRPOArguments)}
    assert flags - set(places) == set(), "flags in none of the lists of support_table.py"
    assert set(places) - flags == set(), "listed, but not flags"
    assert {flag for flag, count in places.items() if count > 1} == set(), "in several lists"


def test_defaults_are_neither_refused_nor_noted() -> None:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    defaults = {field.name: default_of(field) for field in fields(GRPOArguments)}
    assert unsupported_flags(defaults, "") == notes_on_flags(defaults) == []


def flags_of_this_package() -> dict[str, str]:
    """Return the help texts of the flags that GRPOFlags adds to ms-swift's."""
    from swift.megatron.arguments import MegatronRLHFArguments

    from swift_megatron_grpo.arguments.flags import GRPOFlags

    stock = {field.name for field in fields(MegatronRLHFArguments)}
    return {field.name: field.metadata["help"] for field in fields(GRPOFlags) if field.name not in stock}


def test_flags_of_this_package_have_help() -> None:
    helps = flags_of_this_package()
    assert {"bad_reward", "max_tokens_per_micro_batch", "offload_grad", "kl_estimator", "entropy_coef"} <= set(helps)
    assert set(helps) <= USED_HERE
    assert all(len(text) > 40 and "Default: " in text for text in helps.values())


def test_every_help_text_formats_under_argparse() -> None:
    """A bare percent sign in one of them would make --help fail for all flags."""
    for flag, text in flags_of_this_package().items():
        parser = argparse.ArgumentParser()
        parser.add_argument(f"--{flag}", help=text)
        assert f"--{flag}" in parser.format_help()


def test_the_help_of_all_flags_can_be_printed() -> None:
    """The same for the whole class, with the parser that ms-swift uses."""
    from transformers import HfArgumentParser

    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    printed = HfArgumentParser([GRPOArguments]).format_help()
    assert all(f"--{flag}" in printed for flag in flags_of_this_package())
