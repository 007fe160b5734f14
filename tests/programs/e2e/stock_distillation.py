"""An external plugin for ms-swift's own GRPO trainer: RLSD and SDAR by the functions of ms-swift's other trainer.

ms-swift's Megatron trainer has neither. DISTILLATION is `rlsd` or `sdar`, by flags as in tests/e2e/test_parity.py.
"""

from __future__ import annotations

import os
from typing import Any

from swift.megatron.trainers import grpo_trainer
from swift.rl_core.advantage import apply_rlsd_reweight, compute_sdar_loss

loss_of_policy = grpo_trainer.MegatronGRPOTrainer.loss_func
if os.environ["DISTILLATION"] == "rlsd":

    def weighted(advantages: Any, completion_mask: Any, **of_teacher: Any) -> Any:
        policies = [of_teacher[f"{name}_per_token_logps"] for name in ("teacher", "policy")]
        return apply_rlsd_reweight(advantages, completion_mask, *policies, lam=0.8, clip_range=0.4)

    grpo_trainer.expand_advantage_to_per_token = weighted
else:

    def with_sdar(self: Any, output_tensor: Any, data: Any) -> Any:
        loss, metrics = loss_of_policy(self, output_tensor, data)
        teacher, mask = data["grpo_batch"].teacher_per_token_logps, data["grpo_batch"].completion_mask
        added = 0.3 * compute_sdar_loss(output_tensor, teacher, mask, gate_beta=2.0)[0]
        return loss + added, metrics | {"loss": metrics["loss"] + added.detach()}

    grpo_trainer.MegatronGRPOTrainer.loss_func = with_sdar
    grpo_trainer.expand_advantage_to_per_token = lambda advantages, mask, **_: advantages[:, None].expand_as(mask)
