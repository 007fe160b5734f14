"""A reference that moves: by the formula of ms-swift's other trainer, in every layout, and also in a resumed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.choice import rest_nightly
from tests.support.runs import CANNED, Finished, make_model, megatron_rlhf

pytestmark = pytest.mark.e2e
MOVES = ["--beta", "0.1", "--sync_ref_model", "true", "--ref_model_sync_steps", "2", "--ref_model_mixup_alpha",
         "0.6", "--torch_dtype", "float32", "--fp16", "false", "--train_iters", "4", "--save_steps", "1",
         "--no_save_optim", "false", "--no_save_rng", "false"]  # fmt: skip
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]),
    "pp2": (2, ["--pipeline_model_parallel_size", "2"]),
    "experts": (2, ["--expert_model_parallel_size", "2"]),
}


def train(model: Path, dataset: Path, folder: Path, layout: str, *flags: str) -> Finished:
    ranks, sizes = LAYOUTS[layout]
    run = megatron_rlhf(model, dataset, folder, ranks, [*MOVES, *sizes, *flags])
    assert run.code == 0, run.output[-4000:]
    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("layout", rest_nightly(list(LAYOUTS), ["one", "pp2"]))
def test_the_reference_moves_by_the_formula(tmp_path: Path, dense: Path, dataset: Path, layout: str) -> None:
    model = make_model(tmp_path / "moe", "moe") if layout == "experts" else dense
    run = train(model, dataset, tmp_path / "run", layout, *CANNED)
    expected = {name: value.float() for name, value in weights(model).items()}
    for step in range(1, 5):
        checkpoint = run.folder / f"checkpoint-{step}"
        if step % 2 == 0:
            policy = weights(checkpoint)
            for name, value in expected.items():
                value.mul_(1 - 0.6).add_(policy[name], alpha=0.6)
        moved = weights(checkpoint / "reference")
        assert moved.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(moved[name], value, rtol=0, atol=1e-6)
    assert all(step["kl"] > 0 for step in run.log[1:])


@pytest.mark.nightly
def test_a_resumed_run_continues_with_the_moved_reference_and_answers(
    tmp_path: Path, dense: Path, dataset: Path
) -> None:
    """Each step has its own answers (CHORD), which a resumed run takes as well."""
    turns = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i}" * 4}] for i in range(20)]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    seeded = [
        *["--seed_completions", "true", "--chord_sft_dataset", str(answers), "--loss_scale", "default+react"],
        *["--chord_sft_per_device_train_batch_size", "1", "--chord_mu_warmup_steps", "1", "--chord_mu_peak", "0.5"],
        *["--chord_mu_decay_steps", "4", "--chord_mu_valley", "0", "--chord_enable_phi_function", "true"],
    ]
    whole = train(dense, dataset, tmp_path / "whole", "one", *seeded)
    source = ["--finetune", "false", "--mcore_model", str(whole.folder / "checkpoint-2")]
    resumed = train(dense, dataset, tmp_path / "resumed", "one", *seeded, *source)
    assert [step["chord/mu"] for step in whole.log[:3]] == pytest.approx([0, 0.5, 0.4267767])
    assert len(whole.log) == 4 and len(resumed.log) == 2 and "no moved reference" not in resumed.output
    for step, expected in zip(resumed.log, whole.log[2:], strict=True):
        for name in ("kl", "loss", "grad_norm", "reward", "chord/mu", "chord/sft_loss"):
            assert step[name] == expected[name], name
