"""Run a layout on one rank with the head's generic path, for models whose logits are not a plain product."""

from __future__ import annotations

from swift_megatron_grpo.cli.check_layouts import ranks


def run_layout(flags: list[str], batches: list[str], folder: str) -> None:
    from swift_megatron_grpo.training.head import logprob

    plain = logprob.logits_are_a_plain_product

    def never(model: object, project: object) -> bool:
        assert plain(model, project)  # so the run to compare with took the fused path
        return False

    logprob.logits_are_a_plain_product = never
    try:
        ranks.run_layout("mbs2", flags, batches, folder)
    finally:
        logprob.logits_are_a_plain_product = plain
