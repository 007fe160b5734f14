"""A vLLM engine that quantizes, in a separate process, which is loaded with one checkpoint after another.

    python -m tests.programs.e2e.quantized_engine RESULT FOLDER [FOLDER ...]

The engine starts with the first checkpoint. Each of the others is loaded as a weight sync does it; before the last one
the engine sleeps at level 2, where vLLM can. RESULT has the tensors that kernels read, the completion of a prompt, and
the problems that checksums show after each sync and after one in which a tensor is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from safetensors.torch import load_file
from swift.rlhf_trainers.utils import finish_vllm_weight_reload
from vllm import LLM, SamplingParams

from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.load.online_layers import online_layers
from swift_megatron_grpo.weights.load.quantization import engine_settings
from swift_megatron_grpo.weights.verify import Manifest, compare_with_sent

DTYPE = torch.bfloat16
ON_GPU = torch.cuda.is_available()
PROMPT = list(range(1, 40))


class Engine:
    def __init__(self, folder: Path) -> None:
        self.llm = LLM(
            str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, max_num_seqs=8, seed=0,
            gpu_memory_utilization=0.2, kv_cache_memory_bytes=2**26, enable_sleep_mode=ON_GPU,
            enforce_eager=not ON_GPU, **engine_settings("fp8"),
        )  # fmt: skip
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.model, self.model_config = worker.get_model(), worker.model_runner.model_config
        device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
        self.finish = partial(finish_vllm_weight_reload, self.model, self.model_config, device, strict=True)
        self.loaded = LoadedWeights(self.model, DTYPE, "engine", online_layers(self.model, worker.vllm_config))

    def sync(self, sent: dict[str, torch.Tensor], meant: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
        """Load what is sent. Return the differences from what was meant to be sent."""
        on_device = ((name, tensor.to("cuda" if ON_GPU else "cpu")) for name, tensor in sent.items())
        self.loaded.load(on_device, self.finish, collect_checksums=True)
        self.llm.reset_prefix_cache()
        manifest = Manifest(DTYPE)
        for _ in manifest.record(meant.items()):
            pass
        problems, unreadable = compare_with_sent(manifest.specs, manifest.checksums(), [self.loaded.worker_weights()])
        return [(problem.tensor, problem.what) for problem in problems] + [(name, "unreadable") for name in unreadable]

    def sleep_and_wake(self, load: Any) -> list[tuple[str, str]]:
        engine = self.llm.llm_engine
        self.llm.reset_prefix_cache()
        engine.sleep(2)
        engine.wake_up(tags=["weights"])
        problems: list[tuple[str, str]] = load()
        engine.wake_up(tags=["kv_cache"])
        return problems

    def completion(self) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
        [output] = self.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.model.named_parameters()}


def tensors_of_kernels(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, and what the kernels of experts hold besides."""
    found = {name: tensor.detach().cpu().clone() for name, tensor in model.named_parameters()}
    for name, module in model.named_modules():
        kernel = vars(vars(module).get("quant_method", Engine)).get("moe_kernel")
        experts = [] if kernel is None else [kernel.impl.fused_experts]
        experts += [vars(holder)["experts"] for holder in experts if "experts" in vars(holder)]
        for holder in experts:
            found |= {f"{name}.{key}": value.cpu() for key, value in vars(holder).items() if torch.is_tensor(value)}
    return found


def main(result: Path, folders: Iterable[Path]) -> None:
    first, *others = folders
    engine = Engine(first)
    addresses = engine.addresses()
    problems = []
    for place, folder in enumerate(others):
        weights = load_file(folder / "model.safetensors")
        load = partial(engine.sync, weights, weights)
        last = place == len(others) - 1
        problems.append(engine.sleep_and_wake(load) if ON_GPU and last else load())
    tensors, completion = tensors_of_kernels(engine.model), engine.completion()
    wrong: list[tuple[str, str]] = []
    if others:
        name = sorted(name for name in weights if "down_proj" in name)[-1]
        wrong = engine.sync(weights | {name: weights[name].flip(0)}, weights)
    torch.save(
        {
            "tensors": tensors,
            "completion": completion,
            "problems": problems,
            "wrong": wrong,
            "moved": [name for name, address in engine.addresses().items() if addresses.get(name) != address],
        },
        result,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))
