"""Detects which of the image, video and audio parts of its model an engine holds, and counts the tokens of images."""

from typing import Any

from swift.template import Template

from swift_megatron_grpo.data.image_formats import placeholder_texts
from swift_megatron_grpo.data.recordings import RATE, tokens_of
from swift_megatron_grpo.generation.protocol.model_identity import media_config

_MOST_TOKENS_OF_A_TIME = 20  # "<599.9 seconds>", and the marks of start and end


def held_media(model_config: Any) -> frozenset[str]:
    """Return the kinds of media that a prompt may have; vLLM leaves out the parts of the model for others."""
    if not _embeds_media(model_config):
        return frozenset()
    hears = "audio_config" in media_config(model_config.hf_config.to_dict())
    kinds = ("image", "video", "audio") if hears else ("image", "video")
    return frozenset(kind for kind in kinds if model_config.multimodal_config.get_limit_per_prompt(kind) > 0)


def _embeds_media(model_config: Any) -> bool:
    """Return True unless the model is a text model, or all limits on the media that it takes are 0."""
    if not model_config.is_multimodal_model:
        return False
    if hasattr(model_config, "supports_multimodal_inputs"):
        return bool(model_config.supports_multimodal_inputs)
    from vllm.multimodal import MULTIMODAL_REGISTRY  # vLLM before 0.32 asks its registry

    return bool(MULTIMODAL_REGISTRY.supports_multimodal_inputs(model_config))


def knows_times_of_frames(model_type: str) -> bool:
    """Return False if this vLLM places the frames of a Qwen2.5-VL without their times, as 0.25 does."""
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLProcessingInfo

    return model_type != "qwen2_5_vl" or "get_data_parser" in vars(Qwen2_5_VLProcessingInfo)


def drops_marks_of_videos(processor: Any) -> bool:
    """Return True if this vLLM replaces a video's placeholder with the marks around it, as 0.25 does for Qwen3-VL."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor

    is_qwen3 = type(processor).__name__.startswith("Qwen3VL")
    return is_qwen3 and "_expands_only_video_token" not in vars(Qwen3VLMultiModalProcessor)


def most_per_prompt(kind: str, model_config: Any) -> int:
    """Return how many media of a kind a prompt may have; 0 if the engine takes none."""
    if kind == "video" and not knows_times_of_frames(model_config.hf_config.model_type):
        return 0
    return int(model_config.multimodal_config.get_limit_per_prompt(kind)) if kind in held_media(model_config) else 0


def placeholder_tokens(template: Template) -> frozenset[int]:
    """Return the tokens that stand for parts of images, videos and audio; none for a text model."""
    if not template.model_meta.is_multimodal:
        return frozenset()
    processor = template.processor
    return frozenset(processor.tokenizer.convert_tokens_to_ids(placeholder_texts(processor)))


def tokens_of_image(processor: Any, width: int, height: int, resizes: bool) -> int:
    """Return the tokens of an image of this size. `resizes`: vLLM resizes it, because no template has done so."""
    images = processor.image_processor
    if hasattr(processor, "image_seq_length"):  # InternVL: each tile has as many tokens, and two mark start and end
        tiles: int = images.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        return 2 + tiles * int(processor.image_seq_length)
    side = images.patch_size * images.merge_size  # of the square that becomes one token
    if not resizes:
        return int(width * height // side**2)
    patches: int = images.get_number_of_image_patches(height, width, {})
    return patches // int(images.merge_size**2)


def tokens_of_media(processor: Any, inputs: dict[str, Any]) -> int:
    """Return the tokens of an encoded prompt's media beyond the one placeholder that each has there."""
    resizes = (inputs.get("mm_processor_kwargs") or {}).get("do_resize", True)
    images = inputs.get("images") or []
    tokens = sum(tokens_of_image(processor, image.width, image.height, resizes) - 1 for image in images)
    for samples, rate in inputs.get("audios") or []:
        if rate != RATE:
            raise ValueError(
                f"ms-swift's template has resampled a recording to {rate} samples per second; unset the "
                f"environment variable SAMPLING_RATE, because trainer and engine must hear the same {RATE}"
            )
        tokens += tokens_of(len(samples)) - 1
    return tokens + sum(_tokens_of_video(processor, video) for video in inputs.get("videos") or [])


def _tokens_of_video(processor: Any, video: tuple[Any, dict[str, Any]]) -> int:
    """Return the most tokens that stand for frames of which no side is resized, texts with their times included."""
    frames, _, height, width = map(int, video[0].shape)
    side = int(processor.image_processor.patch_size * processor.image_processor.merge_size)
    if height % side or width % side:
        raise ValueError(f"frames of {width} x {height} pixels must have sides that are multiples of {side}")
    return frames // 2 * (height * width // side**2 + _MOST_TOKENS_OF_A_TIME)
