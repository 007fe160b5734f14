"""Names and values of a command line, checked before the parser sees it, which ends at the first wrong value."""

from __future__ import annotations

from argparse import Action
from collections.abc import Mapping, Sequence
from functools import cache

from swift.utils.utils import _patch_get_type_hints
from transformers import HfArgumentParser

from swift_megatron_grpo.arguments.flag_names import check_flag_names
from swift_megatron_grpo.arguments.flag_values import check_flag_values
from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.problems import check_all


def check_typed(command_line: Sequence[str]) -> None:
    """Raise one ValueError with all unknown flags, and all values of a wrong type."""
    check_all([lambda: check_flag_names(command_line), lambda: check_flag_values(command_line, _options())])


@cache
def _options() -> Mapping[str, Action]:
    """Return the options of the parser, made as ms-swift makes it.

    Typing caches unions without regard to their order, so with megatron-core 0.18 a `dict | str` of ms-swift is a
    `str | dict`, of which the parser would take the last one as the type.
    """
    with _patch_get_type_hints():
        options: Mapping[str, Action] = HfArgumentParser([GRPOArguments])._option_string_actions
    return options
