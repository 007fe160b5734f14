"""Format what a dry run found."""

from __future__ import annotations

from collections.abc import Sequence

from swift_megatron_grpo.dry_run.estimate import Estimate
from swift_megatron_grpo.dry_run.model import Model
from swift_megatron_grpo.dry_run.rows import Reward, Rows
from swift_megatron_grpo.planning.advice import MARGIN
from swift_megatron_grpo.planning.gpus import Gpu

_LABEL = 12  # columns


def report(gpu: Gpu, ranks: int, notes: Sequence[str], model: Model, rows: Rows, rewards: Sequence[Reward],
           result: Estimate) -> str:  # fmt: skip
    """Return the text of the report."""
    sections = [
        [*notes],
        [
            _row("model", f"{model.name}, {_count(model.parameters)} parameters"),
            *_dataset(rows),
            *_rewards(rewards),
            *_micro_batches(result),
        ],
        _memory(gpu, ranks, result),
        _time(result),
        _verdict(gpu, ranks, result),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _row(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _dataset(rows: Rows) -> list[str]:
    sampled = "" if len(rows.prompts) == rows.total else f", by the first {len(rows.prompts)}"
    return [
        _row(
            "dataset",
            f"{rows.total:,} rows; prompts of {rows.median:,} tokens at the median, {rows.longest:,} at most{sampled}",
        )
    ]


def _rewards(rewards: Sequence[Reward]) -> list[str]:
    lines = []
    for reward in rewards:
        if reward.problem is not None:
            lines.append(_row("reward", reward.problem))
            continue
        scores = ", ".join("none" if score is None else f"{score:g}" for score in reward.scores)
        lines.append(_row("reward", f"{reward.name}: {scores} for made-up answers, in {reward.seconds:.2f} s"))
    return lines


def _micro_batches(result: Estimate) -> list[str]:
    shared = "; completions share their prompt" if result.plan.share_prompts else ""
    lines = [
        _row(
            "step",
            f"{result.plan.num_micro_batches} micro batches on each data-parallel rank, at full length; the largest "
            f"has {result.largest.packed:,} tokens{shared}",
        )
    ]
    if result.plan.over_budget:
        lines.append(_row("", f"{len(result.plan.over_budget)} samples are alone longer than the token budget"))
    return lines


def _memory(gpu: Gpu, ranks: int, result: Estimate) -> list[str]:
    columns = ("stage", "weights", "gradients", "optimizer", "reference", "activations", "logits", "vLLM",
               "generation", "train")  # fmt: skip
    lines = [
        f"memory of each GPU in GB, of {gpu.memory_gb:g} that a {gpu.name} has; the last two columns are peaks",
        "".join(f"{column:>12}" for column in columns),
    ]
    for rank in result.memory:
        sizes = (rank.weights, rank.gradients, rank.optimizer, rank.reference, rank.activations, rank.in_backward,
                 rank.vllm, rank.phases["generation"], rank.phases["train"])  # fmt: skip
        lines.append(f"{rank.pipeline_rank:>12}" + "".join(f"{size / 1e9:>12.1f}" for size in sizes))
    return lines


def _time(result: Estimate) -> list[str]:
    """Return a first guess: shares of the GPU's peak are those of dense models on one H200."""
    train = f"train phase {result.train_seconds:.3g} s"
    if result.generation_seconds is None:
        return [_row("time", f"{train}, for completions of half the maximal length; servers generate")]
    both = result.train_seconds + result.generation_seconds
    rate = result.work.completion_tokens / both
    return [
        _row(
            "time",
            f"a guess: {train}, generation {result.generation_seconds:.3g} s per step, "
            f"{rate:,.0f} completion tokens/s; completions of half the maximal length, the longest at it",
        )
    ]


def _verdict(gpu: Gpu, ranks: int, result: Estimate) -> list[str]:
    peak = max(rank.peak for rank in result.memory) / 1e9
    if result.fits:
        return [f"The run fits: {peak:.1f} of {gpu.memory_gb:g} GB."]
    limit = gpu.memory_gb * (1 - MARGIN)
    lines = [f"The run does not fit: {peak:.1f} GB, of which {limit:.1f} can be used on a {gpu.name}."]
    if not result.changes:
        return [*lines, "No change of a single kind makes it fit; use more GPUs with a larger pipeline or more experts "
                "parallel"]  # fmt: skip
    return [
        *lines,
        "Any of these makes it fit:",
        *(f"  {change.flags}    ({change.cost})" for change in result.changes),
    ]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.2f} million"
