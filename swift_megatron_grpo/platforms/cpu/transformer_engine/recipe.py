"""The fp8 and fp4 state that Megatron reads: both are off, and turning one on raises an error."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported


class Format(enum.Enum):
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def reset(cls) -> None: ...


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: dist.ProcessGroup | None = None,
    _graph: bool = False,
) -> Iterator[None]:
    reject_unsupported("fp8_autocast", enabled=enabled, calibrating=calibrating)
    yield


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    reject_unsupported("fp8_model_init", enabled=enabled)
    yield
