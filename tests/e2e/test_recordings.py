"""Rows with audio, alone and with images, on Qwen3-Omni: generated, verified, trained, saved, dumped and replayed."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from scripts.make_image_dataset import make_rows
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.e2e.test_images import EVERYTHING
from tests.e2e.test_server_attacks import respond
from tests.paths import REPOSITORY
from tests.support.runs import PLUGINS, PROBE, Finished, hf_difference, make_model, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer
from tests.unit.data.test_recordings import HOSTILE

pytestmark = pytest.mark.e2e
COLOURS = ["--external_plugins", str(REPOSITORY / "templates" / "plugins" / "colours.py")]
FLAGS = ["--micro_batch_size", "2", "--global_batch_size", "8", "--reward_funcs", "colours", "--torch_dtype", "float32",
         "--fp16", "false", "--seed_completions", "true", "--max_completion_length", "16", "--sync_check",
         "full"]  # fmt: skip
FILES = [
    ("wav", 44_100, 2, 1.37),
    ("flac", 8_000, 1, 0.5),
    ("wav", 16_000, 1, 2.153),
]  # format, rate, channels, seconds


def write_noise(file: Path, rate: int, channels: int, seconds: float, seed: int) -> Path:
    soundfile.write(file, np.random.default_rng(seed).uniform(-0.5, 0.5, (round(rate * seconds), channels)), rate)
    return file


def make_dataset(folder: Path, images: list[int], recordings: list[int], videos: Sequence[int] = (0,)) -> Path:
    folder.mkdir()
    rows = make_rows(folder, 16, images, 0, videos)
    for number, row in enumerate(rows):
        chosen = [FILES[(number + i) % len(FILES)] for i in range(recordings[number % len(recordings)])]
        files = [
            write_noise(folder / f"{number}-{i}.{kind}", *sizes, seed=10 * number + i)
            for i, (kind, *sizes) in enumerate(chosen)
        ]
        row["audios"] = [str(file) for file in files]
        row["messages"][0]["content"] = "<audio>" * len(files) + row["messages"][0]["content"]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def omni(folder: Path) -> Path:
    return make_model(folder / "qwen3_omni", "qwen3_omni_moe")


def check(run: Finished, model: Path, parts: tuple[str, ...], trains: tuple[str, ...] = ()) -> None:
    """Check that vLLM has the language model and these parts. `trains`: the parts that were trained as well."""
    assert run.code == 0, run.output[-4000:]
    before, after = load_file(model / "model.safetensors"), load_file(run.folder / "checkpoint-2" / "model.safetensors")
    language = ("thinker.model.", "thinker.lm_head.")
    held = [name for name in before if name.startswith((*language, *parts))]
    assert f"vLLM holds all {len(held)} tensors bit for bit" in run.output
    assert len(run.log) == 2 and all(abs(step["rollout/k3_kl"]) < 1e-6 for step in run.log)
    assert all(step["sync_check/max_diff"] < 1e-5 for step in run.log)
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    for part in (*language, *trains):
        assert any(name.startswith(part) for name in changed)
    assert all(name.startswith((*language, *trains)) for name in changed)


@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["audio", "mixed"])
def test_recordings_are_heard_alike_and_a_lost_one_is_detected(folder: Path, omni: Path, mixed: bool) -> None:
    """They have several rates, channels and formats; a row has none to two of them, alone or between images.

    Image and audio parts are trained, but without images the weights of the image part do not decay.
    """
    dataset = make_dataset(folder / f"rows-{mixed}", [1, 0, 2] if mixed else [0], [2, 1, 0, 1])
    plugins = [*COLOURS, str(PLUGINS / "sync_faults.py"), str(PROBE), "--callbacks", "probe"]
    run = megatron_rlhf(
        omni, dataset, folder / f"run-{mixed}", 1, [*FLAGS, *EVERYTHING, *plugins],
        {"FAULTS": "recording"}, rewards=False,
    )  # fmt: skip
    parts = ("thinker.audio_tower.", "thinker.visual.") if mixed else ("thinker.audio_tower.",)
    check(run, omni, parts, trains=parts)
    media = "an image and a recording" if mixed else "a recording"
    assert f"tokens with {media} differ from the trainer's by" in run.output
    reports = json.loads((run.folder / "faults.0.json").read_text())
    assert reports["recording_of_zeros, step 1"].startswith("EngineHasOtherWeights, generated 0 times")
    assert hf_difference(run.last_checkpoint)["max"] < 1e-5


LIMITS = ["--vllm_limit_mm_per_prompt", '{"image": 2, "video": 1, "audio": 2}']
TURNS = [str(PLUGINS / "showing.py"), "--multi_turn_scheduler", "showing", "--max_turns", "3"]


@pytest.fixture(scope="module")
def turned(folder: Path) -> Path:
    return make_dataset(folder / "turned", [0, 1], [1, 2], [1])


@pytest.fixture(scope="module")
def conversations(folder: Path, omni: Path, turned: Path) -> list[dict[str, Any]]:
    """Return the conversations of a colocated run, whose scheduler adds an image in the second turn."""
    shown, dump = str(turned.parent / "1-0.png"), folder / "turns"
    flags = [*FLAGS, *COLOURS, *TURNS, *LIMITS, "--rollout_dump", str(dump)]
    run = megatron_rlhf(omni, turned, folder / "turns-run", 1, flags, {"SHOWN": shown}, rewards=False)
    check(run, omni, ("thinker.audio_tower.", "thinker.visual."))
    return dumped(dump)


def dumped(dump: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(dump.glob("rollout-*.jsonl")) for row in read_json_lines(file)]


@pytest.mark.nightly
def test_later_turns_of_a_conversation_hear_and_see_the_media_of_its_row(
    omni: Path, conversations: list[dict[str, Any]]
) -> None:
    """A sampled placeholder ends a conversation."""
    longest = [row["prompt_ids"] for row in conversations if row["infos"]["num_turns"] == 3]
    thinker = json.loads((omni / "config.json").read_text())["thinker_config"]
    for kind in ("audio", "video"):
        assert any(thinker[f"{kind}_token_id"] in prompt for prompt in longest)


@pytest.mark.nightly
def test_conversations_on_a_server_are_those_of_a_colocated_run(
    folder: Path, omni: Path, turned: Path, conversations: list[dict[str, Any]]
) -> None:
    """Its engine hears and sees the media of the row in every turn, and the image that its scheduler adds."""
    shown, dump = str(turned.parent / "1-0.png"), folder / "remote-turns"
    started = ["--external_plugins", *TURNS, *LIMITS, "--max_length", "256"]
    server = RolloutServer(omni, folder / "turns-server.txt", started, {"SHOWN": shown}).start()
    try:
        flags = [*FLAGS, *COLOURS, "--rollout_dump", str(dump), "--vllm_mode", "server",
                 "--vllm_server_pass_dataset", "true", "--vllm_server_base_url", server.wait().url]  # fmt: skip
        run = megatron_rlhf(omni, turned, folder / "remote-run", 1, flags, {API_KEY_VARIABLE: KEY}, rewards=False)
    finally:
        server.stop()
    check(run, omni, ("thinker.audio_tower.", "thinker.visual."))
    tokens = ("prompt_ids", "completion_ids")
    remote = dumped(dump)
    assert [[row[name] for name in tokens] for row in remote] == [
        [row[name] for name in tokens] for row in conversations
    ]
    for row, expected in zip(remote, conversations, strict=True):
        assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)
        assert row["infos"]["num_turns"] == expected["infos"]["num_turns"]


@pytest.mark.nightly
@pytest.mark.parametrize("served", [False, True], ids=["colocated", "served"])
def test_a_scheduler_that_adds_a_recording_is_refused(folder: Path, omni: Path, turned: Path, served: bool) -> None:
    played = {"SHOWN": str(turned.parent / "1-0.png"), "PLAYED": str(turned.parent / "0-0.wav")}
    flags = [*FLAGS, *COLOURS]
    server = RolloutServer(
        omni, folder / "playing.txt", ["--external_plugins", *TURNS, *LIMITS, "--max_length", "256"], played
    )
    try:
        if served:
            flags += ["--vllm_mode", "server", "--vllm_server_pass_dataset", "true", "--vllm_server_base_url",
                      server.start().wait().url]  # fmt: skip
            played[API_KEY_VARIABLE] = KEY
        else:
            flags += [*TURNS, *LIMITS]
        run = megatron_rlhf(omni, turned, folder / f"playing-{served}", 1, flags, played, rewards=False)
    finally:
        if served:
            server.stop()
    assert run.code != 0 and "it can add images alone" in run.output, run.output[-4000:]


@pytest.mark.nightly
def test_a_replay_trains_the_same_and_other_recordings_are_refused(folder: Path, omni: Path) -> None:
    dataset, dump = make_dataset(folder / "dumped", [1, 0], [1, 2]), folder / "dump"
    flags = [*FLAGS, *COLOURS, "--tuner_type", "lora"]
    run = megatron_rlhf(omni, dataset, folder / "run", 1, [*flags, "--rollout_dump", str(dump)], rewards=False)
    assert run.code == 0, run.output[-4000:]
    replay = [*flags, "--rollout_replay", str(dump)]
    replayed = megatron_rlhf(omni, dataset, folder / "replayed", 1, replay, rewards=False)
    assert replayed.code == 0, replayed.output[-4000:]
    assert [(s["loss"], s["grad_norm"]) for s in replayed.log] == [(s["loss"], s["grad_norm"]) for s in run.log]
    for file in dataset.parent.glob("*-0.wav"):
        write_noise(file, 16_000, 1, 0.7, seed=1)
    other = megatron_rlhf(omni, dataset, folder / "refused", 1, replay, rewards=False)
    assert other.code != 0 and "was completed with other media than" in other.output


def attack(server: RolloutServer) -> None:
    """Send hostile recordings, by each way that reaches ms-swift's template, and see that the server refuses them."""
    for content in HOSTILE.values():
        sent = base64.b64encode(content).decode()
        part = {"type": "audio", "audio": f"data:audio/wav;base64,{sent}"}
        for request in (
            {"messages": [{"role": "user", "content": "?"}], "audios": [sent]},
            {"messages": [{"role": "user", "content": [part]}]},
            {"messages": [{"role": "user", "content": "?"}], "audios": [content.decode("latin1")[:1000]]},
        ):
            body = {"infer_requests": [request], "request_config": {"max_tokens": 2}}
            status, text = respond(server, "POST", "/infer/", body)
            assert status == 422 and "passwd" not in text, text
    assert respond(server, "GET", "/health")[0] == 200


@pytest.mark.nightly
def test_servers_hear_the_same_although_one_is_killed(folder: Path, omni: Path) -> None:
    """Recordings are sent as the trainer hears them: no path reaches a server."""
    dataset = make_dataset(folder / "served", [1, 0], [1, 2, 0])
    limits = ["--vllm_limit_mm_per_prompt", '{"image": 1, "video": 0, "audio": 2}', "--max_length", "128"]
    servers = [RolloutServer(omni, folder / f"server{i}.txt", limits).start() for i in range(2)]
    killed: list[str] = []
    attack(servers[1].wait())

    def kill(line: str) -> None:
        if "may generate with weights 1" in line and not killed:
            killed.append(line)
            servers[0].kill()

    try:
        flags = [*FLAGS, *COLOURS, "--vllm_mode", "server", "--vllm_server_base_url"]
        flags += [server.wait().url for server in servers]
        run = megatron_rlhf(
            omni, dataset, folder / "remote", 1, flags, {API_KEY_VARIABLE: KEY}, on_line=kill, rewards=False
        )
    finally:
        for server in servers:
            server.stop()
    assert killed and "is lost: " in run.output
    check(run, omni, ("thinker.audio_tower.", "thinker.visual."))
    local = megatron_rlhf(omni, dataset, folder / "local", 1, [*FLAGS, *COLOURS], rewards=False)
    assert local.code == 0, local.output[-4000:]
    for values, expected in zip(run.log, local.log, strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length"):
            assert values[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)
