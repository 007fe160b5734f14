"""Steps on which ms-swift's own trainer and this package's losses are compared: of the losses that ms-swift has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swift_megatron_grpo.settings.losses import Correction, Fipo, LossConfig

OF_MS_SWIFT = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "fipo", "real")
LENGTHS = [5, 1, 9, 3, 2, 7, 4, 6]
GROUP, LIMIT = 4, 16
PLAIN = LossConfig(
    loss_type="grpo", epsilon=0.2, epsilon_high=0.3, beta=0.1, max_completion_length=LIMIT, log_entropy=True
)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class Case:
    config: LossConfig
    seed: int = 0
    truncated: tuple[int, ...] = ()
    overlong_filter: bool = False
    quantile: float = 1.0


def _cases() -> dict[str, Case]:
    cases = {}
    for seed, name in enumerate(OF_MS_SWIFT):
        plain = replace(PLAIN, loss_type=name)
        cases[name] = Case(plain, seed)
        for level in ("sequence", "sequence_token"):
            cases[f"{name}-{level}"] = Case(replace(plain, importance_sampling_level=level), seed)
        cases[f"{name}-quantile"] = Case(plain, seed, quantile=0.4)
        cases[f"{name}-off-policy-mask"] = Case(
            replace(plain, correction=Correction(off_policy_sequence_mask_delta=0.02)), seed
        )
        if name != "real":  # here the completion is excluded from REAL's sums; ms-swift includes it with a score of 0
            cases[f"{name}-overlong"] = Case(plain, seed, truncated=(2, 5), overlong_filter=True)
            cases[f"{name}-delta"] = Case(replace(plain, delta=1.4), seed)
    del cases["real-off-policy-mask"]
    for mode in MODES:
        cases[mode] = Case(
            replace(
                PLAIN,
                correction=Correction(
                    rollout_importance_sampling_mode=mode,
                    rollout_importance_sampling_threshold=1.1,
                    log_rollout_offpolicy_metrics=True,
                ),
            )
        )
    cases["fipo-wide"] = Case(
        replace(
            PLAIN,
            loss_type="fipo",
            fipo=Fipo(fipo_decay_rate=3.0, fipo_clip_range=0.5, fipo_clip_high_only=False, fipo_safety_threshold=1.2),
        )
    )
    return cases


CASES = _cases()
