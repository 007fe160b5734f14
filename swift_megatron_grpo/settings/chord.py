"""CHORD: given answers, which supervised fine-tuning trains in the same steps as the completions."""

from __future__ import annotations

import math
from typing import Annotated

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, Range, flag, rule

# The values of the first example of ms-swift's documentation.
_NEEDED = {
    "chord_sft_per_device_train_batch_size": 1, "chord_mu_warmup_steps": 0, "chord_mu_decay_steps": 200,
    "chord_mu_peak": 0.9, "chord_mu_valley": 0.05,
}  # fmt: skip


class Chord(Flags):
    """The answers, and the share mu of their loss; the loop reads it."""

    chord_sft_dataset: list[str] | None = flag(
        None,
        "Datasets with answers, of text: supervised fine-tuning trains them in the same steps as the completions "
        "(CHORD). The loss is (1 - mu) times that of the completions plus mu times that of the answers. The chord "
        "flags are those of ms-swift's other trainer. Default: none.",
        example="answers.jsonl",
    )
    chord_sft_per_device_train_batch_size: Annotated[int | None, AtLeast(1, use=1)] = flag(
        None,
        "Answers for each micro batch of completions: a step trains this number times --global_batch_size / "
        "--micro_batch_size, where the latter is 1 with --max_tokens_per_micro_batch. Default: none.",
        example="1",
    )
    chord_enable_phi_function: bool = flag(
        False,
        "Weight every token of an answer by p (1 - p), with p its probability, so that tokens which the policy is "
        "sure of, or never generates, count less. Default: false.",
    )
    chord_mu_warmup_steps: Annotated[int | None, AtLeast(0, use=0)] = flag(
        None, "Steps in which mu grows from 0 to its peak. Default: none.", example="0"
    )
    chord_mu_decay_steps: Annotated[int | None, AtLeast(0, use=200)] = flag(
        None, "Steps after these in which mu falls to its valley, as a cosine. Default: none.", example="200"
    )
    chord_mu_peak: Annotated[float | None, Range(0, 0.9, high=1, why="it is a share of the loss")] = flag(
        None, "The largest mu, which the warm-up ends with. Default: none.", example="0.9"
    )
    chord_mu_valley: Annotated[float | None, Range(0, 0.05, high=1, why="it is a share of the loss")] = flag(
        None, "The mu of all steps after the decay; 0 trains no answers from then on. Default: none.", example="0.05"
    )

    @rule
    def schedule_is_complete(self) -> Faults:
        missing = [f"--{name} {use}" for name, use in _NEEDED.items() if getattr(self, name) is None]
        if self.chord_sft_dataset and missing:
            yield f"--chord_sft_dataset needs {', '.join(m.split()[0] for m in missing)}; use {' '.join(missing)}"

    def mu(self, step: int) -> float:
        """Return the share of the answers in the loss of a step, counted from 0: 0 without answers."""
        peak, valley = self.chord_mu_peak, self.chord_mu_valley
        warmup, decay = self.chord_mu_warmup_steps, self.chord_mu_decay_steps
        if not self.chord_sft_dataset or peak is None or valley is None or warmup is None or decay is None:
            return 0.0
        if step < warmup:
            return step / warmup * peak
        if step >= warmup + decay:
            return valley
        return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2

    def answers(self, micro_batches: int) -> int:
        """Return the number of answers of a step, by its number of micro batches of completions."""
        return (self.chord_sft_per_device_train_batch_size or 0) * micro_batches
