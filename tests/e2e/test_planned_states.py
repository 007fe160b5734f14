"""`--check true` plans weights, gradients and optimizer states of runs that train image and audio parts, and drafts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from swift_megatron_grpo.cli.estimate.memory import GRADIENT_BYTES
from tests.e2e.test_images import COLOURS, EVERYTHING
from tests.e2e.test_recordings import make_dataset
from tests.forking.client import run_code
from tests.support.runs import PLUGINS, REWARDS, grpo_flags, make_model, megatron_rlhf
from tests.support.runs import make_dataset as make_rows

pytestmark = pytest.mark.e2e
LORA = ["--tuner_type", "lora", "--target_modules", "all-linear", "--lora_rank", "4"]
PLAN = """
import json, sys
from swift_megatron_grpo.cli.check import check
from swift_megatron_grpo.cli.check.estimate import estimate
args = check.parse_flags(sys.argv[1:])
inputs = check.Inputs(args)
rows = check.read_rows(args, inputs.train_rows, inputs.template)
found = estimate(args, check.read_model(args.model_dir), rows, check.gpu_of("H100-80G"))
[rank], engine = found.memory, found.engine
print(json.dumps({"weights": rank.weights, "gradients": rank.gradients, "optimizer": rank.optimizer,
                  "vllm": engine.weights, "heard": rows.heard_tokens, "seen": rows.image_tokens}))
"""


def plan(arguments: list[str]) -> dict[str, Any]:
    printed = run_code("trainer", PLAN, *arguments, "--check", "true")
    planned: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return planned


def bytes_in_vllm(model: Path, sees: bool, hears: bool) -> int:
    """Return the bytes of the language model and of the parts for which rows have media, in bf16."""
    left_out = ["talker.", "code2wav.", *([] if sees else ["thinker.visual."])]
    left_out += [] if hears else ["thinker.audio_tower."]
    with safe_open(model / "model.safetensors", "pt") as file:
        held = [name for name in file.keys() if not name.startswith(tuple(left_out))]  # noqa: SIM118 - not a mapping
        return 2 * sum(math.prod(file.get_slice(name).get_shape()) for name in held)


@pytest.mark.nightly
def test_a_layer_that_drafts_is_planned_to_the_byte_in_both(folder: Path) -> None:
    model, dataset = make_model(folder / "drafting", "qwen3_5"), make_rows(folder / "rows.jsonl", rows=4)
    drafts = ["--speculative_rollouts", "mtp", "--seed_completions", "true", "--vllm_enable_prefix_caching", "false",
              "--top_p", "1", "--top_k", "-1"]  # fmt: skip
    planned, frozen, without = (
        plan(grpo_flags(model, dataset, folder / "unused", flags))
        for flags in ([*drafts, "--mtp_num_layers", "1"], drafts, [])
    )
    measure = ["--external_plugins", str(REWARDS), str(PLUGINS / "measured_states.py"), "--callbacks",
               "measured_states"]  # fmt: skip
    run = megatron_rlhf(model, dataset, folder / "drafted", 1, [*drafts, "--mtp_num_layers", "1", *measure])
    assert run.code == 0, run.output[-4000:]
    measured = json.loads((run.last_checkpoint / "states.json").read_text())
    assert planned["weights"] == measured["weights"]
    assert planned["gradients"] == measured["gradients"] * GRADIENT_BYTES
    assert planned["optimizer"] == measured["optimizer"]
    with safe_open(model / "model.safetensors", "pt") as file:
        layer = [name for name in file.keys() if name.startswith("mtp.")]  # noqa: SIM118 - not a mapping
        size = 2 * sum(math.prod(file.get_slice(name).get_shape()) for name in layer)
    assert planned["vllm"] == frozen["vllm"] == without["vllm"] + size
    assert frozen["weights"] == without["weights"] == planned["weights"] - size


@pytest.mark.parametrize(
    ("kind", "images", "recordings", "flags"),
    [
        ("qwen3_omni_moe", [0], [1, 2], EVERYTHING),
        pytest.param("qwen3_omni_moe", [1], [0], EVERYTHING, marks=pytest.mark.nightly),
        pytest.param("qwen3_omni_moe", [1, 0], [1, 2], [*EVERYTHING, *LORA], marks=pytest.mark.nightly),
        pytest.param("qwen3_omni_moe", [0], [1, 2], [*EVERYTHING, *LORA], marks=pytest.mark.nightly),
        pytest.param("qwen2_5_vl", [1], [0], EVERYTHING, marks=pytest.mark.nightly),
    ],
    ids=["audio", "images", "adapters", "adapters-audio", "qwen2_5_vl"],
)
def test_planned_states_are_those_of_a_run_to_the_byte(
    folder: Path, kind: str, images: list[int], recordings: list[int], flags: list[str], request: Any
) -> None:
    """A part without rows is frozen, also with --freeze_vit false, and vLLM does not build it."""
    name = request.node.callspec.id
    model = make_model(folder / f"{name}-model", kind)
    dataset = make_dataset(folder / f"{name}-rows", images, recordings)
    plugins = [*COLOURS[:2], str(PLUGINS / "measured_states.py"), *COLOURS[2:], "--callbacks", "measured_states"]
    flags = [*flags, *plugins, "--sync_check", "off"]
    run = megatron_rlhf(model, dataset, folder / name, 1, flags, rewards=False)
    assert run.code == 0, run.output[-4000:]
    measured = json.loads((run.last_checkpoint / "states.json").read_text())
    planned = plan(grpo_flags(model, dataset, folder / "unused", flags, rewards=False))
    assert planned["weights"] == measured["weights"]
    assert planned["gradients"] == measured["gradients"] * GRADIENT_BYTES
    assert planned["optimizer"] == measured["optimizer"]
    sees, hears = any(images), any(recordings)
    assert planned["vllm"] == bytes_in_vllm(model, sees, hears)
    assert (any(planned["seen"]), any(planned["heard"])) == (sees, hears)
