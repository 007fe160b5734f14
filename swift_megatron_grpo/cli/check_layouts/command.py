"""Check parallel layouts: train a fixed batch on one rank and in every layout, and compare the results.

swift-megatron-grpo check-layouts --model DIR
swift-megatron-grpo check-layouts --model DIR --layouts tp2+sp pp2 dp2+ep2 --tuner_type lora

A layout is written as its parts: tp2, sp, pp2, vpp2, cp2, ep2, etp2, dp2, mbs4 (sequences in a micro batch), tokens64
(token budget of a micro batch), recompute, selective, overlap, elementwise (--recompute_elementwise true), shared
(--share_prompts true; the samples then have prompts to share, which other layouts repeat). Loss, gradient norm and
weights are compared after two optimizer steps with a KL term, one on-policy and one off-policy. The exit code is 1 if a
value differs from that of one rank by more than the tolerance.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swift_megatron_grpo.cli.check_layouts import layouts
from swift_megatron_grpo.cli.command_line import FINE, FOUND, Refused


@dataclass(frozen=True)
class Difference:
    """Largest differences between a layout and one rank."""

    layout: str
    loss: float  # absolute
    grad_norm: float  # relative
    weights: float  # absolute, the largest of all
    seconds: float

    @property
    def worst(self) -> float:
        values = (self.loss, self.grad_norm, self.weights)
        return math.inf if any(math.isnan(v) for v in values) else max(values)


def compare(name: str, folder: str) -> Difference:
    """Compare the results of a layout with those of one rank."""
    import torch

    run, reference = (json.loads(Path(folder, f"{layout}.json").read_text()) for layout in (name, "one"))
    pairs = list(zip(run["metrics"], reference["metrics"], strict=True))
    weights, expected = torch.load(run["weights"]), torch.load(reference["weights"])
    if set(weights) != set(expected):
        raise Refused(f"{name}: weights differ from those of one rank: {sorted(set(weights) ^ set(expected))[:5]}")
    return Difference(
        layout=name,
        loss=max(abs(a[key] - b[key]) for a, b in pairs for key in b if key != "grad_norm"),
        grad_norm=max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in pairs),
        weights=max((weights[key] - expected[key]).abs().max().item() for key in expected),
        seconds=run["seconds"],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--layouts", nargs="+", help="default: all that --nproc_per_node allows for this model")
    parser.add_argument("--nproc_per_node", type=int, default=4, help="most ranks of a layout; default: 4")
    parser.add_argument("--tuner_type", choices=["full", "lora"], default="full", help="default: full")
    parser.add_argument("--torch_dtype", default="float32", help="default: float32")
    parser.add_argument("--attention_backend", default="flash", help="default: flash")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest difference; default: 1e-6")
    parser.add_argument("--output_file", type=Path, help="also write the table to this file, as JSON")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="more flags of `megatron rlhf`")


def run(options: argparse.Namespace) -> int:
    config = options.model / "config.json"
    if not config.is_file():
        raise Refused(f"--model {options.model} has no config.json; give the folder of a Hugging Face checkpoint")
    moe = "num_experts" in config.read_text()
    names = options.layouts or (layouts.DENSE + layouts.MOE if moe else layouts.DENSE)
    names = [name for name in names if layouts.Variant.parse(name).ranks <= options.nproc_per_node]
    with tempfile.TemporaryDirectory() as folder:
        flags = layouts.base_flags(
            model=str(options.model.resolve()),  # torchrun's ranks run in another folder
            folder=folder,
            tuner_type=options.tuner_type,
            torch_dtype=options.torch_dtype,
            attention_backend=options.attention_backend,
            extra=options.extra,
        )
        tasks = tasks_of(flags, names, folder, has_adapter=options.tuner_type == "lora")
        differences = run_all(tasks, names, Path(folder), options.tolerance)
    if options.output_file:
        options.output_file.write_text(json.dumps(list(map(asdict, differences)), indent=1) + "\n")
    far = [difference.layout for difference in differences if difference.worst > options.tolerance]
    print(f"{len(differences) - len(far)} of {len(differences)} layouts within {options.tolerance:g} of one rank")
    return FOUND if far else FINE


def tasks_of(flags: list[str], names: Sequence[str], folder: str, has_adapter: bool) -> dict[int, list[layouts.Task]]:
    """Return the tasks of these layouts and of one rank, by the number of ranks that they need."""
    first = []
    if has_adapter:
        adapter = str(Path(folder, "adapter"))
        first = [layouts.task("swift_megatron_grpo.cli.check_layouts.ranks:make_adapter", flags=flags, adapter=adapter)]
        flags = [*flags, "--adapters", adapter]
    one_prompt = any("shared" in layouts.Variant.parse(name).switches for name in names)
    job = {"flags": flags, "batches": ["on-policy", "off-policy"], "folder": folder, "one_prompt": one_prompt}
    tasks = layouts.layout_tasks(job, ["one", *names])
    return tasks | {1: [*first, *tasks[1]]}


def run_all(
    tasks: dict[int, list[layouts.Task]], names: Sequence[str], folder: Path, tolerance: float
) -> list[Difference]:
    """Run the tasks, fewest ranks first, and print a row for each layout."""
    print_row("layout", "loss", "grad norm", "weights", "seconds")
    differences = []
    for ranks in sorted(tasks):
        layouts.launch(ranks, tasks[ranks], folder)
        if ranks == 1:
            one = json.loads((folder / "one.json").read_text())
            loss, norm = (f"{one['metrics'][0][name]:.6g}" for name in ("loss", "grad_norm"))
            print_row("one rank", loss, norm, "-", f"{one['seconds']:.1f}")
        for found in (compare(name, str(folder)) for name in names if layouts.Variant.parse(name).ranks == ranks):
            differences.append(found)
            values = (f"{value:.1e}" for value in (found.loss, found.grad_norm, found.weights))
            mark = ["FAR OFF"] if found.worst > tolerance else []
            print_row(found.layout, *values, f"{found.seconds:.1f}", *mark)
    return differences


def print_row(name: str, *cells: str) -> None:
    print(f"{name:24}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
