"""Rows with images: generated, verified, trained, saved, dumped, replayed and resumed, colocated and with servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.make_image_dataset import make_rows
from swift_megatron_grpo.data.images import image_bytes, is_portable
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.paths import REPOSITORY
from tests.support.runs import PLUGINS, PROBE, Finished, hf_difference, make_model, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
COLOURS = ["--external_plugins", str(REPOSITORY / "templates" / "plugins" / "colours.py"), "--reward_funcs", "colours"]
FP32 = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--max_completion_length", "16"]
VISION_TOWERS = ("model.visual.", "vision_tower.", "multi_modal_projector.")
EVERYTHING = ["--freeze_vit", "false", "--freeze_aligner", "false"]
SMALL = ["--micro_batch_size", "2", "--global_batch_size", "8", *COLOURS, *FP32]


def make_dataset(folder: Path, rows: int, images: list[int]) -> Path:
    folder.mkdir()
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(folder, rows, images, seed=0)))
    return path


@pytest.fixture(scope="module")
def colours(folder: Path) -> Path:
    return make_dataset(folder / "colours", 32, [1, 0, 2])


@pytest.fixture(scope="module")
def qwen2_5_vl(folder: Path) -> Path:
    return make_model(folder / "qwen2_5_vl", "qwen2_5_vl")


def train(model: Path, dataset: Path, folder: Path, ranks: int, flags: list[str]) -> Finished:
    run = megatron_rlhf(model, dataset, folder, ranks, [*SMALL, *flags], {API_KEY_VARIABLE: KEY}, rewards=False)
    assert run.code == 0, run.output[-4000:]
    return run


def numbers(run: Finished) -> list[list[float]]:
    return [[step[name] for name in ("loss", "grad_norm", "reward", "completions/mean_length")] for step in run.log]


@pytest.fixture(scope="module")
def one_rank(folder: Path, qwen2_5_vl: Path, colours: Path) -> Finished:
    flags = ["--sync_check", "full", "--rollout_dump", str(folder / "dump"), "--train_iters", "3", "--save_steps", "3"]
    return train(qwen2_5_vl, colours, folder / "one", 1, [*EVERYTHING, *flags])


def test_the_engine_sees_what_the_trainer_sees(one_rank: Finished, qwen2_5_vl: Path) -> None:
    tensors = load_file(qwen2_5_vl / "model.safetensors")
    assert f"vLLM holds all {len(tensors)} tensors bit for bit" in one_rank.output
    assert "tokens with an image differ from the trainer's by" in one_rank.output
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 and step["sync_check/max_diff"] < 1e-5 for step in one_rank.log)


def test_tower_and_aligner_are_trained_and_saved(one_rank: Finished, qwen2_5_vl: Path) -> None:
    before, after = (
        load_file(qwen2_5_vl / "model.safetensors"),
        load_file(one_rank.last_checkpoint / "model.safetensors"),
    )
    renamed = {name.removeprefix("model."): name for name in after}
    unchanged = [
        name
        for name in before
        if torch.equal(before[name].float(), after[renamed[name.removeprefix("model.")]].float())
    ]
    assert unchanged == []


def test_a_replay_trains_the_same_and_other_images_are_refused(
    folder: Path, one_rank: Finished, qwen2_5_vl: Path, colours: Path
) -> None:
    flags = [*EVERYTHING, "--rollout_replay", str(folder / "dump"), "--train_iters", "3"]
    replayed = train(qwen2_5_vl, colours, folder / "replayed", 1, flags)
    assert [(s["loss"], s["grad_norm"], s["reward"]) for s in replayed.log] == [
        (s["loss"], s["grad_norm"], s["reward"]) for s in one_rank.log
    ]
    others = Path(shutil.copytree(colours.parent, folder / "others"))
    for image in others.glob("*.png"):
        shutil.copy(colours.parent / "0-0.png", image)
    text = colours.read_text().replace(str(colours.parent), str(others))
    (others / "data.jsonl").write_text(text)
    run = megatron_rlhf(qwen2_5_vl, others / "data.jsonl", folder / "refused", 1, [*SMALL, *flags], rewards=False)
    assert run.code != 0 and "was completed with other media than" in run.output


def test_servers_generate_the_same_although_one_is_killed(
    folder: Path, one_rank: Finished, qwen2_5_vl: Path, colours: Path
) -> None:
    """Images are sent to each server once, and sent again to the one that takes over; no path reaches a server."""
    limits = ["--vllm_limit_mm_per_prompt", '{"image": 2, "video": 0}', "--max_length", "128"]
    servers = [RolloutServer(qwen2_5_vl, folder / f"server{i}.txt", limits).start() for i in range(2)]
    killed: list[str] = []

    def kill(line: str) -> None:
        if "may generate with weights 1" in line and not killed:
            killed.append(line)
            servers[0].kill()

    try:
        urls = [server.wait().url for server in servers]
        flags = [*SMALL, *EVERYTHING, "--sync_check", "full", "--train_iters", "3", "--vllm_mode", "server",
                 "--vllm_server_base_url", *urls]  # fmt: skip
        run = megatron_rlhf(
            qwen2_5_vl, colours, folder / "remote", 1, flags, {API_KEY_VARIABLE: KEY}, on_line=kill, rewards=False
        )
        assert run.code == 0, run.output[-4000:]
        log = servers[1].log.read_text()
    finally:
        for server in servers:
            server.stop()
    assert killed and "is lost: " in run.output
    for values, expected in zip(numbers(run), numbers(one_rank), strict=True):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert 0 < log.count("PUT /grpo/images/") <= 31  # images of the dataset, once each; its completions are more


@pytest.mark.nightly
def test_images_of_later_turns_are_trained_and_others_evaluated(folder: Path, qwen2_5_vl: Path, colours: Path) -> None:
    """A conversation in which the policy samples a placeholder ends: the engine would put an image in its place."""
    dump, showing = folder / "turns", PLUGINS / "showing.py"
    flags = [*SMALL, "--multi_turn_scheduler", "showing", "--max_turns", "3", COLOURS[0], COLOURS[1], str(showing),
             "--vllm_limit_mm_per_prompt", '{"image": 3, "video": 0}', "--rollout_dump", str(dump),
             "--global_batch_size", "16", "--val_dataset", str(colours), "--eval_steps", "2",
             "--eval_iters", "1"]  # fmt: skip
    shown = str(colours.parent / "0-0.png")
    run = megatron_rlhf(qwen2_5_vl, colours, folder / "turned", 1, flags, {"SHOWN": shown}, rewards=False)
    assert run.code == 0, run.output[-4000:]
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 for step in run.log)
    rows = [row for file in dump.glob("rollout-*.jsonl") for row in read_json_lines(file)]
    turns = [row["infos"]["num_turns"] for row in rows]
    assert 3 in turns and 1 in turns
    for row in rows:
        if row["infos"]["num_turns"] == 3:
            images = row["infos"]["images"]
            assert image_bytes(images[-1]) == image_bytes(shown) and len(images) == len(row["images"]) + 1
    assert "eval_reward" in (run.folder / "logging.jsonl").read_text()


@pytest.mark.nightly
def test_conversations_on_a_server_show_images_and_are_generated_ahead(
    folder: Path, qwen2_5_vl: Path, colours: Path
) -> None:
    """The server's scheduler names a file of its machine; the trainer receives what is in it."""
    dump, showing, shown = folder / "ahead", PLUGINS / "showing.py", str(colours.parent / "0-0.png")
    turns = ["--multi_turn_scheduler", "showing", "--max_turns", "3", "--external_plugins", str(showing),
             "--vllm_limit_mm_per_prompt", '{"image": 3, "video": 0}', "--max_length", "256"]  # fmt: skip
    server = RolloutServer(qwen2_5_vl, folder / "showing.txt", turns, {"SHOWN": shown}).start()
    try:
        flags = [*EVERYTHING, "--vllm_mode", "server", "--vllm_server_base_url", server.wait().url, "--async_generate",
                 "true", "--vllm_server_pass_dataset", "true", "--rollout_dump", str(dump), "--train_iters", "3",
                 "--val_dataset", str(colours), "--eval_steps", "3", "--eval_iters", "1"]  # fmt: skip
        run = train(qwen2_5_vl, colours, folder / "shown", 1, flags)
    finally:
        server.stop()
    steps = [step for step in run.log if "loss" in step]
    assert [step["rollout/staleness_max"] for step in steps] == [0, 1, 1] and abs(steps[0]["rollout/k3_kl"]) < 1e-6
    rows = [json.loads(line) for file in dump.glob("rollout-*.jsonl") for line in file.read_text().splitlines()]
    images = [row["infos"]["images"] for row in rows if row["infos"]["num_turns"] == 3]
    assert images and all(is_portable(image) for shown_images in images for image in shown_images)
    assert all(image_bytes(shown_images[-1]) == image_bytes(shown) for shown_images in images)
    assert "eval_reward" in (run.folder / "logging.jsonl").read_text()


@pytest.mark.parametrize(
    ("kind", "ranks", "flags"),
    [
        ("glm4v", 2, [*EVERYTHING, "--vllm_tensor_parallel_size", "2"]),
        pytest.param(
            *("glm4v_moe", 2, ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]),
            marks=pytest.mark.nightly,
        ),
        pytest.param("internvl", 1, EVERYTHING, marks=pytest.mark.nightly),
        pytest.param(
            *("internvl", 2, ["--pipeline_model_parallel_size", "2", "--vllm_tensor_parallel_size", "2"]),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["glm4v", "glm4v_moe", "internvl", "internvl-frozen"],
)
def test_other_types_are_generated_verified_trained_and_saved(
    folder: Path, colours: Path, kind: str, ranks: int, flags: list[str]
) -> None:
    """With all weights trained, and with a frozen vision tower. GLM-4V has gate and up projections in one tensor."""
    frozen = "--freeze_vit" not in flags
    model = make_model(folder / f"{kind}-{frozen}", kind)
    probed = [*COLOURS, COLOURS[0], COLOURS[1], str(PROBE), "--callbacks", "probe", "--sync_check", "full"]
    run = megatron_rlhf(
        model, colours, folder / f"{kind}-{frozen}-run", ranks, [*SMALL, *probed, *flags], rewards=False
    )
    assert run.code == 0, run.output[-4000:]
    before, after = load_file(model / "model.safetensors"), load_file(run.last_checkpoint / "model.safetensors")
    assert f"vLLM holds all {len(before)} tensors bit for bit" in run.output and set(before) == set(after)
    assert "tokens with an image differ from the trainer's by" in run.output
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 and step["sync_check/max_diff"] < 1e-5 for step in run.log)
    assert hf_difference(run.last_checkpoint)["max"] < 1e-5
    unchanged = {name for name in before if torch.equal(before[name].float(), after[name].float())}
    of_tower = {name for name in before if name.startswith(VISION_TOWERS)}
    assert of_tower and {name for name in unchanged if not name.endswith("e_score_correction_bias")} == (
        of_tower if frozen else set()
    )


@pytest.fixture(scope="module")
def omni(folder: Path) -> Path:
    return make_model(folder / "qwen3_omni", "qwen3_omni_moe")


def check_omni(run: Finished, model: Path, saved: str = "checkpoint-2") -> None:
    """Check that vLLM has the language model and the image part, and that the first alone was trained."""
    assert run.code == 0, run.output[-4000:]
    before, after = load_file(model / "model.safetensors"), load_file(run.folder / saved / "model.safetensors")
    trained = {name for name in before if name.startswith(("thinker.model.", "thinker.lm_head."))}
    held = [*trained, *(name for name in before if name.startswith("thinker.visual."))]
    assert len(held) > len(trained) and f"vLLM holds all {len(held)} tensors bit for bit" in run.output
    assert "tokens with an image differ from the trainer's by" in run.output
    assert len(run.log) == 2 and all(abs(step["rollout/k3_kl"]) < 1e-6 for step in run.log)
    assert all(step["sync_check/max_diff"] < 1e-5 for step in run.log)
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed and changed <= trained


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, [], marks=pytest.mark.nightly),
        (2, ["--tuner_type", "lora", "--merge_lora", "true", "--tensor_model_parallel_size", "2",
             "--sequence_parallel", "true"]),
    ],
    ids=["full", "lora"],
)  # fmt: skip
def test_images_of_an_omni_model_are_trained_and_a_lost_image_is_detected(
    folder: Path, colours: Path, omni: Path, ranks: int, flags: list[str]
) -> None:
    """The audio part is not in vLLM, and it is saved unchanged like the parts that speak."""
    plugins = [COLOURS[0], COLOURS[1], str(PLUGINS / "sync_faults.py"), str(PROBE), "--callbacks", "probe"]
    faults = [*SMALL, *plugins, "--sync_check", "full"]
    run = megatron_rlhf(
        omni, colours, folder / f"omni-{ranks}", ranks, [*faults, *flags], {"FAULTS": "image"}, rewards=False
    )
    saved = "checkpoint-2-merged" if flags else "checkpoint-2"
    check_omni(run, omni, saved)
    reports = json.loads((run.folder / "faults.0.json").read_text())
    assert reports["image_of_zeros, step 1"].startswith("EngineHasOtherWeights, generated 0 times")
    if flags:
        shutil.copy(run.folder / "checkpoint-2" / "probe.json", run.folder / saved)
    assert hf_difference(run.folder / saved)["max"] < 1e-5


@pytest.mark.nightly
def test_images_of_an_omni_model_are_generated_by_a_server(folder: Path, colours: Path, omni: Path) -> None:
    limits = ["--vllm_limit_mm_per_prompt", '{"image": 2, "video": 0, "audio": 0}', "--max_length", "128"]
    server = RolloutServer(omni, folder / "omni-server.txt", limits).start()
    try:
        flags = [*SMALL, "--sync_check", "full", "--vllm_mode", "server", "--vllm_server_base_url", server.wait().url]
        run = megatron_rlhf(omni, colours, folder / "omni-remote", 1, flags, {API_KEY_VARIABLE: KEY}, rewards=False)
    finally:
        server.stop()
    check_omni(run, omni)


@pytest.mark.nightly
def test_an_adapter_in_the_tower_is_merged_and_faults_are_detected(folder: Path, colours: Path) -> None:
    """Qwen3-VL, tensor parallel with sequence parallelism: rows of the vision tower reach several layers."""
    model = make_model(folder / "qwen3_vl", "qwen3_vl")
    faults = PLUGINS / "sync_faults.py"
    flags = [*SMALL, *EVERYTHING, "--tuner_type", "lora", "--lr", "1e-2", "--train_iters", "4", "--save_steps", "4",
             "--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--merge_lora", "true",
             COLOURS[0], COLOURS[1], str(faults)]  # fmt: skip
    run = megatron_rlhf(model, colours, folder / "lora", 2, flags, {"FAULTS": "towers"}, rewards=False)
    assert run.code == 0, run.output[-4000:]
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 for step in run.log)
    reports = json.loads((run.folder / "faults.0.json").read_text())
    stopped = "EngineHasOtherWeights, generated 0 times"
    assert (
        reports["vision_tower_not_sent, step 2"].startswith(stopped)
        and ".visual." in reports["vision_tower_not_sent, step 2"]
    )
    assert reports["vision_tower_adapters_left_out, step 2"].startswith(stopped)
    assert "adapters were not merged" in reports["vision_tower_adapters_left_out, step 2"]
    assert reports["vision_tower_adapters_merged_as_zeros, step 2"].startswith(stopped)  # only the image shows it
    assert reports["frozen weights that changed"] == []


@pytest.mark.nightly
def test_a_frozen_tower_runs_in_a_pipeline_and_a_resumed_run_matches(
    folder: Path, qwen2_5_vl: Path, colours: Path
) -> None:
    """With LoRA, ms-swift's defaults for the parts, a reference policy and two updates per rollout."""
    flags = ["--tuner_type", "lora", "--beta", "0.1", "--pipeline_model_parallel_size", "2", "--num_iterations", "2",
             "--train_iters", "4", "--save_steps", "2", "--no_save_optim", "false", "--no_save_rng", "false",
             "--max_pixels", "6000"]  # fmt: skip
    whole = train(qwen2_5_vl, colours, folder / "whole", 2, flags)
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 for step in whole.log[::2])
    resume = ["--finetune", "false", "--mcore_adapter", str(whole.folder / "checkpoint-2")]
    resumed = train(qwen2_5_vl, colours, folder / "resumed", 2, [*flags, *resume])
    names = ("loss", "grad_norm", "kl")
    assert [[s[name] for name in names] for s in resumed.log] == [[s[name] for name in names] for s in whole.log[2:]]
