"""All classes of flags, which the files of this folder have, and the range of every flag."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from swift_megatron_grpo import settings
from swift_megatron_grpo.settings.flag import Flags, Range, is_group, ranges

_WITHOUT_FLAGS = ("config", "groups")
_FILES = [import_module(f"{settings.__name__}.{file.name}") for file in iter_modules(settings.__path__)
          if file.name not in _WITHOUT_FLAGS]  # fmt: skip

GROUPS: tuple[type[Flags], ...] = tuple(
    kind
    for file in _FILES
    for kind in vars(file).values()
    if is_group(kind) and kind is not Flags and kind.__module__ == file.__name__
)
RANGES: dict[str, Range] = {name: valid for group in GROUPS for name, (valid, _) in ranges(group).items()}
