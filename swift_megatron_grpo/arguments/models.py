"""Checks of the model that config.json describes: supported types, attention layers, kernels, experts, positions."""

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.arguments.derived import DerivedArguments
from swift_megatron_grpo.arguments.refused import (
    ALL_COMPOSITE,
    INTERNVL_LANGUAGES,
    REFUSED_COMPOSITE,
    REFUSED_TEXT,
    STOCK_TRAINER,
    TAKES_IMAGES,
    TEXT,
)
from swift_megatron_grpo.generation.protocol.model_identity import language_config, position_identity
from swift_megatron_grpo.platforms.attention_packages import fault_of_delta_rule, has_flash_attention
from swift_megatron_grpo.settings.flag import Faults, as_typed, faults_of, raise_faults
from swift_megatron_grpo.settings.modules import module_paths
from swift_megatron_grpo.settings.positions import Positions
from swift_megatron_grpo.settings.trained import Trained
from swift_megatron_grpo.weights.load.quantization import check_quantization
from swift_megatron_grpo.weights.stored_tensors import stored_tensors

_SEEING = ("vis", "multi_modal_projector")  # how names begin in the image part of a checkpoint


def faults_of_model(args: DerivedArguments) -> Faults:
    """Yield what this trainer cannot do with the architecture in config.json, which ms-swift has read."""
    yield from faults_of(_check_architecture, args)
    dtype = str(args.torch_dtype).removeprefix("torch.")  # vLLM and servers check their own devices
    yield from faults_of(check_quantization, args.rollout_quantization, args.vllm_enable_lora, dtype, None)


def _check_architecture(args: DerivedArguments) -> None:
    config = args.model_config
    check_type(args.model, config, args.model_meta.is_multimodal)
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    check_kernels(args.model, config, on_hopper)
    check_attention_layers(args.model, config)
    check_sinks(args.model, config, as_typed(args.attention_backend))
    if torch.cuda.is_available():
        check_flash_attention(as_typed(args.attention_backend), args.context_parallel_size, has_flash_attention())
    check_stacked_experts(args.model, args.model_dir, config)
    if args.model_meta.is_multimodal:
        check_modules(args.model_dir, config, args.model_shape.experts is not None, args.of(Trained))
        check_composite_rope(args.of(Positions), config)
        check_composite(args.model, config, (args.freeze_llm, args.freeze_vit, args.freeze_aligner))


def check_modules(folder: str | Path, config: Mapping[str, Any], has_experts: bool, trained: Trained) -> None:
    """Refuse names of modules that neither the language model nor the image part of a composite model has."""
    parts = {name.rpartition(".")[0] for name in stored_tensors(folder)}
    if trained.tuner_type == "lora" and parts:  # of a hub, weights are downloaded later
        seeing = [path for path in parts if any(part.startswith(_SEEING) for part in path.split("."))]
        raise_faults(trained.faults_of_modules([*module_paths(language_config(config), has_experts), *seeing]))


def check_type(model: str, config: Mapping[str, Any], is_multimodal: bool) -> None:
    """Refuse a type that no test has trained, by name."""
    model_type = config.get("model_type", "")
    if is_multimodal and model_type not in ALL_COMPOSITE:
        reason = REFUSED_COMPOSITE.get(model_type, "mcore-bridge 1.6.5 does not convert this type")
        raise ValueError(
            f"--model {model}: {model_type} is a model with an image, video or audio part that is not supported: "
            f"{reason}; use a text model, or a model of one of the types {', '.join(ALL_COMPOSITE)}, or "
            f"{STOCK_TRAINER}"
        )
    if not is_multimodal and model_type in REFUSED_TEXT:
        raise ValueError(
            f"--model {model}: {model_type} is not supported: {REFUSED_TEXT[model_type]}; use a model of one of the "
            f"types {', '.join(TEXT)}"
        )


def check_composite(model: str, config: Mapping[str, Any], frozen: tuple[bool, bool, bool]) -> None:
    """Refuse a composite model with nothing to train, or with another language model than a test has trained."""
    if all(frozen):
        raise ValueError(
            "--freeze_llm true, --freeze_vit true and --freeze_aligner true leave nothing to train; set one of them to "
            "false"
        )
    if config["model_type"] not in TAKES_IMAGES and not (frozen[1] and frozen[2]):
        flag = "freeze_aligner" if frozen[1] else "freeze_vit"
        raise ValueError(
            f"--{flag} false: a {config['model_type']} is trained on rows of text alone, and only its language model; "
            f"use --{flag} true"
        )
    kind = language_config(config)["model_type"]
    if config["model_type"] == "internvl" and kind not in INTERNVL_LANGUAGES:
        raise ValueError(
            f"--model {model}: it is an internvl with a language model of type {kind}, which no test has compared with "
            f"plain transformers yet; use one with {', '.join(INTERNVL_LANGUAGES)}, or {STOCK_TRAINER}"
        )


def check_kernels(model: str, config: Mapping[str, Any], on_hopper: bool) -> None:
    """Raise ValueError if a model with linear attention would find no kernels for it; the CPU platform has its own."""
    if "linear_num_key_heads" not in language_config(config):
        return
    if find_spec("fla") is None:
        raise ValueError(
            f"--model {model} has linear attention, which needs flash-linear-attention; use "
            'pip install "flash-linear-attention>=0.6,<0.7", or the commands of docs/install.md'
        )
    fault = fault_of_delta_rule(version("triton"), find_spec("tilelang") is not None) if on_hopper else None
    if fault is not None:
        raise ValueError(f"--model {model} has linear attention: {fault}")


def check_flash_attention(backend: str, cp_size: int, has_flash_attention: bool) -> None:
    """Raise ValueError if context-parallel ranks on GPUs would find no attention kernel."""
    if backend == "flash" and cp_size > 1 and not has_flash_attention:
        raise ValueError(
            f"--context_parallel_size {cp_size} with --attention_backend flash needs flash-attn, which is not "
            "installed: torch's own kernel has no ring attention; install flash-attn, or use --attention_backend fused"
        )


def check_sinks(model: str, config: Mapping[str, Any], backend: str) -> None:
    """Raise ValueError if flash attention would have to compute attention sinks, which Transformer Engine refuses."""
    if language_config(config).get("model_type") == "gpt_oss" and backend.startswith("flash"):
        raise ValueError(
            f"--attention_backend {backend}: --model {model} is a gpt_oss, whose attention sinks flash attention does "
            "not have; use --attention_backend unfused"
        )


def check_engine(model: str, config: Mapping[str, Any], vllm_mode: str) -> None:
    """Raise ValueError for a type that vLLM, which has no code for it, cannot run in the processes of the trainer."""
    if config.get("model_type") == "dots1" and vllm_mode == "colocate":
        raise ValueError(
            f"--vllm_mode colocate: --model {model} is a dots1, for which vLLM changes the class of transformers that "
            "ms-swift saves it with; use --vllm_mode server"
        )


def check_attention_layers(model: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if Megatron would build other attention layers than this config.json describes.

    mcore-bridge 1.6.5 has full attention in every layer that full_attention_interval divides, and reads neither
    layer_types nor, without layer_types, the interval: transformers replaces it by the list. It then takes 4.
    """
    text = language_config(config)
    if "linear_num_key_heads" not in text or "num_hidden_layers" not in text:
        return
    listed, given, layers = text.get("layer_types"), text.get("full_attention_interval") or 4, text["num_hidden_layers"]
    described, interval = list(listed or _layers(given, layers)), given if listed else 4
    built = _layers(interval, layers)
    if built == described:
        return
    layer = next(i for i, (ours, theirs) in enumerate(zip(built, described, strict=False)) if ours != theirs)
    fitting = [size for size in range(1, layers + 1) if _layers(size, layers) == described]
    advice = f'set "full_attention_interval": {fitting[0]} and "layer_types" in it' if fitting else "use another model"
    raise ValueError(
        f"--model {model}: by its config.json layer {layer} has {described[layer]}, and Megatron would build "
        f"{built[layer]}: mcore-bridge takes a full_attention_interval of {interval}; {advice}"
    )


def _layers(interval: int, layers: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


_TRANSPOSED = "qwen3_vl_moe"  # the one model_type of ALL_COMPOSITE whose released experts are transposed


def check_stacked_experts(model: str, folder: str | Path, config: Mapping[str, Any]) -> None:
    """Refuse a Qwen3-VL mixture of experts that transformers has saved again.

    The released checkpoints have [experts, inputs, outputs], and transformers transposes them when it loads. Its
    save_pretrained does not transpose them back. mcore-bridge and vLLM expect every checkpoint to be as released.
    """
    if config.get("model_type") != _TRANSPOSED:
        return
    text = language_config(config)
    hidden, intermediate = text["hidden_size"], text["moe_intermediate_size"]
    released = {"gate_up_proj": (hidden, 2 * intermediate), "down_proj": (intermediate, hidden)}
    for name, tensor in stored_tensors(folder).items():
        wanted = released.get(name.rpartition("mlp.experts.")[2])
        if wanted is not None and tensor.shape[1:] != wanted:
            raise ValueError(
                f"--model {model}: {name} is {list(tensor.shape)}, and the released checkpoints of {_TRANSPOSED} have "
                f"{[tensor.shape[0], *wanted]}: transformers' save_pretrained does not transpose experts back, and "
                "neither Megatron nor vLLM can load them; use the released checkpoint, or exchange the last two "
                "dimensions of every mlp.experts.gate_up_proj and mlp.experts.down_proj"
            )


def check_composite_rope(positions: Positions, config: Mapping[str, Any]) -> None:
    """Raise ValueError if --rope_scaling changes the positions of a composite model. `config`: of its config.json.

    ms-swift fills in the checkpoint's own scaling where the flag is not given, which vLLM reads from config.json.
    """
    value = positions.rope_scaling
    if not value:
        return
    asked, own = position_identity({"rope_parameters": positions.scaling}), position_identity(config)
    if asked["rope_type"] != own["rope_type"] or asked["rope_factor"] not in (None, own["rope_factor"]):
        raise ValueError(
            f"--rope_scaling {value}: vLLM takes the positions of a model with an image or video part from its "
            "config.json only, so trainer and vLLM would differ; leave it out, or change rope_parameters in config.json"
        )
