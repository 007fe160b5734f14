"""Rows with videos, alone and with images: generated, verified, trained, dumped and replayed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from scripts.make_image_dataset import make_rows, save_video
from tests.e2e.test_images import COLOURS, EVERYTHING, SMALL
from tests.support.runs import PLUGINS, Finished, make_model, megatron_rlhf

pytestmark = pytest.mark.e2e
FLAGS = [*SMALL, "--sync_check", "full"]


def make_dataset(folder: Path, images: list[int], videos: list[int]) -> Path:
    folder.mkdir()
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(folder, 16, images, 0, videos)))
    return path


def check(run: Finished) -> None:
    assert run.code == 0, run.output[-4000:]
    assert re.search(r"vLLM holds all \d+ tensors bit for bit", run.output)
    assert len(run.log) == 2 and all(abs(step["rollout/k3_kl"]) < 1e-6 for step in run.log)
    assert all(step["sync_check/max_diff"] < 2e-5 for step in run.log)


@pytest.mark.parametrize(
    ("kind", "ranks", "flags"),
    [
        ("qwen2_5_vl", 1, EVERYTHING),
        ("qwen3_vl", 2, ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]),
        pytest.param("qwen2_vl", 1, [], marks=pytest.mark.thorough),
        pytest.param("qwen3_5", 1, [], marks=pytest.mark.thorough),
    ],
    ids=["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_5"],
)
def test_videos_are_seen_alike_and_a_lost_one_is_detected(
    folder: Path, kind: str, ranks: int, flags: list[str]
) -> None:
    """A row has none to two videos, alone or behind an image."""
    model = make_model(folder / kind, kind)
    images = [0] if kind == "qwen3_vl" else [1, 0]
    dataset = make_dataset(folder / f"{kind}-rows", images, [1, 2, 0])
    faults = [COLOURS[0], COLOURS[1], str(PLUGINS / "sync_faults.py")]
    run = megatron_rlhf(
        model, dataset, folder / f"{kind}-run", ranks, [*FLAGS, *faults, *flags], {"FAULTS": "image"}, rewards=False
    )
    check(run)
    media = "a video" if images == [0] else "an image and a video"
    assert f"tokens with {media} differ from the trainer's by" in run.output
    reports = json.loads((run.folder / "faults.0.json").read_text())
    assert reports["image_of_zeros, step 1"].startswith("EngineHasOtherWeights, generated 0 times")


def test_a_replay_trains_the_same_and_other_videos_are_refused(folder: Path) -> None:
    model = make_model(folder / "replayed-model", "qwen3_vl")
    dataset, dump = make_dataset(folder / "dumped", [0], [1, 2]), folder / "dump"
    flags = [*SMALL, "--tuner_type", "lora"]
    run = megatron_rlhf(model, dataset, folder / "run", 1, [*flags, "--rollout_dump", str(dump)], rewards=False)
    assert run.code == 0, run.output[-4000:]
    replay = [*flags, "--rollout_replay", str(dump)]
    replayed = megatron_rlhf(model, dataset, folder / "replayed", 1, replay, rewards=False)
    assert replayed.code == 0, replayed.output[-4000:]
    assert [(s["loss"], s["grad_norm"]) for s in replayed.log] == [(s["loss"], s["grad_norm"]) for s in run.log]
    for file in dataset.parent.glob("*-0.mp4"):
        save_video(file, ["red", "blue"], random.Random(1))
    other = megatron_rlhf(model, dataset, folder / "refused", 1, replay, rewards=False)
    assert other.code != 0 and "was completed with other media than" in other.output


def test_rows_beyond_the_limits_are_refused_before_a_model_loads(folder: Path) -> None:
    model = make_model(folder / "refusing-model", "qwen2_5_vl")
    dataset = make_dataset(folder / "cut", [0], [1])
    whole = (dataset.parent / "3-0.mp4").read_bytes()
    for content, problem in ((whole[: len(whole) // 2], "has a video that"),
                             (b"#EXTM3U\n/etc/passwd\n", "is none of MP4, MOV")):  # fmt: skip
        (dataset.parent / "3-0.mp4").write_bytes(content)
        run = megatron_rlhf(model, dataset, folder / "cut-run", 1, SMALL, rewards=False)
        assert run.code != 0 and "row 3" in run.output and problem in run.output, run.output[-2000:]
