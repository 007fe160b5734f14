"""Flags of the runs, and the processes that run them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.command_line import Refused

_TEMPLATES = {"glm4v_moe": "glm4_5v", "internvl": "internvl_hf"}

Task = dict[str, Any]


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
    template = template_for_images(config["model_type"]) if "vision_config" in config else "dummy"
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
