"""Load what a run saves of every type of model without this package: whole models and adapters of trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import ModelConfig

from swift_megatron_grpo.arguments.refused import OMNI, TAKES_IMAGES
from swift_megatron_grpo.cli.check_layouts.layouts import base_flags, task
from swift_megatron_grpo.cli.tiny_models import TYPES
from tests.dist.conftest import EVERYTHING, Ranks, selected
from tests.forking.client import run_script
from tests.paths import PROGRAMS
from tests.programs.dist.saved_families import DEFAULTS, STOP, changed
from tests.support.choice import rest_nightly
from tests.support.runs import template_of

pytestmark = pytest.mark.dist
SAVE = ["--temperature", "1", "--no_save_optim", "true", "--no_save_rng", "true", "--merge_lora", "true"]
TUNERS = ("full", "lora")
NOT_BUILT = ("mtp.", "talker.", "code2wav.", "token2wav.")
SAMPLING = {name: value for name, value in DEFAULTS.items() if name != "do_sample"}  # as vLLM names them
# Experts that transformers has in one tensor, where the modules of these names are not theirs alone, or of types for
# which peft does not convert adapters: it leaves these adapters out without an error. docs/lora.md says so.
NOT_IN_PEFT = ("deepseek_v3", "glm4v_moe", "qwen3_next", "qwen3_5_moe", "qwen3_vl_moe", "qwen3_omni_moe")

CHOSEN = ["qwen3", "qwen3_moe", "deepseek_v3", "qwen2_5_vl", "qwen3_5_moe", "qwen3_omni_moe"]
TYPE = pytest.mark.parametrize("kind", rest_nightly(TYPES, CHOSEN))


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> list[str]:
    """Return the selected types. The last is InternVL, because ms-swift changes all classes when it loads one."""
    return sorted((kind for (kind,) in selected(request, "kind")), key="internvl".__eq__)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, kinds: list[str]) -> Path:
    """Return the folder with MODEL_TYPE, MODEL_TYPE-full/checkpoint-0 and MODEL_TYPE-lora/checkpoint-0[-merged]."""
    folder = ranks.folder / "families"
    folder.mkdir()
    make = "tests.programs.dist.saved_families:make_models"
    ranks.run("families", 1, [task(make, folders={kind: str(folder / kind) for kind in kinds})])
    tasks = []
    for kind in kinds:
        for tuner in TUNERS:
            extra = ["--output_dir", str(folder / f"{kind}-{tuner}"), "--template", template_of(folder / kind), *SAVE]
            extra += EVERYTHING if kind in TAKES_IMAGES else []
            if (kind, tuner) == ("qwen3_omni_moe", "lora"):  # peft cannot load adapters of its aligner: docs/lora.md
                extra += ["--freeze_aligner", "true"]
            flags = base_flags(str(folder / kind), str(folder), tuner_type=tuner, torch_dtype="float32", extra=extra)
            tasks.append(task("tests.programs.dist.saved_families:save", flags=flags))
    ranks.run("saved families", 1, tasks)
    return folder


@pytest.fixture(scope="module")
def reports(saved: Path, kinds: list[str]) -> dict[str, Any]:
    """Return what plain transformers and peft make of the folders of each type."""
    run_script(PROGRAMS / "dist" / "hf_saved.py", saved / "hf.json", saved, *kinds)
    result: dict[str, Any] = json.loads((saved / "hf.json").read_text())
    return result


@TYPE
def test_a_saved_model_is_the_trained_one_in_plain_transformers(reports: dict[str, Any], kind: str) -> None:
    bound = 2e-6 if kind in OMNI else 2e-5
    assert reports[kind]["whole"] < bound and reports[kind]["merged"] < bound


@TYPE
def test_every_tensor_is_saved_with_its_trained_values(saved: Path, kind: str) -> None:
    before = load_file(saved / kind / "model.safetensors")
    after = load_file(saved / f"{kind}-full" / "checkpoint-0" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        start = before[name].float()
        expected = start if name.startswith(NOT_BUILT) else changed(start)
        assert torch.allclose(tensor.float(), expected, rtol=1e-6, atol=1e-7), name


@TYPE
def test_other_files_are_those_of_the_source(reports: dict[str, Any], kind: str) -> None:
    assert reports[kind]["other files"] == []


@TYPE
def test_vllm_samples_with_the_defaults_of_the_source(saved: Path, kind: str) -> None:
    for name in (kind, f"{kind}-full/checkpoint-0", f"{kind}-lora/checkpoint-0-merged"):
        defaults = ModelConfig(str(saved / name)).get_diff_sampling_param()
        assert defaults == SAMPLING


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2_5_vl"])
def test_vllm_generates_with_the_defaults_of_the_source(saved: Path, kind: str) -> None:
    report = saved / f"{kind}.vllm.json"
    run_script(PROGRAMS / "dist" / "vllm_saved.py", report, saved / f"{kind}-full" / "checkpoint-0", kind="trainer")
    generated = json.loads(report.read_text())
    assert generated["defaults"] == SAMPLING
    assert generated["difference"] < 1e-5
    assert len(generated["completion"]) == 8 or generated["completion"][-1] in STOP["eos_token_id"]


@TYPE
def test_an_adapter_is_the_trained_one_in_peft(reports: dict[str, Any], kind: str) -> None:
    adapter, weights = reports[kind]["adapter"], reports[kind]["weights"]
    if kind in NOT_IN_PEFT:
        assert adapter > 0.01 and weights > 0.001
    else:
        assert adapter < 2e-5 and weights < 1e-6
