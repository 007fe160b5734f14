"""Have vLLM expand the videos of a Qwen3-VL as 0.25 does: with the marks around their placeholders."""

from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor
from vllm.multimodal.processing import BaseMultiModalProcessor

BaseMultiModalProcessor._expands_only_video_token = staticmethod(lambda processor: False)
del Qwen3VLMultiModalProcessor._expands_only_video_token
