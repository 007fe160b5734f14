"""Checks parallel layouts: trains a fixed batch on one rank and on every layout, and compares the results.

    python -m swift_megatron_grpo.cli.check_layouts --model DIR      (all layouts that --max-ranks, 4, allows)
    python -m swift_megatron_grpo.cli.check_layouts --model DIR --layouts tp2+sp pp2 dp2+ep2 --tuner lora

A layout is written as its parts: tp2, sp, pp2, vpp2, cp2, ep2, etp2, dp2, mbs4 (sequences in a micro batch), tokens64
(token budget of a micro batch), recompute, selective, overlap, elementwise (--recompute_elementwise true), shared
(--share_prompts true; the samples then have prompts to share, which other layouts repeat). Loss, gradient norm and
weights are compared after two optimizer steps with a KL term, one on-policy and one off-policy. The exit code is 1 if a
value differs from that of one rank by more than the tolerance.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.torn_down import megatron_torn_down

_TEMPLATES = {"glm4v_moe": "glm4_5v", "internvl": "internvl_hf"}
DENSE = [
    "mbs1", "mbs4", "tokens48", "tokens96", "tokens400", "tp2", "tp2+sp", "pp2", "pp2+vpp2", "cp2", "dp2",
    "dp2+overlap", "dp2+tokens64", "tp2+sp+recompute", "tp2+sp+selective", "tp2+pp2", "tp2+cp2", "pp2+cp2",
    "pp2+vpp2+dp2+tokens64",
]  # fmt: skip
MOE = ["dp2+ep2", "tp2+sp", "tp2+sp+dp2+ep2", "tp2+sp+etp2", "pp2+vpp2"]
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "mbs": "micro_batch_size",
    "tokens": "max_tokens_per_micro_batch",
}
SWITCHES = {
    "sp": ["--sequence_parallel", "true"],
    "recompute": ["--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", "1"],
    "selective": ["--recompute_granularity", "selective", "--recompute_modules", "core_attn", "mlp"],
    "selective_moe": ["--recompute_granularity", "selective", "--recompute_modules", "moe"],
    "overlap": ["--overlap_grad_reduce", "true"],
    "elementwise": ["--recompute_elementwise", "true"],
    "cpu_adam": ["--optimizer_cpu_offload", "true", "--use_distributed_optimizer", "false"],
    "permute": ["--moe_permute_fusion", "true"],
    "last1": ["--decoder_last_pipeline_num_layers", "1"],
    "uneven_vpp": ["--pipeline_model_parallel_layout", "E|t|tt|tL"],  # of models with four layers
    "shared": ["--share_prompts", "true"],
    "overlap_param": ["--overlap_grad_reduce", "true", "--overlap_param_gather", "true"],
}


@dataclass(frozen=True)
class Variant:
    """A layout and its switches, by name."""

    name: str
    sizes: dict[str, int]
    switches: tuple[str, ...]

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Return the variant of this name, for example tp2+sp; "one" is one rank."""
        sizes: dict[str, int] = {}
        switches: list[str] = []
        for part in [] if name == "one" else name.split("+"):
            match = re.fullmatch(r"(tp|pp|cp|dp|ep|etp|vpp|mbs|tokens)(\d+)", part)
            if match:
                sizes[match[1]] = int(match[2])
            elif part in SWITCHES:
                switches.append(part)
            else:
                known = "tpN ppN cpN dpN epN etpN vppN mbsN tokensN " + " ".join(SWITCHES)
                raise SystemExit(f"--layouts {name}: unknown part {part!r}; use {known}")
        return cls(name, sizes, tuple(switches))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.get(kind, 1) for kind in ("tp", "pp", "cp", "dp"))

    def flags(self) -> list[str]:
        """Return the flags of `megatron rlhf` for this layout."""
        flags: list[str] = []
        for kind, flag in SIZES.items():
            if kind in self.sizes:
                flags += [f"--{flag}", str(self.sizes[kind])]
        for switch in self.switches:
            flags += SWITCHES[switch]
        return flags


@dataclass(frozen=True)
class Run:
    """Results of one layout."""

    layout: str
    metrics: list[dict[str, float]]  # of each step
    weights: str  # file with every weight after the steps, under the checkpoint's names


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


# ------------------------------------------------------------------------------------------ runs on ranks of torchrun


def fixed_samples(
    vocab_size: int, count: int, seed: int = 0, policies_given: bool = False, one_prompt: bool = False
) -> list[Any]:
    """Return random sequences in groups of four.

    `policies_given`: also log-probs of an old and a reference policy, near uniform. `one_prompt`: a group has one.
    """
    from swift_megatron_grpo.types import Sample

    rng = random.Random(seed)
    # The last tokens of a vocabulary are special; a token with a zero embedding (padding) has an unbounded gradient.
    ordinary = vocab_size * 9 // 10
    samples = []
    for i in range(count):
        prompt, completion = rng.randint(3, 20), rng.randint(1, 30)
        policies = [[-math.log(vocab_size) + rng.gauss(0, 0.3) for _ in range(completion)] for _ in range(2)]
        samples.append(
            Sample(
                tokens=[rng.randrange(ordinary) for _ in range(prompt + completion)],
                completion_mask=[False] * prompt + [True] * completion,
                advantage=rng.gauss(0, 1),
                group=i // 4,
                old_logprobs=policies[0] if policies_given else None,
                ref_logprobs=policies[1] if policies_given else None,
            )
        )
        if one_prompt:
            first = samples[i // 4 * 4]
            shared = first.tokens[: first.completion_mask.index(True)]
            samples[i].tokens[:prompt] = shared
            samples[i].completion_mask[:prompt] = [False] * len(shared)
    return samples


def run_rank(job_file: Path) -> None:
    """Prepare a process that torchrun has started, and run the tasks of a file on it."""
    from swift_megatron_grpo.plugin.activation import hook_platform
    from swift_megatron_grpo.plugin.register import register

    hook_platform()
    register()
    run_tasks(json.loads(job_file.read_text()))


def run_tasks(tasks: Sequence[Task]) -> None:
    """Run tasks one after the other in one process group: starting ranks takes longer than most tasks."""
    import torch

    torch.set_num_threads(1)
    for item in tasks:
        module, function = item["call"].split(":")
        with megatron_torn_down():
            getattr(importlib.import_module(module), function)(**item["arguments"])


def run_layout(name: str, flags: list[str], batches: list[str], folder: str, one_prompt: bool = False) -> None:
    """Train one layout, and write its results to NAME.json and NAME.pt in the folder."""
    import torch

    start = time.perf_counter()
    metrics, weights = train([*flags, *Variant.parse(name).flags()], batches, one_prompt)
    if torch.distributed.get_rank() == 0:
        path = str(Path(folder, f"{name}.pt"))
        torch.save(weights, path)
        result = {**asdict(Run(name, metrics, path)), "seconds": time.perf_counter() - start}
        Path(folder, f"{name}.json").write_text(json.dumps(result))


def make_adapter(flags: list[str], adapter: str) -> None:
    """Write a LoRA adapter with random A and B; a new one would differ between layouts, and its B would be 0."""
    import torch
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    trainer = MegatronRLHF(flags).prepare_trainer()
    torch.manual_seed(0)
    for name, parameter in sorted(trainer.unwrapped_models[0].named_parameters()):  # in any order of registration
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    trainer.bridge.save_weights(
        trainer.unwrapped_models, adapter, peft_format=True, args=trainer.args, processor=trainer.template.processor
    )


def train(flags: list[str], kinds: list[str], one_prompt: bool) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Train one step on each batch. Returns the metrics of the steps, and the weights after them."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF
    from swift.megatron.utils import enable_forward_pre_hook

    from swift_megatron_grpo.settings.config import LossConfig
    from swift_megatron_grpo.training.loss import make_loss
    from swift_megatron_grpo.training.optimizer.parameter_gather import gather_parameters
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_model_training()
    if trainer.args.overlap_param_gather:  # ms-swift enables it after the first step of a run
        enable_forward_pre_hook(trainer.wrapped_models)
    engine = trainer.build_engine()
    loss = make_loss(LossConfig(name="grpo", epsilon_low=0.2, epsilon_high=0.28, beta=0.1, temperature=0.9))
    batches = make_batches(kinds, engine, trainer.config.padded_vocab_size, one_prompt)
    metrics = [engine.train_step(samples, loss) for samples in batches]
    gather_parameters(trainer.wrapped_models)
    exported = export_weights(trainer.bridge, trainer.unwrapped_models)
    return metrics, {name: tensor.clone().float().cpu() for name, tensor in exported}


def make_batches(kinds: Sequence[str], engine: Any, vocab_size: int, one_prompt: bool = False) -> list[list[Any]]:
    """Return a batch per kind; its old policy is the current (on-policy), the initial (off-policy) or a given one."""
    batches = []
    for number, kind in enumerate(kinds, start=1):
        samples = fixed_samples(vocab_size, 8, seed=number, policies_given=kind == "given", one_prompt=one_prompt)
        for index, values in engine.infer(samples).items() if kind != "given" else ():
            samples[index].ref_logprobs = values.logprobs
            samples[index].old_logprobs = values.logprobs if kind == "off-policy" else None
        batches.append(samples)
    return batches


Task = dict[str, Any]


def task(call: str, **arguments: Any) -> Task:
    """For run_tasks: "module:function" and its arguments."""
    return {"call": call, "arguments": arguments}


def layout_tasks(job: dict[str, Any], layouts: Sequence[str]) -> dict[int, list[Task]]:
    """Return tasks by the number of ranks that they need. A job has all arguments of run_layout but the name."""
    tasks: dict[int, list[Task]] = {}
    for name in layouts:
        tasks.setdefault(Variant.parse(name).ranks, []).append(
            task("swift_megatron_grpo.cli.check_layouts:run_layout", name=name, **job)
        )
    return tasks


def launch(ranks: int, tasks: Sequence[Task], folder: Path) -> None:
    """Run all tasks in one torchrun, whose output goes to a file in the folder."""
    job_file, log = folder / f"tasks{ranks}.json", folder / f"ranks{ranks}.txt"
    job_file.write_text(json.dumps(tasks))
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port"]
    port = str(random.randint(20000, 32000))
    command = [sys.executable, *torchrun, port, "-m", "swift_megatron_grpo.cli.check_layouts", "--job", str(job_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code != 0:
        raise RuntimeError(f"{ranks} ranks failed with code {code}; their last output:\n{log.read_text()[-6000:]}")


def compare(name: str, folder: str) -> Difference:
    """Compare the results of a layout with those of one rank."""
    import torch

    run, reference = (json.loads(Path(folder, f"{layout}.json").read_text()) for layout in (name, "one"))
    pairs = list(zip(run["metrics"], reference["metrics"], strict=True))
    weights, expected = torch.load(run["weights"]), torch.load(reference["weights"])
    if set(weights) != set(expected):
        raise SystemExit(f"{name}: weights differ from those of one rank: {sorted(set(weights) ^ set(expected))[:5]}")
    return Difference(
        layout=name,
        loss=max(abs(a[key] - b[key]) for a, b in pairs for key in b if key != "grad_norm"),
        grad_norm=max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in pairs),
        weights=max((weights[key] - expected[key]).abs().max().item() for key in expected),
        seconds=run["seconds"],
    )


def template_for_images(model_type: str) -> str:
    """Return ms-swift's template; a mixture of experts has the dense model's, but for GLM-V."""
    return _TEMPLATES.get(model_type, model_type.removesuffix("_moe"))


def base_flags(arguments: argparse.Namespace, folder: str) -> list[str]:
    """Return the flags of `megatron rlhf` that all layouts share."""
    dataset = Path(folder, "data.jsonl")
    dataset.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    # ms-swift derives a model's type from its name, which a local folder need not have.
    config = json.loads(Path(arguments.model, "config.json").read_text())
    # ms-swift refuses the dummy template for a model with an image part.
    template = template_for_images(config["model_type"]) if "vision_config" in config else "dummy"
    return ["--rlhf_type", "grpo", "--model", arguments.model, "--model_type", config["model_type"],
            "--template", template,
            "--dataset", str(dataset), "--reward_funcs", "format",
             "--vllm_mode", "colocate", "--output_dir", str(Path(folder, "output")), "--torch_dtype", arguments.dtype,
             *(["--fp16", "false"] if arguments.dtype == "float32" else []),  # ms-swift's default for fp32 is fp16
             "--num_generations", "4", "--global_batch_size", "8", "--micro_batch_size", "2", "--train_iters", "2",
             "--temperature", "0.9", "--lr", "1e-3", "--adam_eps", "1e-4", "--clip_grad", "0.05", "--beta", "0",
             "--max_length", "64", "--max_completion_length", "64", "--recompute_granularity", "none",
             "--tuner_type", arguments.tuner, "--lora_dropout", "0", "--attention_backend", arguments.attention_backend,
             "--moe_aux_loss_coeff", "0", "--add_version", "false", "--check_model", "false",
            "--share_prompts", "false", *arguments.extra]  # fmt: skip


def print_row(cells: Sequence[str]) -> None:
    print(f"{cells[0]:24}" + "".join(f"{cell:>13}" for cell in cells[1:]), flush=True)


def print_reference(run: dict[str, Any]) -> None:
    """Print the row of one rank."""
    first = run["metrics"][0]
    print_row(["one rank", f"{first['loss']:.6g}", f"{first['grad_norm']:.6g}", "-", f"{run['seconds']:.1f}"])


def print_difference(difference: Difference, tolerance: float) -> None:
    """Print the row of a layout."""
    values = [f"{value:.1e}" for value in (difference.loss, difference.grad_norm, difference.weights)]
    mark = ["FAR OFF"] if difference.worst > tolerance else []
    print_row([difference.layout, *values, f"{difference.seconds:.1f}", *mark])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--layouts", nargs="+", help="default: all that --max-ranks allows for this model")
    parser.add_argument("--tuner", choices=["full", "lora"], default="full")
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend", default="flash")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="more flags of `megatron rlhf`")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_rank(arguments.job)
        return 0
    if not arguments.model:
        parser.error("--model is required")

    arguments.model = str(Path(arguments.model).resolve())  # torchrun's ranks run in another folder
    moe = "num_experts" in Path(arguments.model, "config.json").read_text()
    names = arguments.layouts or (DENSE + MOE if moe else DENSE)
    names = [name for name in names if Variant.parse(name).ranks <= arguments.max_ranks]
    with tempfile.TemporaryDirectory() as folder:
        flags = base_flags(arguments, folder)
        first = []
        if arguments.tuner == "lora":
            adapter = str(Path(folder, "adapter"))
            first = [task("swift_megatron_grpo.cli.check_layouts:make_adapter", flags=flags, adapter=adapter)]
            flags = [*flags, "--adapters", adapter]
        job = {
            "flags": flags,
            "batches": ["on-policy", "off-policy"],
            "folder": folder,
            "one_prompt": any("shared" in Variant.parse(name).switches for name in names),
        }
        tasks = layout_tasks(job, ["one", *names])
        tasks[1] = [*first, *tasks[1]]
        print_row(["layout", "loss", "grad norm", "weights", "seconds"])
        differences = []
        for ranks in sorted(tasks):
            launch(ranks, tasks[ranks], Path(folder))
            if ranks == 1:
                print_reference(json.loads(Path(folder, "one.json").read_text()))
            for difference in (compare(name, folder) for name in names if Variant.parse(name).ranks == ranks):
                differences.append(difference)
                print_difference(difference, arguments.tolerance)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(difference) for difference in differences], indent=1) + "\n")
    far = [difference.layout for difference in differences if difference.worst > arguments.tolerance]
    print(f"{len(differences) - len(far)} of {len(differences)} layouts within {arguments.tolerance:g} of one rank")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
