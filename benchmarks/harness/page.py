"""Write docs/performance.md, the pages of benchmarks/results and the tables of other pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .chart import draw, draw_headlines
from .draft_prices import with_draft_prices
from .long_run_page import with_long_runs
from .node import page as node
from .other_pages import BEST, beside_peers, compared, shared_prompts, tables, uses_server, with_table
from .own_runs import ahead, costs_of_ranks
from .results import Comparison, Run
from .results_pages import CHART as PHASES_CHART
from .results_pages import WRITTEN, pages

PAGE, CHART, RESULTS = Path("docs/performance.md"), Path("docs/performance.svg"), "benchmarks/*/*.json"
INTRODUCTION = f"""\
# Performance

{WRITTEN}

How long a step takes in this package and in other trainers on the same machine, with random weights of real sizes.
[benchmarks/README.md](../benchmarks/README.md) has the method and all runs, with losses, gradient norms and MFU.
[performance-log.md](performance-log.md) lists what each change gave.

![Seconds of a step by phase](performance.svg)

* Both trainers generate completions of the same lengths, in groups of 8 or 16, without a KL term.
* Processes alternate on one machine. Each number is the median of the measured steps.
* Each trainer has its best setting, of those tried under the same memory cap.
* GPUs are H200 unless H100 is named. *Peak GB*: allocated by PyTorch in the train phase, ms-swift / this package.
"""
STEP = """\
## Whole step

Generation, weight sync, rewards and training, with vLLM in the training processes. It gains least where generation
takes most of it: with 8B LoRA, and with Qwen3.5 without CUDA graphs. [With a server](../benchmarks/results/step.md).
"""
TRAIN = """\
## Train phase

Log-prob passes, forward and backward, gradient reduction and the optimizer. Dense models train twice as fast: no pass
for old log-probs on policy, micro batches packed by tokens, a head that never holds all logits. Mixtures of experts
gain more, because one kernel multiplies all experts of a layer. [All runs](../benchmarks/results/train.md).
"""
OTHERS = """\
## TRL and verl

Whole steps next to TRL 0.29.1 and verl 0.9.1, with the same loss, optimizer and LoRA. We ran both at the best of one
or two settings; their authors have not reviewed them. Padding for one long completion makes TRL 4.75 times as slow.
verl 0.9.1 looks every 2 s whether a rollout is complete, so up to 2 s of its steps are a wait.
"""
SHARED = """\
## Shared prompts

Completions of a group share one copy of their prompt in forward and backward. The longer the prompt, the more it saves:
[shared_prompts.md](shared_prompts.md). Seconds of the train phase.
"""
AHEAD = """\
## Servers ahead of training

Half of two or four GPUs train while servers on the others generate the next rollout, against colocated ranks on all.
It pays at 8B, and not for 1.7B with a vLLM that stays awake: [async.md](async.md#generate-ahead-of-training).
"""
LAYOUTS = """\
## Layouts of one model

8B LoRA on several GPUs, with as many completions on each. Data parallelism costs nothing; a pipeline costs 17 to 34 %
and tensor parallelism 22 to 43 %. Use them only where the model does not fit: [scaling.md](scaling.md).
"""
END = """\
## More

* Weight syncs, FP8 rollouts and expert parallelism: [own.md](../benchmarks/results/own.md).
* Seconds of each phase: [phases.md](../benchmarks/results/phases.md).
* How a step is divided, and what limits it now: [performance-log.md](performance-log.md#remaining-bottlenecks).
* Measure on your machine: `python -m benchmarks.bench train --help`.
"""
LEFT_OUT = ("train-tiny", "share-", "memory-", "held-out", "step-equal", "fixed-", "moe-4.5b-even")  # beginnings
SHARING = [f"share-{model}-{prompt}-8" for model in ("1.7b", "8b-lora") for prompt in (512, 8192)]


def write_page(repository: Path) -> None:
    runs = read_runs(repository)
    for path, text in files(runs).items():
        (repository / path).parent.mkdir(exist_ok=True)
        (repository / path).write_text(text)
    (repository / node.PAGE).write_text(node.text_of(repository))
    for path, marks, text in (*tables(runs), with_long_runs(repository), with_draft_prices(repository)):
        file = repository / path
        file.write_text(with_table(file.read_text(), marks, text))


def files(runs: Sequence[Run]) -> dict[Path, str]:
    """Return every file that is written as a whole, by its path in the repository."""
    return {PAGE: page(runs), CHART: draw_headlines(runs), PHASES_CHART: draw(runs), **pages(runs)}


def read_runs(repository: Path) -> list[Run]:
    return [Run.read(path) for path in sorted(repository.glob(RESULTS))]


def page(runs: Sequence[Run]) -> str:
    return "\n".join(
        [
            INTRODUCTION,
            *(STEP, compared([pair for pair in _at_best(runs, "step") if not uses_server(pair.ours.run)])),
            *(TRAIN, compared(_at_best(runs, "train"))),
            *(OTHERS, beside_peers(runs)),
            *(SHARED, shared_prompts(runs, SHARING, without=("ms-swift", "peak GB: repeated / shared / ms-swift"))),
            *(AHEAD, ahead(runs, without=("generation / train phase", "waiting / train phase"))),
            *(LAYOUTS, costs_of_ranks([run for run in runs if "H200" in run.device])),
            END,
        ]
    )


def _at_best(runs: Sequence[Run], kind: str) -> list[Comparison]:
    kept = [run for run in runs if run.kind == kind and not run.name.startswith(LEFT_OUT) and "H200" in run.device]
    return [pair for run in kept for pair in run.comparisons() if pair.what == BEST]
