"""Let vLLM up to 0.25.1 start a Qwen3-Omni that takes sound and no images (vLLM's issue 49384).

A tower whose media are limited to 0 is on the meta device and has no memory. There these versions also put what carries
the image tower's deepstack features to the decoder, which adds it to all embeddings: "Tensor on device meta is not on
the expected device cuda:0". vLLM 0.32 puts it elsewhere.
"""

from types import ModuleType
from typing import Any

from swift_megatron_grpo.runtime.import_hooks import after_import

MODULE = "vllm.model_executor.models.qwen3_omni_moe_thinker"


def skip_features_of_missing_tower() -> None:
    """Install it in this process, before vLLM builds a model; once is enough."""
    after_import(MODULE, install_in)


def install_in(module: ModuleType) -> None:
    model = module.Qwen3OmniMoeThinkerForConditionalGeneration
    stock = model._get_deepstack_input_embeds
    if stock.__module__ == __name__:
        return

    def features(self: Any, num_tokens: int) -> Any:
        """Return None, as vLLM does for a model that has no such features, if the tower is missing."""
        held = vars(self).get("deepstack_input_embeds")
        return None if held and held[0].is_meta else stock(self, num_tokens)

    model._get_deepstack_input_embeds = features
