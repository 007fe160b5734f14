"""Rollouts on disk: written, replayed, or generated without training."""

from __future__ import annotations

from pathlib import Path

from swift_megatron_grpo.settings.flag import Faults, Flags, flag, rule


class Recording(Flags):
    """Folders of recorded rollouts; the loop reads and writes them."""

    rollout_dump: str | None = flag(
        None,
        "Folder to which every rollout of this run is written: the tokens and rewards of each completion, "
        "as JSON lines. docs/dump_and_replay.md describes the format. Default: none, rollouts are not written.",
        example="/shared/run1/rollouts",
    )
    rollout_replay: str | None = flag(
        None,
        "Folder written by --rollout_dump of another run: train on its completions and rewards, without "
        "starting vLLM or calling reward functions. Default: none.",
        example="/shared/run1/rollouts",
    )
    rollout_only: bool = flag(
        False,
        "Generate, grade and write the rollouts of this run (--rollout_dump) with the initial weights, "
        "without training. Default: false.",
    )
    resume: str = "never"

    @rule
    def a_replay_is_not_copied(self) -> Faults:
        if self.rollout_replay is not None and self.rollout_dump is not None:
            yield (
                f"--rollout_replay {self.rollout_replay} does not generate rollouts, so --rollout_dump "
                f"{self.rollout_dump} would only copy that folder; leave one of them out"
            )

    @rule
    def rollouts_alone_are_generated_and_kept(self) -> Faults:
        if self.rollout_only and self.rollout_replay is not None:
            yield ("--rollout_only true only generates, and --rollout_replay does not generate; leave one of them out")
        if self.rollout_only and self.rollout_dump is None:
            yield (
                "--rollout_only true discards its rollouts unless they are written to disk; add --rollout_dump with a "
                "folder"
            )

    @property
    def continues(self) -> bool:
        """True if what an earlier run has left in the folders of this run is continued."""
        return self.resume != "never"

    @property
    def dump(self) -> Path | None:
        return _absolute(self.rollout_dump)

    @property
    def replay(self) -> Path | None:
        return _absolute(self.rollout_replay)


class CompletionLogging(Flags):
    """The log of completions, in the run's folder and in trackers; the loop writes it."""

    log_completions: bool
    output_dir: str  # ms-swift fills it in
    report_to: list[str]
    wandb_log_unique_prompts: bool | None


def _absolute(typed: str | None) -> Path | None:
    return None if typed is None else Path(typed).expanduser().absolute()
