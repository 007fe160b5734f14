"""Drafts in vLLM's second model runner: ours in place of its n-gram speculator, and accepted where they are sampled.

On a CPU the first model runner drafts (drafts.py).
"""

from types import ModuleType
from typing import Any

import torch
from packaging.version import Version

from swift_megatron_grpo.generation.vllm import device_drafts, drafts, predicted_drafts
from swift_megatron_grpo.generation.vllm.device_drafts import METHOD, DeviceDrafts
from swift_megatron_grpo.generation.vllm.drafts import GroupDrafts
from swift_megatron_grpo.generation.vllm.predicted_drafts import PredictedDrafts
from swift_megatron_grpo.generation.vllm.verification import accepted_rows
from swift_megatron_grpo.runtime.import_hooks import after_import

_PACKAGE = "vllm.v1.worker.gpu"
_AT_ONCE = 1024  # requests of an engine without --vllm_max_num_seqs, at most
Drafts = GroupDrafts | DeviceDrafts | PredictedDrafts


def draft_settings(most: int, at_once: int | None, predicted: bool) -> dict[str, Any]:
    """Return vLLM's settings of an engine that verifies up to `most` drafts of a request in a step; 0: none.

    `predicted`: by the model's own layers of multi-token prediction.
    """
    if not most:
        return {}
    if predicted:
        return predicted_drafts.engine_settings(most)
    if torch.cuda.is_available():
        return device_drafts.engine_settings(most, at_once or _AT_ONCE)
    return drafts.engine_settings(most)


def refusal_of_history(version: str, on_gpu: bool) -> str | None:
    """Return why this vLLM should not draft from texts: only its second model runner gains by them; None: it may."""
    if on_gpu and Version(version) < Version("0.32"):
        return (
            f"vLLM {version} has such drafts in its first model runner alone, where a rollout took 5 to 6 times as "
            "long with them on an H200, and vLLM 0.32 has them in its second one"
        )
    return None


def drafter_of(worker: Any) -> Any:
    """Return what vLLM has built by the name in its settings, which takes part in the steps of this worker."""
    runner = worker.model_runner
    return runner.speculator if worker.vllm_config.use_v2_model_runner else runner.drafter


def draft_in_second_runner() -> None:
    """Install both in the process; once is enough."""
    after_import(f"{_PACKAGE}.model_runner", build_device_drafts)
    after_import(f"{_PACKAGE}.spec_decode.rejection_sampler", verify_in)


def build_device_drafts(module: ModuleType) -> None:
    stock = module.init_speculator
    if stock.__module__ == __name__:
        return

    def build(vllm_config: Any, device: torch.device, state: Any) -> Any:
        ours = vllm_config.speculative_config.method == METHOD
        return DeviceDrafts(vllm_config, device, state) if ours else stock(vllm_config, device, state)

    module.__dict__["init_speculator"] = build


def verify_in(module: ModuleType) -> None:
    module.__dict__["rejection_sample"] = verify


def verify(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    *_: Any,
    use_fp64: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for `rejection_sample`: each row samples as a plain step samples it, with its seed and position."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    samples = gumbel_sample(target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False,
                            is_drafting=False, use_fp64=use_fp64)  # fmt: skip
    return accepted_rows(samples, draft_sampled, cu_num_logits, num_speculative_steps)
