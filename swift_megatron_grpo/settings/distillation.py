"""Uses of a teacher's log-probs that only ms-swift's trainer without Megatron has: RLSD, SDAR."""

from __future__ import annotations

from typing import Annotated, Literal

from swift_megatron_grpo.settings.flag import Above, AtLeast, Flags, Range, flag


class Rlsd(Flags):
    """RLSD, https://arxiv.org/abs/2604.03128: the teacher divides a completion's advantage among its tokens."""

    advantage_reweight: Literal["rlsd"] | None = flag(
        None,
        "rlsd: the teacher (--teacher_model, or the column teacher_prompt) does not add to advantages as with "
        "--teacher_kl_coef. It weights the advantage of each token, and never changes its sign. It is a flag of "
        "ms-swift's trainer without Megatron, like all --rlsd flags. Default: none.",
        example="rlsd",
    )
    rlsd_lambda: Annotated[float, Range(0, 0.5, high=1)] = flag(
        0.5,
        "With --advantage_reweight rlsd: the share of an advantage that the teacher weights. 0 is plain GRPO. "
        "Default: 0.5.",
    )
    rlsd_reweight_clip_range: Annotated[float, AtLeast(0, use=0.2)] = flag(
        0.2, "With --advantage_reweight rlsd: how far the weight of a token may be from 1. Default: 0.2."
    )
    rlsd_lambda_warmup_steps: Annotated[int, AtLeast(0, use=0)] = flag(
        0,
        "With --advantage_reweight rlsd: the steps in which --rlsd_lambda grows from 0 to its value. Default: 0.",
        example="20",
    )
    rlsd_lambda_decay_steps: Annotated[int, AtLeast(0, use=0)] = flag(
        0,
        "With --advantage_reweight rlsd: the steps in which --rlsd_lambda falls to 0, after those of "
        "--rlsd_lambda_warmup_steps. Default: 0, it does not fall.",
        example="200",
    )
    rlsd_negative_only: bool = flag(
        False, "With --advantage_reweight rlsd: weight only the completions of negative advantage. Default: false."
    )

    @property
    def is_on(self) -> bool:
        return self.advantage_reweight == "rlsd"

    def share(self, steps_done: int) -> float:
        """Return --rlsd_lambda by its schedule, as in ms-swift."""
        warmup, decay = self.rlsd_lambda_warmup_steps, self.rlsd_lambda_decay_steps
        if steps_done < warmup:
            return self.rlsd_lambda * steps_done / warmup
        return self.rlsd_lambda * max(1 - (steps_done - warmup) / decay, 0) if decay else self.rlsd_lambda


class Sdar(Flags):
    """SDAR, https://arxiv.org/abs/2605.15155: a loss towards the teacher, gated by how much surer it is of a token."""

    sdar_loss_coef: Annotated[float, AtLeast(0, use=0.1)] = flag(
        0.0,
        "Weight of SDAR's loss: the teacher (--teacher_model, or the column teacher_prompt) does not change advantages "
        "as with --teacher_kl_coef. It is a flag of ms-swift's trainer without Megatron. Default: 0, no such loss.",
        example="0.1",
    )
    sdar_gate_beta: Annotated[float, Above(0, use=5.0)] = flag(
        5.0,
        "With --sdar_loss_coef above 0: the steepness of the gate, a sigmoid of log(teacher / policy). Default: 5.",
        example="10",
    )

    @property
    def is_on(self) -> bool:
        return self.sdar_loss_coef > 0
