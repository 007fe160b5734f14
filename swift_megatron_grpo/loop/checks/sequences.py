"""Settings that are not defined for completions of several training sequences."""

from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.settings.config import GRPOConfig


class SeveralSequences(RuntimeError):
    """A completion has several sequences, and the run trains whole completions in one."""


def check_sequences(graded: GradedRollouts, config: GRPOConfig) -> None:
    """Raise SeveralSequences if a completion has several and a setting reads its only one."""
    sequences = int(graded.outcomes.sequences.sum())
    needs_one = {
        f"--loss_type {config.loss.name} reads completions of one sequence; use another --loss_type": (
            config.loss.name in ("real", "vespo")  # all sequences of a completion, or of a group, in one formula
        ),
        "--router_replay_mode R3 has the experts of one sequence; use R2 or disabled": (
            config.routing.router_replay_mode == "R3"
        ),
        "--chord_sft_dataset adds answers to micro batches of one sequence per completion; remove it": (
            config.chord.chord_sft_dataset is not None
        ),
    }
    for reason, applies in needs_one.items():
        if applies and sequences > len(graded):
            raise SeveralSequences(
                f"{len(graded)} completions have {sequences} training sequences, because a scheduler continues in "
                f"another context, and {reason}"
            )
