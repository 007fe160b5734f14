"""Flags at their defaults, but for some; and the faults that they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from swift_megatron_grpo.settings.flag import Flags
from swift_megatron_grpo.settings.layout import DataShape, Facts, Layout, ModelShape

F = TypeVar("F", bound=Flags)


def defaults() -> dict[str, Any]:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(GRPOArguments)}


def of(group: type[F], **typed: Any) -> F:
    return group.of(defaults() | typed)


def faults(
    group: type[Flags],
    shape: ModelShape | None = None,
    rows: DataShape | None = None,
    config: Mapping[str, Any] | None = None,
    **typed: Any,
) -> str:
    """Return the faults, one a line. `config`: the model's config.json."""
    return "\n".join(of(group, **typed).faults(Facts(Layout(1), config, shape, rows, typed=shape is None)))
