"""Tasks of the ranks: torchrun starts `python -m swift_megatron_grpo.cli.check_layouts.ranks TASKS`."""

import gc
import importlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.check_layouts.layouts import Task, Variant


def fixed_samples(
    vocab_size: int, count: int, seed: int = 0, policies_given: bool = False, one_prompt: bool = False
) -> list[Any]:
    """Return random sequences in groups of four. `policies_given`: with near-uniform log-probs of other policies."""
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
            shared = first.completion_mask.index(True)
            samples[i].tokens[:prompt] = first.tokens[:shared]
            samples[i].completion_mask[:prompt] = [False] * shared
    return samples


@contextmanager
def megatron_torn_down() -> Iterator[None]:
    """Destroy Megatron's groups on exit, because every layout creates them again; torch's process group stays."""
    try:
        yield
    finally:
        import torch.distributed as dist
        from mcore_bridge.bridge import gpt_bridge
        from megatron.core import mpu
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

        mpu.destroy_model_parallel()
        gpt_bridge.EP_PP_GROUP = None  # mcore-bridge creates it once per process
        unset_num_microbatches_calculator()
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):  # Megatron refuses other backends
            os.environ.pop(name, None)
        # A layout leaves about 20 groups, to each of which gloo gives two threads. A group is destroyed once torch and
        # the model release it, and the model once its hooks do, whose references Python's garbage collector cannot see.
        gc.unfreeze()  # frozen objects are neither listed nor collected
        for candidate in gc.get_objects():
            if type(candidate) is DistributedDataParallel:
                vars(candidate).clear()
        for group in list(dist.distributed_c10d._world.pg_names):
            if group is not dist.group.WORLD and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)
        gc.collect()
        gc.freeze()  # ms-swift collects several times per save, half a second each with the objects of all imports


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
        torch.save(weights, path)  # after the steps, under the checkpoint's names
        result = {"metrics": metrics, "weights": path, "seconds": time.perf_counter() - start}
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

    from swift_megatron_grpo.settings.losses import LossConfig
    from swift_megatron_grpo.training.loss import make_loss
    from swift_megatron_grpo.training.trained_weights import gather_parameters
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_model_training()
    if trainer.args.overlap_param_gather:  # ms-swift enables it after the first step of a run
        enable_forward_pre_hook(trainer.wrapped_models)
    engine = trainer.build_engine()
    loss = make_loss(LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.1))
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


if __name__ == "__main__":  # in a process that torchrun has started
    from swift_megatron_grpo.plugin.rank import hook_platform
    from swift_megatron_grpo.plugin.register import register

    hook_platform()
    register()
    run_tasks(json.loads(Path(sys.argv[1]).read_text()))
