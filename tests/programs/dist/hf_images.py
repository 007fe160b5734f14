"""Compute log-probs, loss and gradients of samples with images with plain transformers in fp64. No megatron.

python hf_images.py MODEL SAMPLES.pt SEED OUT.pt
"""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from hf_gradients import BETA, EPSILON_HIGH, EPSILON_LOW, TEMPERATURE, use_exact_delta_rule
from image_runs import image_rows
from PIL import Image
from transformers import AutoImageProcessor

from tests.support.plain_models import load_plain


def main(folder: str, samples: str, seed: str, out: str) -> None:
    """Write results in fp64, and the log-probs of transformers in fp32: what rounding alone changes."""
    config = json.loads(Path(folder, "config.json").read_text())
    in_fp32 = run(folder, samples, int(seed), torch.float32)
    if "linear_num_key_heads" in config.get("text_config", ()):
        use_exact_delta_rule(config["model_type"])
    torch.save(run(folder, samples, int(seed), torch.float64) | {"in_fp32": in_fp32["logprobs"]}, out)


def run(folder: str, samples: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    model = load_plain(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    processor = AutoImageProcessor.from_pretrained(folder)
    rows = image_rows(seed, side_of_token(processor))
    total, logprobs = torch.zeros((), dtype=dtype), []
    data = torch.load(samples)
    for number, sample in enumerate(data):
        files = [Image.open(BytesIO(image["bytes"])) for image in rows[number // 2]["images"]]
        log_p = (logits(model, processor, sample, files) / TEMPERATURE).log_softmax(-1)
        tokens = [i for i, trained in enumerate(sample["completion_mask"]) if trained]
        now = torch.stack([log_p[i - 1, sample["tokens"][i]] for i in tokens])
        logprobs.append(now.tolist())
        ratio = (now - torch.tensor(sample["old_logprobs"], dtype=dtype)).exp()
        clipped = ratio.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH)
        gap = torch.tensor(sample["ref_logprobs"], dtype=dtype) - now
        surrogate = torch.min(ratio * sample["advantage"], clipped * sample["advantage"])
        kl = (gap.exp() - gap - 1).clamp(-10, 10)  # as in ms-swift
        total = total - (surrogate - BETA * kl).mean() / len(data)
    total.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": total.item(), "logprobs": logprobs, "grads": grads}


def side_of_token(processor: Any) -> int:
    """Return the pixels per side of the square that is one token, or half a tile: then some images have several."""
    return int(processor.size["width"] // 2 if not hasattr(processor, "patch_size") else 2 * processor.patch_size)


def logits(model, processor, sample, files):  # type: ignore[no-untyped-def]
    """Embed the images where the sample has them, and other tokens, sampled placeholders as well, as words."""
    if hasattr(model, "thinker"):
        return logits_of_thinker(model.thinker, processor, sample, files)
    tokens = torch.tensor([sample["tokens"]])
    embeds = model.get_input_embeddings()(tokens)
    types = torch.zeros_like(tokens)
    grids, deep = None, {}
    if files and not hasattr(processor, "patch_size"):
        tiles = processor(images=files, crop_to_patches=True, return_tensors="pt")["pixel_values"]
        options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
        seen = model.model.get_image_features(tiles.to(model.dtype), **options).pooler_output
        shown = [range(a, a + n) for a, n in zip(sample["starts"], sample["lengths"], strict=True)]
        embeds = embeds.index_copy(1, torch.tensor([i for places in shown for i in places]), seen.flatten(0, 1)[None])
    elif files:
        inputs = processor(images=files, do_resize=False, return_tensors="pt")
        grids = inputs["image_grid_thw"]
        for start, length in zip(sample["starts"], sample["lengths"], strict=True):
            types[0, start : start + length] = 1
        seen = model.model.visual(inputs["pixel_values"].to(model.dtype), grid_thw=grids)
        mask = (types == 1)[..., None].expand_as(embeds)
        embeds = embeds.masked_scatter(mask, seen.pooler_output)
        if "deepstack_features" in seen and seen.deepstack_features:
            deep = {"visual_pos_masks": types == 1, "deepstack_visual_embeds": seen.deepstack_features}
    positions = torch.arange(tokens.shape[1])[None]
    if hasattr(model.model, "get_rope_index"):
        positions, _ = model.model.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=grids)
    output = model.model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **deep)
    return model.lm_head(output.last_hidden_state)[0]


def logits_of_thinker(model, processor, sample, files):  # type: ignore[no-untyped-def]
    """Return the same for a Qwen-Omni, which finds images by their tokens: sampled ones are hidden from it."""
    tokens = torch.tensor([sample["tokens"]])
    embeds = model.get_input_embeddings()(tokens)
    shown = torch.zeros_like(tokens, dtype=torch.bool)
    for start, length in zip(sample["starts"], sample["lengths"], strict=True):
        shown[0, start : start + length] = True
    grids, deep = None, {}
    if files:
        inputs = processor(images=files, do_resize=False, return_tensors="pt")
        grids = inputs["image_grid_thw"]
        seen = model.visual(inputs["pixel_values"].to(model.dtype), grid_thw=grids)
        embeds = embeds.masked_scatter(shown[..., None].expand_as(embeds), seen.pooler_output)
        deep = {"visual_pos_masks": shown, "deepstack_visual_embeds": seen.deepstack_features}
    config = model.config
    placeholders = torch.isin(
        tokens, torch.tensor([config.image_token_id, config.video_token_id, config.audio_token_id])
    )
    named = torch.where(placeholders & ~shown, 0, tokens)
    positions, _ = model.get_rope_index(named, image_grid_thw=grids, attention_mask=torch.ones_like(tokens))
    output = model.model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **deep)
    return model.lm_head(output.last_hidden_state)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
