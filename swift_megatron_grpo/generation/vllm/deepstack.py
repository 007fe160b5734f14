"""Deepstack features, by which the image tower of Qwen3-VL and Qwen3-Omni reaches the first layers of the decoder.

vLLM adds them to the embeddings of every prompt. They are zero where no image is. The tensors are not buffers.

* Up to 0.25.1 they are on the meta device, like the tower, if a Qwen3-Omni takes sound and no images. It fails with
  "Tensor on device meta is not on the expected device cuda:0" (vLLM's issue 49384). vLLM 0.32 has this mended.
* A sleep at level 2 discards their memory, and vLLM restores only buffers (vLLM's issue 53343).
"""

from types import ModuleType
from typing import Any

import torch

from swift_megatron_grpo.runtime.import_hooks import after_import

MODULE = "vllm.model_executor.models.qwen3_omni_moe_thinker"


@torch.inference_mode()  # in which vLLM makes larger ones
def clear_features(model: torch.nn.Module) -> None:
    """Set them to zero after a wake-up, as they are between two batches."""
    for rows in vars(model).get("deepstack_input_embeds") or ():  # [tokens of a batch, hidden] of each level
        rows.zero_()


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
