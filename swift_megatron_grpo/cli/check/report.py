"""Format what a check found."""

from collections.abc import Sequence
from statistics import median

from swift_megatron_grpo.cli.check.estimate import Estimate
from swift_megatron_grpo.cli.check.model import Model
from swift_megatron_grpo.cli.check.rows import Reward, Rows
from swift_megatron_grpo.cli.estimate.advice import MARGIN
from swift_megatron_grpo.cli.estimate.memory import PHASES
from swift_megatron_grpo.runtime.gpus import Gpu

_WORTH_NAMING = 0.1  # of the time of a step


def report(notes: Sequence[str], rows: Rows, rewards: Sequence[Reward], model: Model | str, result: Estimate | None,
           gpu: Gpu) -> str:  # fmt: skip
    """Return the text of the report. `model`: the reason, if its sizes are unknown; then there is no result."""
    sections = [[*notes], [_dataset(rows), *map(_reward, rewards)]]
    if isinstance(model, str):
        sections.append([_row("memory", f"unknown: {model}")])
    elif result is not None:
        sections[1].insert(0, _row("model", f"{model.name}, {_count(model.parameters)} parameters"))
        sections[1].extend(_micro_batches(result))
        sections += [_memory(gpu, result), _time(result), _verdict(gpu, result)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _row(label: str, text: str) -> str:
    return f"{label:<12}{text}"


def _dataset(rows: Rows) -> str:
    sampled = "" if len(rows.prompts) == rows.total else f", by the first {len(rows.prompts)}"
    middle, longest = int(median(rows.lengths)), max(rows.lengths)
    prompts = f"prompts of {middle:,} tokens at the median, {longest:,} at most{sampled}"
    return _row("dataset", f"{rows.total:,} rows; {prompts}")


def _reward(reward: Reward) -> str:
    scores = ", ".join("none" if score is None else f"{score:g}" for score in reward.scores)
    graded = f"{reward.name}: {scores} for made-up responses, in {reward.seconds:.2f} s"
    if reward.skipped is not None:
        return _row("reward", f"{reward.name}: {reward.skipped}")
    return _row("reward", reward.problem or graded)


def _micro_batches(result: Estimate) -> list[str]:
    shared = "; completions share their prompt" if result.plan.share_prompts else ""
    number = f"{result.plan.num_micro_batches} micro batches on each data-parallel rank, at full length"
    lines = [_row("step", f"{number}; the largest has {result.largest.packed:,} tokens{shared}")]
    if result.fullest > result.largest.packed:
        lines.append(_row("", f"memory is for one of {result.fullest:,} tokens, which shorter completions can fill"))
    if result.answers is not None:
        more = f"{result.answers.number} micro batches more; the largest has {result.answers.largest.packed:,} tokens"
        lines.append(_row("answers", more))
    if result.plan.over_budget:
        lines.append(_row("", f"{len(result.plan.over_budget)} samples are alone longer than the token budget"))
    return lines


def _memory(gpu: Gpu, result: Estimate) -> list[str]:
    columns = ("stage", "weights", "gradients", "optimizer", "reference", "activations", "logits", "vLLM", "offloaded",
               *PHASES)  # fmt: skip
    lines = [
        f"memory of each GPU in GB, of {gpu.memory_gb:g} that a {gpu.name} has; the last three columns are peaks",
        "".join(f"{column:>12}" for column in columns),
    ]
    for rank in result.memory:
        sizes = (rank.weights, rank.gradients, rank.optimizer, rank.reference, rank.activations, rank.in_backward,
                 rank.vllm, rank.offloaded, *(rank.phases[phase] for phase in PHASES))  # fmt: skip
        lines.append(f"{rank.pipeline_rank:>12}" + "".join(f"{size / 1e9:>12.1f}" for size in sizes))
    if result.engine is not None:
        engine, gpu_bytes = result.engine, gpu.memory_bytes
        lines.append(
            f"vLLM's share holds {engine.weights / 1e9:.1f} GB of weights and "
            f"{max(0, engine.cache(gpu_bytes)) / 1e9:.1f} GB of cache: "
            f"{engine.sequences(gpu_bytes, engine.longest):,} sequences of {engine.longest:,} tokens at one time"
        )
    return lines


def _time(result: Estimate) -> list[str]:
    """Return a first guess, with the shares of the peak that dense models reach on one H200."""
    train = f"train phase {result.train_seconds:.3g} s"
    if result.generation_seconds is None:
        lines = [_row("time", f"a guess: {train}, for completions of half the maximal length, without generation")]
    else:
        rate = result.completion_tokens / (result.train_seconds + result.generation_seconds)
        phases = f"{train}, generation {result.generation_seconds:.3g} s per step, {rate:,.0f} completion tokens/s"
        lines = [_row("time", f"a guess: {phases}; completions of half the maximal length, the longest at it")]
        if result.with_two_steps is not None:
            saved = result.generation_seconds - result.with_two_steps
            if saved > _WORTH_NAMING * (result.train_seconds + result.generation_seconds):
                faster = f"with --steps_per_generation 2, generation takes {result.with_two_steps:.3g} s per step"
                lines.append(_row("", f"{faster}: two steps wait for one rollout's longest completion"))
    if (even := result.even_stages) is not None:
        now, then = (round(100 * (share - 1)) for share in (even.fullest_before, even.fullest))
        waits = "the pipeline waits for the stage with the output layer"
        lines += [
            _row("", f"{waits}, which has {now} % more work than the mean;"),
            _row("", f"with --decoder_last_pipeline_num_layers {even.layers} the fullest has {then} % more"),
        ]
    return lines


def _verdict(gpu: Gpu, result: Estimate) -> list[str]:
    peak = max(rank.peak for rank in result.memory) / 1e9
    lines = [] if result.engine_fits else _small_engine(gpu, result)
    if result.fits:
        return lines or [f"The run fits: {peak:.1f} of {gpu.memory_gb:g} GB."]
    limit = gpu.memory_gb * (1 - MARGIN)
    lines.append(f"The run does not fit: {peak:.1f} GB, of which {limit:.1f} can be used on a {gpu.name}.")
    if not result.changes:
        return [*lines, "No change of one kind makes it fit: use more GPUs, with pipeline or expert parallelism."]
    changes = (f"  {change.flags}    ({change.cost})" for change in result.changes)
    return [*lines, "Any of these makes it fit:", *changes]


def _small_engine(gpu: Gpu, result: Estimate) -> list[str]:
    """Return what vLLM lacks, and flags with which it has it."""
    engine = result.engine
    assert engine is not None
    found = [
        f"vLLM does not fit: {engine.weights / 1e9:.1f} GB of weights and a sequence of {engine.longest:,} tokens",
        f"need more than its {engine.utilization * gpu.memory_gb:.1f} GB, which are --vllm_gpu_memory_utilization "
        f"{engine.utilization:g}.",
    ]
    if not result.engine_changes:
        return [*found, "Neither a larger share nor a larger --vllm_tensor_parallel_size is enough: use servers."]
    return [*found, "Any of these is enough:", *(f"  {flags}" for flags in result.engine_changes)]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.2f} million"
