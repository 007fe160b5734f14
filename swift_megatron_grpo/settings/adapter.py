"""The adapter of a run, and what weight syncs send to vLLM and verify."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from swift_megatron_grpo.settings.flag import Faults, Flags, Range, flag, rule
from swift_megatron_grpo.types import Quantization

SyncCheckMode = Literal["off", "canary", "full"]
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


class Adapter(Flags):
    """The adapter that a run trains, and whether vLLM runs it or merged weights; weight syncs read it."""

    tuner_type: str
    adapters: list[str]
    mcore_adapter: str | None
    mcore_model: str | None
    vllm_mode: str | None
    ref_adapters: list[str]
    lora_rank: int
    lora_dropout: Annotated[float, Range(0, 0, high=1, below_high=True)] = flag(
        0.0, "Dropout of LoRA. ms-swift's default of 0.05 has no effect there. Default: 0.", example="0.05"
    )
    expert_tensor_parallel_size: int
    torch_dtype: Any  # of the engine's weights, or of those that it quantizes
    vllm_enable_lora: bool
    sync_check: SyncCheckMode = flag(
        "canary",
        "Verification, after every weight sync, that vLLM runs the trained weights. canary: the names and shapes of "
        "the tensors that were sent equal those of the previous sync, and vLLM holds every tensor with the checksum "
        "that it was sent with; trainer and vLLM agree on the log-probs of a fixed text up to rounding in the first "
        "three syncs of a run, after a failed sync or for a new engine in three more, and in every 16th. If vLLM "
        "quantizes its weights (--rollout_quantization) or computes some from what is sent, log-probs are verified in "
        "every sync and checksums in the first. full: both in every sync. A sync that fails is repeated once; if it "
        "fails again, the run stops and names the tensors that differ. off: no verification. With --vllm_enable_lora "
        "true no checksum is verified, not even in the first sync: vLLM must have a module for each of the adapter's, "
        "and the log-probs must agree in every sync. Default: canary.",
    )
    rollout_quantization: Quantization = flag(
        "none",
        "fp8: vLLM generates with weights and activations in 8 bits, which it quantizes after every sync. It needs a "
        "GPU that multiplies in FP8 (Ada, Hopper or newer); start `swift rollout` with the same flag, and set "
        "--rollout_importance_sampling_mode token_truncate. docs/quantization.md has more. Default: none.",
    )

    @property
    def exists(self) -> bool:
        return self.tuner_type != "full" or bool(self.adapters or self.mcore_adapter or self.ref_adapters)

    @property
    def slot(self) -> int | None:
        """The smallest of vLLM's adapter ranks that fits --lora_rank; None: vLLM runs merged weights."""
        if not self.vllm_enable_lora:
            return None
        return min(rank for rank in VLLM_LORA_RANKS if rank >= self.lora_rank)

    @rule
    def experts_of_an_adapter_are_whole(self) -> Faults:
        if self.exists and self.expert_tensor_parallel_size > 1:
            yield (
                f"--expert_tensor_parallel_size {self.expert_tensor_parallel_size}: mcore-bridge does not support LoRA "
                "on tensor-parallel experts; use --expert_tensor_parallel_size 1, and distribute whole experts with "
                "--expert_model_parallel_size"
            )

    @rule
    def vllm_can_run_the_adapter(self) -> Faults:
        """With --vllm_enable_lora, vLLM loads --model, and a server receives only the adapter."""
        if not self.vllm_enable_lora:
            return
        if not self.exists:
            yield "--vllm_enable_lora true requires --tuner_type lora, and this run has no adapter; leave it out"
        elif self.lora_rank > VLLM_LORA_RANKS[-1]:
            yield (
                f"--vllm_enable_lora true: vLLM supports adapters up to rank {VLLM_LORA_RANKS[-1]}, and --lora_rank is "
                f"{self.lora_rank}; use --vllm_enable_lora false, which merges the adapter"
            )
        elif self.mcore_model is not None and self.vllm_mode == "server":
            yield (
                "--vllm_enable_lora true: a server would apply the adapter to its --model, and the trainer applies it "
                f"to --mcore_model {self.mcore_model}; use --vllm_enable_lora false, which sends merged weights"
            )
        elif self.sync_check == "full":
            yield (
                "--sync_check full verifies the tensors of a model, and with --vllm_enable_lora true vLLM scales and "
                "fuses the adapter's tensors; use --sync_check canary, or --vllm_enable_lora false"
            )

    def notes(self) -> list[str]:
        """Return a note for the start-up log on dropout."""
        if not self.exists or self.lora_dropout == 0:
            return []
        return [
            f"--lora_dropout {self.lora_dropout:g}: log-probs of a training step are computed with dropout, and those "
            "of vLLM, the old and the reference log-probs without it; use --lora_dropout 0 to train the policy that "
            "generates"
        ]
