"""Within the precision of bf16, every layout on GPUs matches one GPU, and one GPU matches plain transformers.

Kernels round differently for other shapes, so the bounds are those of bf16; an incorrect layout differs by 5 % or more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swift_megatron_grpo.cli.check_layouts.command import compare
from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.gpu.conftest import LAYOUTS, Gpus
from tests.paths import GOLDEN, REPOSITORY
from tests.support.runs import first_weights

pytestmark = pytest.mark.gpu
CASES = [(kind, tuner, layout) for (kind, tuner), layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.parametrize(("kind", "tuner", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_a_layout_matches_one_gpu(gpus: Gpus, kind: str, tuner: str, layout: str) -> None:
    if Variant.parse(layout).ranks > gpus.count:
        pytest.skip(f"needs {Variant.parse(layout).ranks} GPUs")
    difference = compare(layout, gpus.layouts(kind, tuner))
    print(f"\n{layout}: differences: loss {difference.loss:.1e}, gradient norm {difference.grad_norm:.1e}, "
          f"weights {difference.weights:.1e}")  # fmt: skip
    assert difference.grad_norm <= 0.02
    assert difference.loss <= 0.02


def test_log_probs_and_entropies_of_one_gpu_match_plain_transformers(gpus: Gpus) -> None:
    """Compares Transformer Engine with packed sequences in bf16 to transformers with the same weights in fp64."""
    from transformers import AutoModelForCausalLM

    inference = json.loads((gpus.folder / "inference.0.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(gpus.model("dense"), dtype=torch.float64, attn_implementation="eager")
    differences, entropies = [], []
    for index, sample in enumerate(fixed_samples(model.config.vocab_size, 8, policies_given=True)):
        with torch.no_grad():
            log_p = (model(torch.tensor([sample.tokens])).logits[0] / 0.9).log_softmax(-1)
        rows = [i for i, trained in enumerate(sample.completion_mask) if trained]
        for number, i in enumerate(rows):
            logprobs, entropy = inference["passes"][0][str(index)]
            differences.append(abs(logprobs[number] - log_p[i - 1, sample.tokens[i]].item()))
            entropies.append(abs(entropy[number] + (log_p[i - 1].exp() * log_p[i - 1]).sum().item()))
    assert max(differences) < 0.1 and sum(differences) / len(differences) < 0.01
    assert max(entropies) < 0.05


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_one_gpu_matches_the_cpu_stand_in(gpus: Gpus, kind: str) -> None:
    """Compares Transformer Engine in bf16 to its CPU stand-in in fp32. tests/dist checks the recorded file."""
    golden = json.loads((GOLDEN / f"{kind}_step.json").read_text())
    assert first_weights(gpus.model(kind)) == pytest.approx(golden["first_weights"], rel=1e-6)
    step = json.loads((gpus.folder / f"{kind}-step.0.json").read_text())
    for number, name in enumerate(("log-probs", "entropies")):
        values, expected = ([x for i in golden["values"] for x in run["values"][i][number]] for run in (step, golden))
        differences = [abs(a - b) for a, b in zip(values, expected, strict=True)]
        mean, largest = sum(differences) / len(differences), max(differences)
        print(f"\n{kind} {name}: difference {mean:.1e} on average, {largest:.1e} at most")
        assert mean < 0.005  # bf16 instead of fp32 on the CPU: 0.0021 and 0.0024
        assert largest < (0.05 if kind == "dense" else 0.3)  # a token near a routing boundary goes to another expert
    metrics, expected_metrics = step["metrics"], golden["metrics"]
    for name in ("loss", "grad_norm"):
        print(f"{name} {metrics[name]:.5f}, of the stand-in {expected_metrics[name]:.5f}")
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=0.01)
    assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=0.02 if kind == "dense" else 0.05)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_loss_and_gradient_norm_match_plain_transformers(gpus: Gpus, tmp_path: Path, kind: str) -> None:
    script = [sys.executable, "-m", "tests.programs.dist.hf_gradients", str(gpus.model(kind)), str(tmp_path / "hf.pt")]
    subprocess.run(script, check=True, cwd=REPOSITORY)
    reference = torch.load(tmp_path / "hf.pt")
    norm = sum(grad.double().square().sum().item() for grad in reference["grads"].values()) ** 0.5
    step = json.loads((gpus.folder / f"{kind}-given" / "one.json").read_text())["metrics"][0]
    assert step["loss"] == pytest.approx(reference["loss"], abs=0.01)
    assert step["grad_norm"] == pytest.approx(norm, rel=0.02 if kind == "dense" else 0.05)


def test_log_probs_depend_on_micro_batches_only_by_rounding(gpus: Gpus) -> None:
    first, *others = json.loads((gpus.folder / "inference.0.json").read_text())["passes"]
    for other in others:
        for index, (logprobs, _) in first.items():
            assert other[index][0] == pytest.approx(logprobs, abs=0.1)
