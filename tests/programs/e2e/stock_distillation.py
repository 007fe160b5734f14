"""An external plugin for ms-swift's own GRPO trainer: RLSD and SDAR by the functions of ms-swift's other trainer.

ms-swift's Megatron trainer has neither. DISTILLATION is `rlsd` or `sdar`, by flags as in tests/e2e/test_parity.py.
"""

from __future__ import annotations

import os
from typing import Any

from swift.megatron.trainers import grpo_trainer
from swift.rl_core.advantage import apply_rlsd_reweight

if os.environ["DISTILLATION"] == "rlsd":

    def weighted(advantages: Any, completion_mask: Any, **of_teacher: Any) -> Any:
        policies = [of_teacher[f"{name}_per_token_logps"] for name in ("teacher", "policy")]
        return apply_rlsd_reweight(advantages, completion_mask, *policies, lam=0.8, clip_range=0.4)

    grpo_trainer.expand_advantage_to_per_token = weighted
