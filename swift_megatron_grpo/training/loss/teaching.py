"""The advantages of tokens with a teacher."""

import torch

from swift_megatron_grpo.settings.losses import LossConfig


def guided(advantages: torch.Tensor, ratios: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Compute advantages with a teacher from those of rewards and from log(teacher / policy): [m], [m] -> [m].

    OPD   A + coef ratio: one sample of the reverse KL as a reward, as in ms-swift's OPD-RL
    RLSD  A ((1 - lambda) + lambda clip(exp(sign(A) ratio), 1 - range, 1 + range)), https://arxiv.org/abs/2604.03128
    """
    rlsd = config.rlsd
    if not rlsd.is_on:
        return advantages + config.teacher_kl_coef * ratios
    clip = rlsd.rlsd_reweight_clip_range
    evidence = (advantages.sign() * ratios).exp().clamp(1 - clip, 1 + clip)
    weights = 1 - rlsd.rlsd_lambda + rlsd.rlsd_lambda * evidence
    return advantages * (weights.where(advantages < 0, 1.0) if rlsd.rlsd_negative_only else weights)
