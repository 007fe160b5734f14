"""Text rows on a model with an image part and linear attention: trained, generated, verified, saved and resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swift_megatron_grpo.arguments.refused import OMNI, ON_TEXT_ALONE
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.platforms.attention_packages import vision_tower_has_flash_attention
from tests.support.runs import PLUGINS, PROBE, REWARDS, Finished, hf_difference, make_model, megatron_rlhf
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
FP32 = ["--torch_dtype", "float32", "--fp16", "false", "--sync_check", "full", "--seed_completions", "true"]
# Parts that are not trained; those of a Qwen-Omni are for images, audio and speech.
VISION_TOWER = re.compile(
    r"visual\.|vision_tower\.|merger\.|multi_modal_projector\.|audio_tower\.|^(talker|code2wav|token2wav)\."
)
PROBED = ["--external_plugins", str(REWARDS), str(PROBE), "--callbacks", "probe"]
STEPS = 14
LEARNING = ["--train_iters", str(STEPS), "--save_steps", str(STEPS), "--lr", "1e-2", "--lr_decay_style",
            "constant", "--num_generations", "8", "--global_batch_size", "16", "--micro_batch_size", "8",
            "--max_completion_length", "16"]  # fmt: skip


@pytest.fixture(scope="module")
def qwen3_5(folder: Path) -> Path:
    return make_model(folder / "qwen3_5", "qwen3_5")


@pytest.fixture(scope="module")
def learned(folder: Path, qwen3_5: Path, dataset: Path) -> Finished:
    run = megatron_rlhf(qwen3_5, dataset, folder / "learned", 1, [*FP32, *PROBED, *LEARNING])
    assert run.code == 0, run.output[-4000:]
    return run


@pytest.mark.thorough
def test_the_engine_runs_the_language_model_alone_and_exactly(learned: Finished, qwen3_5: Path) -> None:
    language = [name for name in load_file(qwen3_5 / "model.safetensors") if name.startswith(("model.language", "lm_"))]
    # no vision tower, no prediction layer
    assert f"vLLM holds all {len(language)} tensors bit for bit" in learned.output
    assert "failed its check" not in learned.output
    assert all(step["sync_check/mean_diff"] < 1e-5 for step in learned.log)
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 for step in learned.log)


@pytest.mark.skipif(vision_tower_has_flash_attention(), reason="then mcore-bridge's default is kept")
def test_without_flash_attn_the_image_part_attends_with_torch(learned: Finished) -> None:
    assert json.loads((learned.folder / "args.json").read_text())["vit_attn_impl"] == "sdpa"


def test_the_model_learns(learned: Finished) -> None:
    rewards = [step["reward"] for step in learned.log]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards  # 0.13 to 0.33 in 16 runs with several seeds


def test_a_saved_model_has_every_tensor_and_frozen_ones_unchanged(learned: Finished, qwen3_5: Path) -> None:
    before, after = load_file(qwen3_5 / "model.safetensors"), load_file(learned.last_checkpoint / "model.safetensors")
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed == {name for name in before if name.startswith(("model.language_model.", "lm_head."))}
    assert "15 tensors of the checkpoint are not trained (mtp.fc.weight" in learned.output


def test_a_saved_model_loads_in_plain_transformers(learned: Finished) -> None:
    assert hf_difference(learned.last_checkpoint)["max"] < 1e-5


@pytest.mark.nightly
def test_a_tensor_of_a_delta_net_that_does_not_arrive_is_detected(folder: Path, qwen3_5: Path, dataset: Path) -> None:
    faults = ["--external_plugins", str(REWARDS), str(PLUGINS / "sync_faults.py")]
    run = megatron_rlhf(qwen3_5, dataset, folder / "faults", 1, [*FP32, *faults], {"FAULTS": "delta net"})
    assert run.code == 0, run.output[-4000:]
    errors = json.loads((run.folder / "faults.0.json").read_text())
    for fault in ("delta_net_tensor_not_sent, step 0", "delta_net_tensor_lost_in_transfer, step 1"):
        assert (
            errors[fault].startswith("EngineHasOtherWeights, generated 0 times")
            and "layers.0.linear_attn.A_log" in errors[fault]
        )


@pytest.mark.nightly
def test_a_resumed_run_matches_an_uninterrupted_one(folder: Path, qwen3_5: Path, dataset: Path) -> None:
    """With LoRA, on two tensor-parallel ranks; only adapters are sent to vLLM."""
    flags = [*FP32, "--sync_check", "canary", "--tuner_type", "lora", "--vllm_enable_lora", "true",
             "--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--train_iters", "2",
             "--save_steps", "1", "--no_save_optim", "false", "--no_save_rng", "false"]  # fmt: skip
    whole = megatron_rlhf(qwen3_5, dataset, folder / "whole", 2, flags)
    assert whole.code == 0, whole.output[-4000:]
    resume = ["--finetune", "false", "--mcore_adapter", str(whole.folder / "checkpoint-1")]
    resumed = megatron_rlhf(qwen3_5, dataset, folder / "resumed", 2, [*flags, *resume])
    assert resumed.code == 0, resumed.output[-4000:]
    [step], expected = resumed.log, whole.log[1]
    assert {name: step[name] for name in ("loss", "grad_norm", "reward")} == {
        name: expected[name] for name in ("loss", "grad_norm", "reward")
    }


@pytest.mark.nightly
def test_a_server_of_an_omni_model_gets_the_parts_that_it_holds(folder: Path, dataset: Path) -> None:
    """With limits of 0 for images and videos, it holds the audio part."""
    model = make_model(folder / "hearing", "qwen3_omni_moe")
    limits = ["--vllm_limit_mm_per_prompt", '{"image": 0, "video": 0}']
    server = RolloutServer(model, folder / "hearing.txt", limits).start()
    try:
        remote = ["--vllm_mode", "server", "--vllm_server_base_url", server.wait().url]
        run = megatron_rlhf(model, dataset, folder / "heard", 1, [*FP32, *remote], {API_KEY_VARIABLE: KEY})
    finally:
        server.stop()
    assert run.code == 0, run.output[-4000:]
    held = [
        name
        for name in load_file(model / "model.safetensors")
        if name.startswith(("thinker.model.", "thinker.lm", "thinker.audio"))
    ]
    assert any("audio" in name for name in held)
    assert f"vLLM holds all {len(held)} tensors bit for bit" in run.output


@pytest.mark.parametrize(
    ("kind", "towers"),
    [
        pytest.param("qwen3_5_moe", True, marks=pytest.mark.nightly),
        pytest.param("qwen3_5_moe", False, marks=pytest.mark.slow),
        pytest.param("minicpmv4_6", True, marks=pytest.mark.nightly),
    ],
)
def test_a_server_gets_the_towers_if_it_holds_them(folder: Path, dataset: Path, kind: str, towers: bool) -> None:
    """With a mixture of experts, whose checkpoint has all experts of a layer in one tensor."""
    name = f"{kind}-{towers}"
    model = make_model(folder / name, kind)
    tensors = load_file(model / "model.safetensors")
    sent = [name for name in tensors if not name.startswith("mtp.") and (towers or ".visual." not in name)]
    stacked = [name for name in sent if ".mlp.experts." in name]
    flags = [] if towers else ["--vllm_limit_mm_per_prompt", '{"image": 0, "video": 0}']
    server = RolloutServer(model, folder / f"server-{name}.txt", flags).start()
    try:
        remote = ["--vllm_mode", "server", "--vllm_server_base_url", server.wait().url]
        run = megatron_rlhf(model, dataset, folder / f"served-{name}", 1, [*FP32, *remote], {API_KEY_VARIABLE: KEY})
    finally:
        server.stop()
    assert run.code == 0, run.output[-4000:]
    number = len(sent) + len(stacked) // 2 * (4 * 3 - 2)  # 4 experts are sent as three tensors each
    assert f"vLLM holds all {number} tensors bit for bit" in run.output
    assert all(abs(step["rollout/k3_kl"]) < 1e-6 for step in run.log)
    assert set(load_file(run.last_checkpoint / "model.safetensors")) == set(tensors)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("qwen3_vl_moe", ""),
        pytest.param("qwen2_5_vl", "", marks=pytest.mark.nightly),
        pytest.param("qwen3_omni_moe", "", marks=pytest.mark.nightly),
        pytest.param("qwen2_vl", "", marks=pytest.mark.nightly),
        pytest.param("qwen3_vl", "", marks=pytest.mark.nightly),
        pytest.param("glm4v", "", marks=pytest.mark.nightly),
        pytest.param("glm4v_moe", "", marks=pytest.mark.nightly),
        pytest.param("internvl", "", marks=pytest.mark.nightly),
        pytest.param("qwen2_5_omni", "", marks=pytest.mark.nightly),
        pytest.param("minicpmv4_6", "", marks=pytest.mark.nightly),
        pytest.param("minicpmv4_6", "--language_model_only", marks=pytest.mark.nightly),
        pytest.param("qwen3_omni_moe", "--language_model_only", marks=pytest.mark.nightly),
    ],
)
def test_text_of_other_types_is_generated_and_trained_with_equal_numbers(
    folder: Path, dataset: Path, kind: str, extra: str
) -> None:
    model = make_model(folder / f"{kind}{extra}", kind)
    run = megatron_rlhf(
        model, dataset, folder / f"{kind}{extra}-run", 1, [*FP32, *PROBED, *([extra, "true"] if extra else [])]
    )
    assert run.code == 0, run.output[-4000:]
    assert len(run.log) == 2 and all(abs(step["rollout/k3_kl"]) < 1e-6 for step in run.log)
    assert all(step["sync_check/mean_diff"] < 1e-5 for step in run.log)
    assert hf_difference(run.last_checkpoint)["max"] < 1e-5
    before, after = load_file(model / "model.safetensors"), load_file(run.last_checkpoint / "model.safetensors")
    if kind in (*OMNI, *ON_TEXT_ALONE):  # whose names and experts are saved as they were released
        assert (
            f"vLLM holds all {sum(not VISION_TOWER.search(name) for name in before)} tensors bit for bit" in run.output
        )
        assert set(before) == set(after)
    towers = {name.removeprefix("model."): name for name in after if VISION_TOWER.search(name)}
    assert towers
    for name in [name for name in before if VISION_TOWER.search(name)]:
        assert torch.equal(before[name].float(), after[towers[name.removeprefix("model.")]].float()), name


def test_without_the_image_part_text_trains_alike_and_saves_it(
    learned: Finished, folder: Path, qwen3_5: Path, dataset: Path
) -> None:
    """In its first step the image part has no effect on text, so the run that builds it has equal numbers."""
    flags = [*FP32, *PROBED, *LEARNING, "--train_iters", "1", "--save_steps", "1", "--language_model_only", "true"]
    run = megatron_rlhf(qwen3_5, dataset, folder / "language-only", 1, flags)
    assert run.code == 0, run.output[-4000:]
    [step], expected = run.log, learned.log[0]
    assert all(step[name] == expected[name] for name in ("loss", "grad_norm", "reward", "rollout/k3_kl"))
    before, after = load_file(qwen3_5 / "model.safetensors"), load_file(run.last_checkpoint / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before if VISION_TOWER.search(name))
