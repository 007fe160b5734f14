"""Rows with videos, alone and with images: generated, verified, trained, dumped and replayed."""

from __future__ import annotations

import base64
import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.make_image_dataset import make_rows, save_video
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.e2e.test_dry_run import check as dry_run
from tests.e2e.test_images import COLOURS, EVERYTHING, SMALL
from tests.e2e.test_server_attacks import respond
from tests.support.runs import PLUGINS, Finished, grpo_flags, make_model, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer
from tests.support.videos import add_sound
from tests.unit.data.test_videos import HOSTILE, shown

pytestmark = pytest.mark.e2e
FLAGS = [*SMALL, "--sync_check", "full"]
PLANNED = '{"image": 1, "video": {"count": 2, "num_frames": 8, "width": 64, "height": 64}}'  # by vLLM


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
        pytest.param("qwen2_5_vl", 1, EVERYTHING, marks=pytest.mark.nightly),
        ("qwen3_vl", 2, ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]),
        pytest.param("qwen2_vl", 1, ["--vllm_limit_mm_per_prompt", PLANNED], marks=pytest.mark.nightly),
        pytest.param("qwen3_5", 1, [], marks=pytest.mark.nightly),
        ("qwen3_omni_moe", 1, ["--tuner_type", "lora", *EVERYTHING]),
    ],
    ids=["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_5", "qwen3_omni_moe"],
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


@pytest.mark.nightly
def test_the_sound_of_videos_is_heard_alike_and_a_lost_one_is_detected(folder: Path) -> None:
    """Its parts stand between the frames of a video, and reach beyond the second ones in every other video."""
    model = make_model(folder / "hearing", "qwen3_omni_moe")
    dataset = make_dataset(folder / "heard-rows", [1, 0], [1, 2, 0])
    for number, file in enumerate(sorted(dataset.parent.glob("*.mp4"))):
        add_sound(file, (0.7, 4.2)[number % 2], number)
    flags = [*FLAGS, *EVERYTHING, COLOURS[0], COLOURS[1], str(PLUGINS / "sync_faults.py")]
    environment = {"FAULTS": "recording", "USE_AUDIO_IN_VIDEO": "true"}
    run = megatron_rlhf(model, dataset, folder / "heard-run", 1, flags, environment, rewards=False)
    check(run)
    assert "tokens with an image and a video differ from the trainer's by" in run.output
    reports = json.loads((run.folder / "faults.0.json").read_text())
    assert reports["recording_of_zeros, step 1"].startswith("EngineHasOtherWeights, generated 0 times")


def test_an_older_vllm_that_drops_marks_of_videos_is_verified_as_well(folder: Path) -> None:
    model = make_model(folder / "older-model", "qwen3_vl")
    plugins = [COLOURS[0], COLOURS[1], str(PLUGINS / "older_vllm.py")]
    dataset, dump = make_dataset(folder / "older-rows", [0], [1, 2]), folder / "older-dump"
    flags = [*FLAGS, *plugins, "--rollout_dump", str(dump)]
    run = megatron_rlhf(model, dataset, folder / "older-run", 1, flags, rewards=False)
    check(run)
    end = json.loads((model / "config.json").read_text())["vision_end_token_id"]
    prompts = [row["prompt_ids"] for file in dump.glob("rollout-*.jsonl") for row in read_json_lines(file)]
    assert prompts and not any((end, end) in pairwise(prompt) for prompt in prompts)


@pytest.mark.nightly
def test_a_replay_trains_the_same_and_other_videos_are_refused(folder: Path) -> None:
    """A dry run counts the tokens of videos, also of those that no completion has shown."""
    model = make_model(folder / "replayed-model", "qwen3_vl")
    dataset, dump = make_dataset(folder / "dumped", [0], [1, 2]), folder / "dump"
    flags = [*SMALL, "--tuner_type", "lora"]
    run = megatron_rlhf(model, dataset, folder / "run", 1, [*flags, "--rollout_dump", str(dump)], rewards=False)
    assert run.code == 0, run.output[-4000:]
    prompts = [len(row["prompt_ids"]) for file in dump.glob("rollout-*.jsonl") for row in read_json_lines(file)]
    code, output = dry_run(grpo_flags(model, dataset, folder / "unused", flags, rewards=False), 1)
    [longest] = re.findall(r"prompts of \d+ tokens at the median, (\d+) at most", output)
    assert code == 0 and max(prompts) <= int(longest) < 1.1 * max(prompts)
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


def attack(server: RolloutServer) -> None:
    """Send hostile videos, by each way that reaches ms-swift's template, and see that the server refuses them."""
    odd_sides = shown(count=2, height=3, width=5)
    for content in (*HOSTILE.values(), odd_sides):
        sent = base64.b64encode(content).decode()
        part = {"type": "video", "video": f"data:video/mp4;base64,{sent}"}
        for request in (
            {"messages": [{"role": "user", "content": "?"}], "videos": [sent]},
            {"messages": [{"role": "user", "content": [part]}]},
            {"messages": [{"role": "user", "content": "?"}], "videos": [content.decode("latin1")[:1000]]},
        ):
            body = {"infer_requests": [request], "request_config": {"max_tokens": 2}}
            status, text = respond(server, "POST", "/infer/", body)
            assert status == 422 and "passwd" not in text, text
    assert respond(server, "GET", "/health")[0] == 200


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "parts"),
    [("qwen2_5_vl", EVERYTHING), pytest.param("qwen3_omni_moe", [], marks=pytest.mark.nightly)],
    ids=["qwen2_5_vl", "qwen3_omni_moe"],
)
def test_servers_see_the_same_although_one_is_killed(folder: Path, kind: str, parts: list[str]) -> None:
    """Frames are sent as the trainer has sampled them: no path and no file of a dataset reaches a server.

    A Qwen3-Omni also hears its videos. Servers find their sound behind the frames.
    """
    model = make_model(folder / f"{kind}-served", kind)
    dataset = make_dataset(folder / f"{kind}-served-rows", [1, 0], [1, 2, 0])
    limits = ["--vllm_limit_mm_per_prompt", '{"image": 1, "video": 2}', "--max_length", "256"]
    environment: dict[str, str] = {}
    if kind == "qwen3_omni_moe":
        limits[1], environment["USE_AUDIO_IN_VIDEO"] = '{"image": 1, "video": 2, "audio": 2}', "true"
        for number, file in enumerate(dataset.parent.glob("*.mp4")):
            add_sound(file, 0.7 + number % 3, number)
    servers = [RolloutServer(model, folder / f"{kind}-server{i}.txt", limits).start() for i in range(2)]
    killed: list[str] = []
    attack(servers[1].wait())

    def kill(line: str) -> None:
        if "may generate with weights 1" in line and not killed:
            killed.append(line)
            servers[0].kill()

    try:
        flags = [*FLAGS, *parts, "--vllm_mode", "server", "--vllm_server_base_url"]
        flags += [server.wait().url for server in servers]
        run = megatron_rlhf(
            model, dataset, folder / f"{kind}-remote", 1, flags, environment | {API_KEY_VARIABLE: KEY}, on_line=kill,
            rewards=False,
        )  # fmt: skip
    finally:
        for server in servers:
            server.stop()
    assert killed and "is lost: " in run.output
    check(run)
    local = megatron_rlhf(model, dataset, folder / f"{kind}-local", 1, [*FLAGS, *parts], environment, rewards=False)
    assert local.code == 0, local.output[-4000:]
    for values, expected in zip(run.log, local.log, strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length"):
            assert values[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)


@pytest.mark.nightly
def test_a_frozen_image_part_runs_in_a_pipeline_and_a_resumed_run_matches(folder: Path) -> None:
    """With LoRA, a reference policy, two updates per rollout, and an evaluation on videos."""
    model = make_model(folder / "resumed-model", "qwen2_5_vl")
    dataset = make_dataset(folder / "resumed-rows", [0, 1], [1, 0, 2])
    flags = [*SMALL, "--tuner_type", "lora", "--beta", "0.1", "--pipeline_model_parallel_size", "2",
             "--num_iterations", "2", "--train_iters", "4", "--save_steps", "2", "--no_save_optim", "false",
             "--no_save_rng", "false", "--val_dataset", str(dataset), "--eval_steps", "4", "--eval_iters",
             "1"]  # fmt: skip
    whole = megatron_rlhf(model, dataset, folder / "whole", 2, flags, rewards=False)
    assert whole.code == 0, whole.output[-4000:]
    steps = [step for step in whole.log if "loss" in step]
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 for step in steps[::2])
    assert "eval_reward" in (whole.folder / "logging.jsonl").read_text()
    resume = ["--finetune", "false", "--mcore_adapter", str(whole.folder / "checkpoint-2")]
    resumed = megatron_rlhf(model, dataset, folder / "resumed", 2, [*flags, *resume], rewards=False)
    assert resumed.code == 0, resumed.output[-4000:]
    names = ("loss", "grad_norm", "kl")
    found = [step for step in resumed.log if "loss" in step]
    assert [[s[name] for name in names] for s in found] == [[s[name] for name in names] for s in steps[2:]]
