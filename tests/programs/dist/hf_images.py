"""Compute log-probs, loss and gradients of samples with images with plain transformers in fp64. No megatron.

python hf_images.py MODEL SAMPLES.pt SEED OUT.pt
"""

from __future__ import annotations

import json
import struct
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hf_gradients import BETA, EPSILON_HIGH, EPSILON_LOW, TEMPERATURE, use_exact_delta_rule
from image_runs import image_rows
from PIL import Image
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoVideoProcessor

from tests.support.plain_models import load_plain

SECONDS_OF_FRAME = 1.0
SEEN = (("", "pixel_values", "image_grid_thw"), ("watched_", "pixel_values_videos", "video_grid_thw"))


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
    watches = model.config.model_type.startswith("qwen")
    rows = image_rows(seed, side_of_token(processor), hasattr(model, "thinker"), watches)
    of_videos = AutoVideoProcessor.from_pretrained(folder) if watches else None
    total, logprobs = torch.zeros((), dtype=dtype), []
    data = torch.load(samples)
    for number, sample in enumerate(data):
        files = [Image.open(BytesIO(image["bytes"])) for image in rows[number // 2]["images"]]
        videos = rows[number // 2]["videos"]
        if hasattr(model, "thinker"):
            extractor = AutoFeatureExtractor.from_pretrained(folder)
            sounds = filter(None, map(sound_of, videos))
            played = [extracted(extractor, file) for file in (*rows[number // 2]["audios"], *sounds)]
            raw = logits_of_thinker(model.thinker, processor, sample, files, played, of_videos, videos)
        else:
            raw = logits(model, processor, sample, files, of_videos, videos)
        log_p = (raw / TEMPERATURE).log_softmax(-1)
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


def logits(model, processor, sample, files, of_videos, videos):  # type: ignore[no-untyped-def]
    """Embed the images where the sample has them, and other tokens, sampled placeholders as well, as words."""
    tokens = torch.tensor([sample["tokens"]])
    embeds = model.get_input_embeddings()(tokens)
    types = torch.zeros_like(tokens)
    grids, watched, deep = None, None, {}
    if files and not hasattr(processor, "patch_size"):
        tiles = processor(images=files, crop_to_patches=True, return_tensors="pt")["pixel_values"]
        options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
        seen = model.model.get_image_features(tiles.to(model.dtype), **options).pooler_output
        shown = [range(a, a + n) for a, n in zip(sample["starts"], sample["lengths"], strict=True)]
        embeds = embeds.index_copy(1, torch.tensor([i for places in shown for i in places]), seen.flatten(0, 1)[None])
    elif files or videos:
        embeds, types, grids, watched, deep = with_visuals(
            model.model.visual, processor, sample, embeds, files, of_videos, videos
        )
    positions = torch.arange(tokens.shape[1])[None]
    if hasattr(model.model, "get_rope_index"):
        takes_seconds = model.config.model_type == "qwen2_5_vl"
        timed = {"second_per_grid_ts": [2 * SECONDS_OF_FRAME] * len(videos)} if takes_seconds else {}
        positions, _ = model.model.get_rope_index(
            tokens, mm_token_type_ids=types, image_grid_thw=grids, video_grid_thw=watched, **timed
        )
        for start, length in zip(sample["watched_starts"], sample["watched_lengths"], strict=True):
            behind = slice(start + length, None)
            gap = positions[:, 0, start : start + length].max() + 1 - positions[0, 0, behind.start]
            positions[:, 0, behind] += gap  # vLLM counts time, which transformers leaves out
    output = model.model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **deep)
    return model.lm_head(output.last_hidden_state)[0]


def with_visuals(tower, processor, sample, embeds, files, of_videos, videos):  # type: ignore[no-untyped-def]
    """Embed images and videos. Return types of tokens (1: image, 2: video), grids, and what deepstack adds."""
    types, rows, deep_rows = torch.zeros(embeds.shape[:2], dtype=torch.long), torch.zeros_like(embeds), {}
    inputs = processor(images=files, do_resize=False, return_tensors="pt") if files else {}
    if videos:
        shown = [pixels_of(video) for video in videos]
        inputs |= of_videos(videos=shown, do_resize=False, do_sample_frames=False, return_tensors="pt")
    for number, (name, pixels, grid) in enumerate(SEEN, start=1):
        if grid in inputs:
            for start, length in zip(sample[f"{name}starts"], sample[f"{name}lengths"], strict=True):
                types[0, start : start + length] = number
            seen = tower(inputs[pixels].to(embeds.dtype), grid_thw=inputs[grid])
            here = (types == number)[..., None].expand_as(embeds)
            rows = rows.masked_scatter(here, seen.pooler_output)
            for layer, found in enumerate(seen.get("deepstack_features") or ()):
                deep_rows[layer] = deep_rows.get(layer, torch.zeros_like(embeds)).masked_scatter(here, found)
    added = [found[types > 0] for found in deep_rows.values()]
    deep = {"visual_pos_masks": types > 0, "deepstack_visual_embeds": added} if added else {}
    embeds = torch.where((types > 0)[..., None], rows, embeds)
    return embeds, types, inputs.get("image_grid_thw"), inputs.get("video_grid_thw"), deep


def pixels_of(video: bytes) -> torch.Tensor:
    """Return the frames [frames, colours, height, width] of a video as engines are sent it."""
    _, count, height, width, *_ = struct.unpack_from("<8sIIIId", video)
    pixels = np.frombuffer(video, np.uint8, 3 * count * height * width, offset=32 + 4 * count)
    return torch.from_numpy(pixels.reshape(count, 3, height, width).copy())


def sound_of(video: bytes) -> bytes:
    _, count, height, width, *_ = struct.unpack_from("<8sIIIId", video)
    return video[32 + 4 * count + 3 * count * height * width :]


def extracted(extractor, file):  # type: ignore[no-untyped-def]
    """Return the features [1, bins, frames] of a WAV of 16 bits, and how many there are."""
    samples = np.frombuffer(file[44:], dtype=np.int16) / 2**15
    found = extractor(samples, sampling_rate=16_000, return_attention_mask=True, padding="longest", truncation=False,
                      return_tensors="pt")  # fmt: skip
    return found["input_features"], found["attention_mask"]


def logits_of_thinker(model, processor, sample, files, played, of_videos, videos):  # type: ignore[no-untyped-def]
    """Return the same for a Qwen-Omni, which finds media by their tokens: sampled ones are hidden from it."""
    tokens = torch.tensor([sample["tokens"]])
    embeds = model.get_input_embeddings()(tokens)
    embeds, types, grids, watched, deep = with_visuals(
        model.visual, processor, sample, embeds, files, of_videos, videos
    )
    lengths = None
    heard = torch.zeros_like(tokens, dtype=torch.bool)
    if played:
        for start, length in zip(sample["heard_starts"], sample["heard_lengths"], strict=True):
            heard[0, start : start + length] = True
        rows = [model.get_audio_features(features.to(model.dtype), mask).last_hidden_state for features, mask in played]
        embeds = embeds.masked_scatter(heard[..., None].expand_as(embeds), torch.cat(rows))
        lengths = torch.tensor([int(mask.sum()) for _, mask in played])
    config = model.config
    placeholders = torch.isin(
        tokens, torch.tensor([config.image_token_id, config.video_token_id, config.audio_token_id])
    )
    named = torch.where(placeholders & (types == 0) & ~heard, 0, tokens)
    every = torch.ones_like(tokens)
    positions, _ = model.get_rope_index(
        named, image_grid_thw=grids, video_grid_thw=watched, attention_mask=every, audio_seqlens=lengths,
        second_per_grids=torch.full((len(videos),), 2.0),  # vLLM's, whatever the times of the frames
        use_audio_in_video=any(map(sound_of, videos)),
    )  # fmt: skip
    output = model.model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **deep)
    return model.lm_head(output.last_hidden_state)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
