"""Samples with images for layouts of tests/dist: prompts with none, one and two images, and sampled placeholders."""

from __future__ import annotations

import gc
import json
import random
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.data.recordings import wav_of, with_silence

COLUMNS = ["tokens", "completion_mask", "advantage", "old_logprobs", "ref_logprobs"]
NUMBER_OF_IMAGES = (0, 1, 2, 1)  # of each prompt
SECONDS = ((1.3,), (), (0.4, 2.15), (1.0,))  # of its recordings, for a model that hears
FRAMES = ((), (4,), (), (2, 6))  # of its videos, for a model that takes some
SOUNDS = ((), (5.0,), (), (0, 0))  # seconds of their sound, for a model that hears


def noise(width: int, height: int, seed: int) -> bytes:
    """Return the PNG of an image whose pixels are all different."""
    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def recording(seconds: float, seed: int) -> bytes:
    """Return the WAV of noise, of 16 bits at 16 kHz, as engines are sent it."""
    samples = np.random.default_rng(seed).integers(-(2**15), 2**15, round(seconds * 100) * 160, dtype=np.int16)
    return wav_of(with_silence(samples))


def frames(count: int, width: int, height: int, seed: int, sound: float) -> bytes:
    """Return frames of noise, of a video of 3 frames per second, as engines are sent them. `sound`: seconds."""
    header = struct.pack("<8sIIIId", b"FRAMES1\n", count, height, width, 3 * count, 3.0)
    numbers = np.arange(1, 3 * count, 3, dtype="<u4").tobytes()
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    return header + numbers + pixels.tobytes() + (recording(sound, seed) if sound else b"")


def image_rows(seed: int, side: int, hears: bool, watches: bool) -> list[dict[str, Any]]:
    """Return a row for each prompt. `side`: of the square of pixels that is one token, so that nothing is resized."""
    rng = random.Random(seed)
    rows = []
    for number, images in enumerate(NUMBER_OF_IMAGES):
        sizes = [(rng.randint(2, 4) * side, rng.randint(2, 3) * side) for _ in range(images)]
        files = [noise(*size, seed=100 * seed + 10 * number + i) for i, size in enumerate(sizes)]
        text = "<image>" + "and <image>" * (images - 1) if images else "no image"
        played = SECONDS[number] if hears else ()
        text += "".join(f", <audio> {i}" for i in range(len(played)))
        shown = FRAMES[number] if watches else ()
        text += "".join(f", <video> {i}" for i in range(len(shown)))
        videos = [
            frames(count, 2 * side, side, 100 * seed + 10 * number + i, sound if hears else 0)
            for i, (count, sound) in enumerate(zip(shown, SOUNDS[number], strict=bool(shown)))
        ]
        rows.append(
            {
                "messages": [{"role": "user", "content": f"{text}: what is it?"}],
                "images": [{"bytes": file, "path": None} for file in files],
                "videos": videos,
                "audios": [recording(seconds, seed=100 * seed + 10 * number + i) for i, seconds in enumerate(played)],
            }
        )
    return rows


def image_samples(template: Any, seed: int, policies_given: bool) -> list[Any]:
    """Return two completions for each prompt; every prompt is expanded as engines do it."""
    from swift_megatron_grpo.data.image_reader import ImageReader
    from swift_megatron_grpo.generation.vllm.images import placeholder_tokens
    from swift_megatron_grpo.types import Sample

    reader, rng = ImageReader(template), random.Random(seed)
    placeholders = sorted(placeholder_tokens(template))
    samples = []
    side, hears, watches = reader.format.small_size[1] // 2, reader.recordings is not None, reader.videos is not None
    for number, row in enumerate(image_rows(seed, side, hears, watches)):
        images = reader.images(row)
        prompt = reader.expand(reader.encode_prompt(row), images)
        for _ in range(2):
            completion = [rng.choice([rng.randrange(200), *placeholders]) for _ in range(rng.randint(3, 20))]
            policies = [[-5.6 + rng.gauss(0, 0.3) for _ in completion] for _ in range(2)]
            samples.append(
                Sample(
                    tokens=prompt + completion,
                    completion_mask=[False] * len(prompt) + [True] * len(completion),
                    advantage=rng.gauss(0, 1),
                    group=number,
                    old_logprobs=policies[0] if policies_given else None,
                    ref_logprobs=policies[1] if policies_given else None,
                    images=reader.place(f"{seed}-{number}", images, prompt),
                )
            )
    return samples


def run_layout(name: str, flags: list[str], batches: list[str], folder: str) -> None:
    """Train as cli/check_layouts does, on samples with images."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    from swift_megatron_grpo.settings.losses import LossConfig
    from swift_megatron_grpo.training.loss import make_loss
    from swift_megatron_grpo.training.trained_weights import gather_parameters
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = MegatronRLHF([*flags, *Variant.parse(name).flags()]).prepare_trainer()
    trainer.setup_model_training()
    engine = trainer.build_engine()
    loss = make_loss(LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.1))
    metrics, logprobs, first = [], {}, []
    for number, kind in enumerate(batches, start=1):
        samples = image_samples(trainer.template, number, kind == "given")
        values = engine.infer(samples)
        if number == 1:
            first, logprobs = samples, {index: value.logprobs for index, value in values.items()}
        for index, value in values.items() if kind != "given" else ():
            samples[index].ref_logprobs = value.logprobs
            samples[index].old_logprobs = value.logprobs if kind == "off-policy" else None
        metrics.append(engine.train_step(samples, loss))
    gather_parameters(trainer.wrapped_models)
    exported = export_weights(trainer.bridge, trainer.unwrapped_models)
    weights = {name: tensor.clone().float().cpu() for name, tensor in exported}
    if torch.distributed.get_rank() == 0:
        path = str(Path(folder, f"{name}.pt"))
        torch.save(weights, path)
        saved = [{column: getattr(sample, column) for column in COLUMNS} | _images_of(sample) for sample in first]
        result = {"layout": name, "metrics": metrics, "weights": path, "logprobs": logprobs, "seconds": 0.0}
        Path(folder, f"{name}.json").write_text(json.dumps(result))
        torch.save(saved, Path(folder, f"{name}.samples.pt"))


def _images_of(sample: Any) -> dict[str, Any]:
    """Return where images, frames of videos and recordings are, and their tokens."""
    kinds = {"ModelImage": "", "ModelFrames": "watched_", "ModelRecording": "heard_", "SoundPart": "heard_"}
    placed: dict[str, list[Any]] = {name: [] for name in kinds.values()}
    for each in sample.images:
        placed[kinds[type(each.image).__name__]].append(each)
    starts = {f"{name}starts": [each.start for each in of_kind] for name, of_kind in placed.items()}
    return starts | {f"{name}lengths": [each.image.num_tokens for each in of_kind] for name, of_kind in placed.items()}


def count_embedded(flags: list[str], report: str) -> None:
    """Write how many images a vision tower embeds in two passes and a step: frozen, and with its weights trained."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    from swift_megatron_grpo.settings.losses import LossConfig
    from swift_megatron_grpo.training.loss import make_loss

    trainer = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_model_training()
    engine, embedded = trainer.build_engine(), []

    def record(tower: Any, pixels: Any, grids: Any) -> None:
        embedded.append(len(grids["grid_thw"]) if pixels[0].numel() else 0)

    trainer.unwrapped_models[0].visual.visual.register_forward_pre_hook(record, with_kwargs=True)
    samples = image_samples(trainer.template, 1, policies_given=True)
    counts = []
    for _ in range(2):
        engine.infer(samples)
        counts.append(sum(embedded))
    engine.train_step(samples, make_loss(LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.1)))
    counts.append(sum(embedded))
    kept = len(trainer.unwrapped_models[0].visual.get_inputs_embeds.__self__._kept)
    del samples
    gc.collect()
    left = len(trainer.unwrapped_models[0].visual.get_inputs_embeds.__self__._kept)
    Path(report).write_text(json.dumps({"counts": counts, "kept": kept, "left": left}))
