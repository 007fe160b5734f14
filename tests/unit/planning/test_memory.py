"""The optimizer's part of the plan. That of whole runs is compared with measured ones in test_measured.py."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.planning.memory import master_bytes


@pytest.mark.parametrize(
    ("main_params", "precision_aware", "bf16", "expected"),
    [(4, False, True, 4), (4, True, True, 2), (2, True, True, 2), (4, True, False, 4)],
)
def test_the_upper_half_of_a_master_is_the_bf16_weight(
    main_params: int, precision_aware: bool, bf16: bool, expected: int
) -> None:
    assert master_bytes(main_params, precision_aware, bf16) == expected
