"""Parallel layouts by name, such as tp2+sp; the flags of each, and the processes that run them."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.command_line import Refused

DENSE = [
    "mbs1", "mbs4", "tokens48", "tokens96", "tokens400", "tp2", "tp2+sp", "pp2", "pp2+vpp2", "cp2", "dp2",
    "dp2+overlap", "dp2+tokens64", "tp2+sp+recompute", "tp2+sp+selective", "tp2+pp2", "tp2+cp2", "pp2+cp2",
    "pp2+vpp2+dp2+tokens64",
]  # fmt: skip
MOE = ["dp2+ep2", "tp2+sp", "tp2+sp+dp2+ep2", "tp2+sp+etp2", "pp2+vpp2"]
SIZES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "mbs": "micro_batch_size", "tokens": "max_tokens_per_micro_batch",
}  # fmt: skip
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
_TEMPLATES = {"glm4v_moe": "glm4_5v", "internvl": "internvl_hf"}  # of ms-swift

Task = dict[str, Any]


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
            if match := re.fullmatch(rf"({'|'.join(SIZES)}|dp)(\d+)", part):
                sizes[match[1]] = int(match[2])
            elif part in SWITCHES:
                switches.append(part)
            else:
                known = " ".join([*(f"{kind}N" for kind in SIZES), "dpN", *SWITCHES])
                raise Refused(f"--layouts {name}: unknown part {part!r}; use {known}")
        return cls(name, sizes, tuple(switches))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.get(kind, 1) for kind in ("tp", "pp", "cp", "dp"))

    def flags(self) -> list[str]:
        """Return the flags of `megatron rlhf` for this layout."""
        sizes = [(f"--{flag}", str(self.sizes[kind])) for kind, flag in SIZES.items() if kind in self.sizes]
        return [word for words in [*sizes, *(SWITCHES[switch] for switch in self.switches)] for word in words]


def task(call: str, **arguments: Any) -> Task:
    """For run_tasks: "module:function" and its arguments."""
    return {"call": call, "arguments": arguments}


def layout_tasks(job: dict[str, Any], layouts: Sequence[str]) -> dict[int, list[Task]]:
    """Return tasks by the number of ranks that they need. A job has all arguments of run_layout but the name."""
    tasks: dict[int, list[Task]] = {}
    for name in layouts:
        tasks.setdefault(Variant.parse(name).ranks, []).append(
            task("swift_megatron_grpo.cli.check_layouts.ranks:run_layout", name=name, **job)
        )
    return tasks


def launch(ranks: int, tasks: Sequence[Task], folder: Path) -> None:
    """Run all tasks in one torchrun, whose output goes to a file in the folder."""
    job_file, log = folder / f"tasks{ranks}.json", folder / f"ranks{ranks}.txt"
    job_file.write_text(json.dumps(tasks))
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port"]
    port = str(random.randint(20000, 32000))
    command = [sys.executable, *torchrun, port, "-m", "swift_megatron_grpo.cli.check_layouts.ranks", str(job_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code != 0:
        raise Refused(f"{ranks} ranks failed with code {code}; their last output:\n{log.read_text()[-6000:]}")


def template_for_images(model_type: str) -> str:
    """Return ms-swift's template; a mixture of experts has the dense model's, but for GLM-V."""
    return _TEMPLATES.get(model_type, model_type.removesuffix("_moe"))


def takes_images(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a model with an image part; Qwen-Omni nests its config."""
    return "vision_config" in config.get("thinker_config", config)


def base_flags(
    model: str,
    folder: str,
    tuner_type: str,
    torch_dtype: str,
    attention_backend: str = "flash",
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the flags of `megatron rlhf` that all layouts share."""
    dataset = Path(folder, "data.jsonl")
    dataset.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    # ms-swift derives a model's type from its name, which a local folder need not have.
    config = json.loads(Path(model, "config.json").read_text())
    # ms-swift refuses the dummy template for a model with an image part.
    template = template_for_images(config["model_type"]) if takes_images(config) else "dummy"
    return ["--rlhf_type", "grpo", "--model", model, "--model_type", config["model_type"],
            "--template", template,
            "--dataset", str(dataset), "--reward_funcs", "format",
             "--vllm_mode", "colocate", "--output_dir", str(Path(folder, "output")), "--torch_dtype", torch_dtype,
             *(["--fp16", "false"] if torch_dtype == "float32" else []),  # ms-swift's default for fp32 is fp16
             "--num_generations", "4", "--global_batch_size", "8", "--micro_batch_size", "2", "--train_iters", "2",
             "--temperature", "0.9", "--lr", "1e-3", "--adam_eps", "1e-4", "--clip_grad", "0.05", "--beta", "0",
             "--max_length", "64", "--max_completion_length", "64", "--recompute_granularity", "none",
             "--tuner_type", tuner_type, "--lora_dropout", "0", "--attention_backend", attention_backend,
             "--moe_aux_loss_coeff", "0", "--add_version", "false", "--check_model", "false",
            "--share_prompts", "false", *extra]  # fmt: skip
