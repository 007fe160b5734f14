"""Makes `--use_rslora` and `--lora_dropout` take effect, and gives every rank the right dropout masks.

Upstream: peft 0.19 and newer pass the settings of an adapter to a layer as one `config`. mcore-bridge 1.6.5, the
version that this package is tested with, reads it in `LoraParallelLinear.update_layer` only, and its constructor passes
that method its own defaults instead. The adapter is then scaled by alpha / r whatever --use_rslora is, and has no
dropout, while the configuration that is saved with it has both: whoever loads it scales it by alpha / sqrt(r).

Fix: pass the settings as the keywords that the constructor reads.

Masks: torch's default generator is not suitable. vLLM in the same process draws from it, and moves it to another state
on every rank. A layer whose input is replicated on all tensor-parallel ranks needs one mask on them, because each rank
computes a slice of the same output; a layer whose input is sharded needs another mask on every rank. Two states of
Megatron's tracker provide that, which its activation checkpointing restores in backward. They are seeded in every step,
so that a resumed run draws the masks of an uninterrupted one.

Tests: tests/unit/training/upstream_fixes/test_adapter_settings.py fails once upstream reads the settings; then delete
`adapter_settings_applied` but for the dropout. tests/dist/test_adapter_settings.py fails without the fix.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from peft.tuners.lora import model as peft_model

from swift_megatron_grpo.runtime.replaced import replaced

_REPLICATED = "adapter-dropout-replicated"
_SHARDED = "adapter-dropout-sharded"


@contextmanager
def adapter_settings_applied() -> Iterator[None]:
    """Apply all settings of adapters that peft creates inside the context."""
    dispatch = peft_model.dispatch_megatron

    def dispatch_with_settings(target: Any, adapter_name: str, config: Any, **options: Any) -> Any:
        names = ("lora_dropout", "init_lora_weights", "use_rslora", "lora_bias")
        settings = {name: getattr(config, name) for name in names}
        module = dispatch(target, adapter_name, config=config, **settings, **options)
        if module is not None and config.lora_dropout > 0:
            # its input is replicated on all tensor-parallel ranks, or sharded
            sharded = module.is_parallel_a or module.is_expert or module.config.sequence_parallel
            state = _SHARDED if sharded else _REPLICATED
            module.lora_dropout[adapter_name] = AdapterDropout(config.lora_dropout, state)
        return module

    with replaced(peft_model, "dispatch_megatron", dispatch_with_settings):
        yield


class AdapterDropout(torch.nn.Module):
    """Dropout whose masks come from one of the two states; in evaluation mode it does nothing."""

    def __init__(self, p: float, state: str) -> None:
        super().__init__()
        self.p = p
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        with get_cuda_rng_tracker().fork(self.state):
            return torch.nn.functional.dropout(x, self.p)


def has_adapter_dropout(models: Iterable[torch.nn.Module]) -> bool:
    return any(isinstance(module, AdapterDropout) for model in models for module in model.modules())


def seed_adapter_dropout(seed: int, step: int) -> None:
    """Seed the masks of one training step, which then depend on the run's seed, the step and the rank only."""
    tracker = get_cuda_rng_tracker()
    ranks = {_SHARDED: torch.distributed.get_rank(), _REPLICATED: mpu.get_tensor_model_parallel_src_rank()}
    for state, rank in ranks.items():
        digest = blake2b(f"{seed} {step} {state} {rank}".encode(), digest_size=7).digest()
        tracker.states_.pop(state, None)
        tracker.seeds_.discard(int.from_bytes(digest))
        tracker.add(state, int.from_bytes(digest))
