"""benchmarks/learn.py: prompts and settings are the same in all trainers; logs, bands and the page on made-up runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import LlamaConfig, get_constant_schedule_with_warmup
from trl import GRPOConfig, ModelConfig, TrlParser
from trl.data_utils import apply_chat_template

from benchmarks.harness.learning import page
from benchmarks.harness.learning.accuracy import result_of
from benchmarks.harness.learning.bands import band, by_arm, read_runs, seconds_per_step, steps_below
from benchmarks.harness.learning.prompts import SYSTEM, differing_prompts, tokens_of_peers
from benchmarks.harness.learning.settings import Paths, Settings, command_of
from benchmarks.harness.learning.steps import read_steps
from benchmarks.harness.learning.trl_arm import Arguments
from benchmarks.harness.learning.verl_reward import compute_score
from scripts.make_tiny_model import make_tokenizer
from tests.paths import REPOSITORY

# The template of SmolLM2-135M-Instruct.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = {"role": "user", "content": "State the final answer to the following arithmetic problem: 5 + 31 = Number only."}
PROBLEM = {"question": "5 + 31 =", "answer": "36", "metadata": {"source_dataset": "chain_sum"}}
PATHS = Paths(Path("model"), Path("rows.jsonl"), Path("output"))


# ---- the same in all trainers


def test_all_trainers_make_the_same_tokens_of_a_prompt_with_a_system(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    messages = [{"role": "system", "content": SYSTEM}, USER]
    assert differing_prompts(tmp_path, [{"messages": messages}]) == []
    assert len(differing_prompts(tmp_path, [{"messages": [USER]}])) == 1  # ms-swift's template adds no system prompt
    tokens = tokens_of_peers(tokenizer, messages)
    assert tokens == tokens_of_peers(tokenizer, [USER])  # the model's own template does
    assert tokens == tokenizer(text=apply_chat_template({"prompt": messages}, tokenizer)["prompt"])["input_ids"]


def values_of(arm: str) -> dict[str, str]:
    command = command_of(arm, Settings(), PATHS, 1)
    if arm == "verl":
        return dict(text.split("=", 1) for text in command)  # type: ignore[misc]
    return {name.removeprefix("--"): value for name, value in pairwise(command) if name.startswith("--")}


SAME = {  # ms-swift's flags, TRL's fields and verl's overrides, without `actor_rollout_ref.`
    "num_generations": ("num_generations", "rollout.n"),
    "max_completion_length": ("max_completion_length", "data.max_response_length"),
    "temperature": ("temperature", "rollout.temperature"),
    "epsilon": ("epsilon", "actor.clip_ratio_low"),
    "epsilon_high": ("epsilon_high", "actor.clip_ratio_high"),
    "lr": ("learning_rate", "actor.optim.lr"),
    "lr_warmup_iters": ("warmup_steps", "actor.optim.lr_warmup_steps"),
    "weight_decay": ("weight_decay", "actor.optim.weight_decay"),
    "clip_grad": ("max_grad_norm", "actor.optim.clip_grad"),
    "train_iters": ("max_steps", "trainer.total_training_steps"),
    "seed": ("seed", "data.seed"),
}


def test_the_settings_of_all_trainers_are_equal(tmp_path: Path) -> None:
    megatron, verl = values_of("ours"), values_of("verl")
    stock = values_of("stock")
    differing = {name for name in megatron | stock if megatron.get(name) != stock.get(name)}
    assert differing == {"max_tokens_per_micro_batch", "micro_batch_size", "report_to"}
    command = [*command_of("trl", Settings(), PATHS, 1), "--output_dir", str(tmp_path), "--use_cpu", "true"]
    config, model, _ = TrlParser((GRPOConfig, ModelConfig, Arguments)).parse_args_and_config(command)
    for flag, (of_trl, of_verl) in SAME.items():
        wanted = float(megatron[flag])
        own = of_verl if of_verl in verl else f"actor_rollout_ref.{of_verl}"
        assert (getattr(config, of_trl), float(verl[own])) == (wanted, wanted), flag
    assert (config.adam_beta1, config.adam_beta2) == (0.9, 0.95) and config.beta == float(megatron["beta"]) == 0
    assert verl["actor_rollout_ref.actor.optim.betas"] == "[0.9,0.95]"
    assert config.generation_batch_size == int(megatron["global_batch_size"]) == 256
    assert int(verl["data.train_batch_size"]) * int(verl["actor_rollout_ref.rollout.n"]) == 256
    assert config.loss_type == megatron["loss_type"] == "grpo" and config.scale_rewards == "group"
    assert verl["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert verl["actor_rollout_ref.rollout.ignore_eos"] == "False" and model.dtype == "float32"


def test_the_learning_rate_rises_alike_in_megatron_and_trl() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    lr, warm_up, batch = 1e-5, 15, 256
    mine, peers = (torch.optim.SGD([{"params": [torch.zeros(1)], "max_lr": lr, "min_lr": lr}], lr=lr) for _ in range(2))
    megatron = OptimizerParamScheduler(
        mine, init_lr=0.0, max_lr=lr, min_lr=lr, lr_warmup_steps=warm_up * batch, lr_decay_steps=300 * batch,
        lr_decay_style="constant", start_wd=0.0, end_wd=0.0, wd_incr_steps=300 * batch, wd_incr_style="constant",
    )  # fmt: skip
    transformers = get_constant_schedule_with_warmup(peers, warm_up)
    for _ in range(40):
        assert mine.param_groups[0]["lr"] == pytest.approx(peers.param_groups[0]["lr"])
        megatron.step(increment=batch)
        peers.step()
        transformers.step()
    assert mine.param_groups[0]["lr"] == lr


def test_the_held_out_accuracy_counts_only_the_full_score() -> None:
    row = {"problem": json.dumps(PROBLEM)}
    result = result_of(["36", " 36\n", "It is 36.", "35"], [row] * 4)
    assert result["accuracy"] == 0.5 and 0.5 < result["score"] < 0.75
    assert compute_score("", "36", row["problem"]) == 1


# ---- logs, bands and the page


def test_steps_are_read_from_the_log_of_each_trainer(tmp_path: Path) -> None:
    swift = [{"reward": 0.1 * step, "completions/mean_length": 9.0, "learning_rate": 1e-5, "iteration": f"{step}/2",
              "train_speed(s/it)": "0.5"} for step in (1, 2)]  # fmt: skip
    verl = [{"data": {"critic/rewards/mean": 0.1 * step, "response_length/mean": 9.0, "actor/lr": 1e-5,
                      "timing_s/step": 0.5 + 8 * (step == 2), "timing_s/save_checkpoint": 8.0 * (step == 2)}}
            for step in (1, 2)]  # fmt: skip
    trl = [{"reward": row["reward"], "completions/mean_length": 9.0, "learning_rate": 1e-5, "seconds": 0.5 * step}
           for step, row in enumerate(swift, 1)]  # fmt: skip
    for arm, file, rows in (
        ("ours", "logging.jsonl", [*swift, {"memory": 3}]), ("trl", "steps.jsonl", trl), ("verl", "steps.jsonl", verl)
    ):  # fmt: skip
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert read_steps(arm, tmp_path) == {
            "reward": [0.1, 0.2], "length": [9.0, 9.0], "learning_rate": [1e-5, 1e-5], "seconds": [0.5, 1.0]
        }  # fmt: skip
    assert read_steps("stock", tmp_path / "nowhere")["reward"] == []


def some_run(arm: str, seed: int, reward: float, **values: Any) -> dict[str, Any]:
    """Return a run of 40 steps of 0.5 s, whose reward doubles after half of them."""
    return {
        "arm": arm, "seed": seed, "settings": {"steps": 40}, "device": "NVIDIA H200", "versions": {"torch": "2.11.0"},
        "exit_code": 0, "before": {"accuracy": 0.0625}, "after": {"accuracy": 0.25},
        "reward": [reward] * 20 + [2 * reward] * 20, "seconds": [0.5 * (step + 1) for step in range(40)], **values,
    }  # fmt: skip


def test_a_band_has_the_mean_and_the_range_of_seeds() -> None:
    first, second = band([some_run("ours", 1, 0.1), some_run("ours", 2, 0.2)])
    assert (first.step, first.seconds, first.low, first.high) == (20, 10.0, pytest.approx(0.1), pytest.approx(0.2))
    assert (second.step, second.seconds, second.mean) == (40, 20.0, pytest.approx(0.3))
    assert band([]) == [] and seconds_per_step(some_run("ours", 1, 0.1)) == 0.5


def test_windows_below_every_seed_of_the_others_are_named() -> None:
    others = {"trl": band([some_run("trl", 1, 0.2), some_run("trl", 2, 0.4)]), "verl": []}
    assert steps_below({"ours": band([some_run("ours", 1, 0.1)]), **others}) == [20, 40]
    assert steps_below({"ours": band([some_run("ours", 1, 0.3)]), **others}) == []
    assert steps_below({"ours": band([some_run("ours", 1, 0.1)])}) == []


def test_runs_with_other_settings_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different settings"):
        by_arm([some_run("ours", 1, 0.1), some_run("trl", 1, 0.1, settings={"steps": 40, "prompts": 8})])


def test_the_page_states_what_was_not_run_and_what_did_not_end() -> None:
    runs = [some_run("ours", 1, 0.1), some_run("ours", 2, 0.2), some_run("trl", 1, 0.4),
            some_run("verl", 1, 0.1, exit_code=None, after=None) | {"reward": [0.1] * 7}]  # fmt: skip
    files = page.files(runs)
    text = files[page.PAGE]
    assert "| this package | 1, 2 | NVIDIA H200 | 0.300 | 6.2% | 25.0% | 0.50 | 20 |" in text
    assert "| verl | not run yet |" in text and "* TRL: not run yet with seeds 2, 3." in text
    assert "* verl, seed 1: ended after 7 of 40 steps (exit code None); not in the table." in text
    assert "| 21 to 40 | 0.300 (0.200 to 0.400) | 0.800 (0.800 to 0.800) |" in text
    assert "is below all other seeds in the windows that end with 20, 40" in text
    chart = ElementTree.fromstring(files[page.CHART])
    lines = chart.findall(".//{*}polyline")
    assert len(lines) == len(chart.findall(".//{*}polygon")) == 4  # two trainers, by steps and by seconds
    # Steps 20 and 40 of 40, rewards 0.15 and 0.3 of 0.8, in a plot of 360 by 240 at (46, 40).
    assert lines[0].attrib["points"] == "226.0,235.0 406.0,190.0"


def test_without_runs_there_is_a_page_and_no_chart() -> None:
    assert list(page.files([])) == [page.PAGE] and ".svg" not in page.files([])[page.PAGE]


def test_the_committed_page_of_curves_matches_the_committed_results() -> None:
    for path, written in page.files(read_runs(REPOSITORY)).items():
        assert (REPOSITORY / path).read_text() == written, "run python -m benchmarks.learn report"
