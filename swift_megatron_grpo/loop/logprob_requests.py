"""The rule that decides for which rollouts vLLM returns the log-probs of the tokens that it samples. Decisions only.

They cost 4 to 11 % of the time of generation of small models (benchmarks/h200/parts/scheduling.json). If nothing but
`rollout/k3_kl` reads them, they are requested for the first rollout of a run, which loop/checks/logprob_check.py
compares with the trainer, and then at an interval.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_megatron_grpo.settings.losses import Correction


@dataclass(frozen=True, slots=True)
class LogprobRequests:
    """The rule for one run."""

    always: bool  # something reads them in every rollout
    interval: int  # rollouts from one that reports `rollout/k3_kl` to the next; 0: none but the first does

    @classmethod
    def of(cls, correction: Correction, max_staleness: int, dumps: bool, interval: int) -> LogprobRequests:
        """Return the rule for these settings.

        Corrections and their metrics compare the log-probs with the trainer's, the off-policy mask prefers them,
        asynchronous runs take them for old log-probs, and a dump keeps them for a replay with any of these.
        """
        corrects = (
            correction.rollout_importance_sampling_mode is not None
            or correction.log_rollout_offpolicy_metrics
            or correction.off_policy_sequence_mask_delta is not None
        )
        return cls(corrects or max_staleness > 0 or dumps, interval)

    def includes(self, rollout: int, first: int) -> bool:
        """Return True if the log-probs of a rollout are requested. `first`: the first one that this run generates."""
        return self.always or rollout == first or (self.interval > 0 and rollout % self.interval == 0)
