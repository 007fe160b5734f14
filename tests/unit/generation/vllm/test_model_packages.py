"""A package that ms-swift needs to load a model is named before the model is downloaded or loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo.arguments.refused import OMNI
from swift_megatron_grpo.generation.server.arguments import GRPORolloutArguments
from swift_megatron_grpo.generation.vllm.model_packages import fault_of_packages

FAULT = "--model {}: to load a {}, ms-swift needs the package {}, also for rows of text, and it is not installed; "
ADVICE = 'pip install "qwen-omni-utils>=0.0.9"'


@pytest.mark.parametrize("package", ["qwen_omni_utils", "av", "audioread", "librosa"])
@pytest.mark.parametrize("kind", OMNI)
def test_a_missing_package_is_named_with_what_installs_it(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault_of_packages("m", kind) is None
    monkeypatch.setitem(sys.modules, package, None)
    assert fault_of_packages("m", kind) == FAULT.format("m", kind, package) + ADVICE
    assert fault_of_packages("m", "qwen3_vl") is None


def test_the_type_is_that_of_the_folder_or_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qwen_omni_utils", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    for model, kind in ((str(tmp_path), "qwen2_5_omni"), ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "qwen3_omni_moe")):
        assert fault_of_packages(model, None) == FAULT.format(model, kind, "qwen_omni_utils") + ADVICE
    for model in ("Qwen/Qwen3-8B", "no/such/model", None):
        assert fault_of_packages(model, None) is None


def test_a_server_is_refused_before_it_loads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "librosa", None)
    model = "Qwen/Qwen2.5-Omni-3B"
    with pytest.raises(ValueError) as caught:
        GRPORolloutArguments(model=model, api_key="key")
    assert str(caught.value) == FAULT.format(model, "qwen2_5_omni", "librosa") + ADVICE
