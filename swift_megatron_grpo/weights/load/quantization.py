"""vLLM's settings and the checks of `--rollout_quantization`, for the training processes and for rollout servers."""

from collections.abc import Sequence
from typing import Any

from swift_megatron_grpo.types import Quantization
from swift_megatron_grpo.weights.load.staging import OnlineLayer

# vLLM's name of what linear layers and experts become: e4m3 with one scale per row of a weight, which depends neither
# on which projections vLLM fuses nor on the other rows; activations get one scale per token.
FP8 = "fp8_per_channel"

# Layers that stay as they are, by regular expressions of their names: routers, whose choice of experts the trainer
# compares or replays; the small projections of gates and decay rates in linear attention; parts for images.
_KEPT = (
    r"re:.*\.(gate|router|shared_expert_gate)$",
    r"re:.*\.linear_attn\.in_proj_(a|b|ba)$",
    r"re:(.*\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|vpm|vit_merger|merger)\..*",
)
_ONLINE = "online"  # as vLLM calls what quantization_config describes
_OLDEST = (8, 9)  # compute capability of GPUs that multiply in FP8


def engine_settings(quantization: Quantization) -> dict[str, Any]:
    """Return the settings of vLLM's EngineArgs."""
    if quantization == "none":
        return {}
    # vLLM quantizes embeddings, the output layer and norms in no case.
    config = {"linear": FP8, "moe": FP8, "ignore": list(_KEPT)}
    return {"quantization": _ONLINE, "quantization_config": config}


def layers_that_quantize(model: Any, vllm_config: Any) -> Sequence[OnlineLayer]:
    """Return the layers of a loaded model that quantize what they load; none without --rollout_quantization."""
    if vllm_config.model_config.quantization != _ONLINE:
        return ()
    from swift_megatron_grpo.weights.load.online_layers import online_layers  # vLLM has what it imports since 0.25

    return online_layers(model, vllm_config)


def refusal_of_device(capability: tuple[int, int] | None, has_experts: bool) -> str | None:
    """Return why a device cannot run a model quantized; None: it can. `capability`: of a GPU; None: a CPU."""
    if capability is None:  # torch multiplies in FP8 on a CPU, slowly: for a test of a script
        return "vLLM has no FP8 mixture of experts on a CPU" if has_experts else None
    if capability >= _OLDEST:
        return None
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, and FP8 needs {_OLDEST[0]}.{_OLDEST[1]}"


def check_quantization(quantization: Quantization, adapter_only: bool, dtype: str | None, device: str | None) -> None:
    """Raise ValueError if vLLM cannot run quantized with the other flags; `device`: why the device cannot."""
    if quantization == "none":
        return
    flag = f"--rollout_quantization {quantization}"
    if adapter_only:
        raise ValueError(
            f"{flag} with --vllm_enable_lora true: vLLM would run the adapter on quantized weights; use "
            "--vllm_enable_lora false, which merges the adapter before the weights are quantized"
        )
    if dtype not in (None, "bfloat16", "float16"):
        raise ValueError(
            f"{flag}: vLLM quantizes weights of 16 bits, and --torch_dtype is {dtype}; use --torch_dtype bfloat16, or "
            "--rollout_quantization none"
        )
    if device is not None:
        raise ValueError(f"{flag}: {device}; use --rollout_quantization none")


def mismatch(here: Quantization, there: str) -> str | None:
    """Return the reason why a server cannot serve a run, if they differ in what vLLM quantizes."""
    if here == there:
        return None
    start = "without --rollout_quantization" if here == "none" else f"with --rollout_quantization {here}"
    return (
        f"its --rollout_quantization is {there}, and that of this run is {here}; start it {start}, or use "
        f"--rollout_quantization {there} here"
    )


def start_up_notes(quantization: Quantization, correction: str | None, splits_experts: bool) -> list[str]:
    """Return notes. `correction`: --rollout_importance_sampling_mode. `splits_experts`: an engine has several GPUs."""
    if quantization == "none":
        return []
    flag = f"--rollout_quantization {quantization}"
    notes = []
    if correction is None:
        notes.append(
            f"{flag}: vLLM samples from a policy whose weights and activations are rounded, and no flag corrects for "
            "the difference, which has cost others accuracy; use --rollout_importance_sampling_mode token_truncate"
        )
    if splits_experts:
        notes.append(
            f"{flag}: steps of a mixture of experts were slower with it where several GPUs share an engine "
            "(docs/quantization.md); compare time/generation and time/weight_sync with --rollout_quantization none"
        )
    return notes
