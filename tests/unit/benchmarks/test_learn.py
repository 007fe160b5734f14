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

from benchmarks.harness.instrument.sums import Sum
from benchmarks.harness.learning import page
from benchmarks.harness.learning.accuracy import result_of
from benchmarks.harness.learning.bands import accuracies, by_arm, rewards, seconds_per_step, steps_below
from benchmarks.harness.learning.prompts import SEARCH, SYSTEM, TASK, differing_prompts, tokens_of_peers
from benchmarks.harness.learning.reward import compute_score
from benchmarks.harness.learning.search import choose
from benchmarks.harness.learning.settings import Paths, Settings, command_of
from benchmarks.harness.learning.steps import checkpoints, read_steps, without_saving
from benchmarks.harness.learning.trl_arm import Arguments
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
    assert differing == {"max_tokens_per_micro_batch", "micro_batch_size", "report_to", "attention_backend"}
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


def test_reward_and_accuracy_are_the_same_in_all_trainers() -> None:
    texts, solutions = ["36", "5 + 31 = 36.", "36 or 35", "136", "no number", "4 - 40 = -36"], ["36"] * 5 + ["-36"]
    scores = [compute_score("", text, solution) for text, solution in zip(texts, solutions, strict=True)]
    assert scores == [1, 1, 0, 0, 0, 1] == Sum()(texts, solutions)
    assert result_of(texts, [{"solution": solution} for solution in solutions])["accuracy"] == 0.5


def test_problems_are_solved_and_those_for_the_choice_are_others() -> None:
    task, other = TASK.draw(), SEARCH.draw()
    assert all(eval(problem) == solution for problem, solution in (task | other).items())
    assert {len(problem.split()) for problem in (task | other)} == {3, 5}
    assert not task.keys() & other.keys() and min(map(len, (task, other))) > 4000


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
        assert read_steps(arm, tmp_path, 60) == {
            "reward": [0.1, 0.2], "length": [9.0, 9.0], "learning_rate": [1e-5, 1e-5], "seconds": [0.5, 1.0]
        }  # fmt: skip
    assert read_steps("stock", tmp_path / "nowhere", 60)["reward"] == []


def test_further_steps_of_a_rollout_have_its_reward(tmp_path: Path) -> None:
    """A rollout of --steps_per_generation 2 trains in two lines of the log."""
    steps = [{"learning_rate": 1e-5, "iteration": f"{step}/4", "train_speed(s/it)": "0.5"} for step in range(1, 5)]
    for step, reward in ((0, 0.25), (2, 0.5)):
        steps[step] |= {"reward": reward, "completions/mean_length": 9.0}
    (tmp_path / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    series = read_steps("ours", tmp_path, 60)
    assert series["reward"] == [0.25, 0.25, 0.5, 0.5] and series["seconds"] == [0.5, 1.0, 1.5, 2.0]


def test_a_step_that_begins_with_saving_counts_as_the_median_step() -> None:
    assert without_saving([3.0, 4.0, 9.0, 10.0, 17.0], save_every=2) == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert without_saving([1.0, 2.0], save_every=2) == [1.0, 2.0] and without_saving([], save_every=2) == []


def test_weights_are_found_in_the_folders_of_all_trainers(tmp_path: Path) -> None:
    for folder in ("checkpoint-120", "checkpoint-60", "global_step_180/actor/huggingface", "start"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").touch()
    (tmp_path / "checkpoint-180").mkdir()  # without weights
    assert list(checkpoints(tmp_path).items()) == [
        (60, tmp_path / "checkpoint-60"), (120, tmp_path / "checkpoint-120"),
        (180, tmp_path / "global_step_180/actor/huggingface"),
    ]  # fmt: skip


def candidate(rate: float, generations: int, *scores: float) -> dict[str, Any]:
    held_out = [{"step": 50 * place, "accuracy": score, "problems": 64} for place, score in enumerate(scores)]
    return {"settings": {"learning_rate": rate, "generations": generations}, "held_out": held_out,
            "device": "NVIDIA H200"}  # fmt: skip


def test_the_choice_has_the_highest_mean_accuracy_after_training_began() -> None:
    choice = choose([candidate(2e-5, 8, 0.9, 0.1, 0.5), candidate(1e-5, 16, 0.1, 0.3, 0.4)])
    assert (choice["learning_rate"], choice["generations"], choice["device"]) == (1e-5, 16, ["NVIDIA H200"])
    assert [row["mean"] for row in choice["candidates"]] == [0.35, 0.3]
    text = page.files([], [], json.loads(json.dumps(choice)))[page.PAGE]
    assert "Chosen: 1e-05 and groups of 16, by 64 held-out problems, on NVIDIA H200. 4 candidates did not end" in text
    assert "| learning rate | group | after step 0 | after step 50 | after step 100 | mean in training |" in text
    assert "| 2e-05 | 8 | 90.0% | 10.0% | 50.0% | 30.0% |" in text
    with pytest.raises(ValueError, match="do not have the learning_rate and generations"):
        page.files([some_run("ours", 1, 0.1)], [], choice)


def some_run(arm: str, seed: int, reward: float, **values: Any) -> dict[str, Any]:
    """Return a run of 40 steps of 0.5 s, whose reward doubles after half of them."""
    return {
        "arm": arm, "seed": seed, "settings": {"steps": 40}, "device": "NVIDIA H200", "versions": {"torch": "2.11.0"},
        "exit_code": 0, "held_out": [{"step": 0, "accuracy": 0.0625}, {"step": 40, "accuracy": reward}],
        "reward": [reward] * 20 + [2 * reward] * 20, "seconds": [0.5 * (step + 1) for step in range(40)], **values,
    }  # fmt: skip


def test_a_band_has_the_mean_and_the_range_of_seeds() -> None:
    runs = [some_run("ours", 1, 0.1), some_run("ours", 2, 0.2)]
    first, second = rewards(runs, 0.5)
    assert (first.step, first.seconds, first.low, first.high) == (20, 10.0, pytest.approx(0.1), pytest.approx(0.2))
    assert (second.step, second.seconds, second.mean) == (40, 20.0, pytest.approx(0.3))
    before, after = accuracies(runs, 0.5)
    assert (before.step, before.seconds, before.mean) == (0, 0.0, 0.0625)
    assert (after.step, after.seconds, after.low, after.high) == (40, 20.0, 0.1, 0.2)
    assert rewards([], 0.5) == accuracies([], 0.5) == [] and rewards(runs, None)[0].seconds is None


def test_a_step_takes_the_median_of_each_timed_run_with_most_of_its_steps() -> None:
    cut = {"exit_code": None, "seconds": [9.0 + 0.25 * step for step in range(32)]}
    timed = [some_run("ours", 1, 0.1), some_run("ours", 2, 0.1, **cut), some_run("trl", 1, 0.1),
             some_run("ours", 3, 0.1, seconds=cut["seconds"][:31], exit_code=None),
             some_run("ours", 4, 0.1, seconds=cut["seconds"], exit_code=1)]  # fmt: skip
    assert seconds_per_step(timed, "ours") == [0.5, 0.25] and seconds_per_step(timed, "verl") == []
    text = page.files([], timed, None)[page.PAGE]
    assert "* this package, timed with seed 2: its limit ended it after 32 of 40 steps." in text
    assert "timed with seed 4" not in text


def test_windows_below_every_seed_of_the_others_are_named() -> None:
    others = {"trl": rewards([some_run("trl", 1, 0.2), some_run("trl", 2, 0.4)], None), "verl": []}
    assert steps_below({"ours": rewards([some_run("ours", 1, 0.1)], None), **others}) == [20, 40]
    assert steps_below({"ours": rewards([some_run("ours", 1, 0.3)], None), **others}) == []
    assert steps_below({"ours": rewards([some_run("ours", 1, 0.1)], None)}) == []


def test_runs_of_several_sessions_merge_by_trainer_and_seed() -> None:
    runs = [some_run("trl", 2, 0.1), some_run("trl", 1, 0.1), some_run("ours", 3, 0.1)]
    assert {arm: [run["seed"] for run in of_arm] for arm, of_arm in by_arm(runs).items()} == {
        "ours": [3], "stock": [], "trl": [1, 2], "verl": []
    }  # fmt: skip
    with pytest.raises(ValueError, match="a seed of trl twice"):
        by_arm([*runs, runs[0]])
    with pytest.raises(ValueError, match="different settings"):
        by_arm([some_run("ours", 1, 0.1), some_run("trl", 1, 0.1, settings={"steps": 40, "prompts": 8})])


def test_the_page_states_what_was_not_run_and_what_did_not_end() -> None:
    runs = [some_run("ours", 1, 0.1), some_run("ours", 2, 0.2), some_run("trl", 1, 0.4),
            some_run("verl", 1, 0.1, exit_code=None, held_out=[]) | {"reward": [0.1] * 7},
            some_run("trl", 2, 0.4, held_out=[])]  # fmt: skip
    files = page.files(runs, [some_run("ours", 1, 0.1), some_run("ours", 2, 0.1)], None)
    text = files[page.PAGE]
    assert "| this package | 1, 2 | NVIDIA H200 | 0.300 | 6.2% | 15.0% | 0.50 (0.50, 0.50) |" in text
    assert "| verl | not run yet |" in text and "* TRL: not run yet with seeds 3." in text
    assert "* verl, seed 1: ended after 7 of 40 steps (exit code None); not in the table." in text
    assert "* TRL, seed 2: its rental ended before its weights were scored" in text
    assert "| TRL | 1, 2 | NVIDIA H200 | 0.800 | 6.2% | 40.0% | not run yet |" in text
    assert "| 21 to 40 | 0.300 (0.200 to 0.400) | 0.800 (0.800 to 0.800) |" in text
    assert "is below all other seeds in the windows that end with 20, 40" in text
    assert "| 40 | 15.0% (10.0% to 20.0%) | 40.0% (40.0% to 40.0%) |" in text
    assert "Accuracy after training divided by that before: 2.4 (this package), 6.4 (TRL)." in text
    chart = ElementTree.fromstring(files[page.CHART])
    lines = chart.findall(".//{*}polyline")
    assert (
        len(lines) == len(chart.findall(".//{*}polygon")) == 6
    )  # in two panels of steps, and of seconds for the timed one
    # Steps 20 and 40 of 40, rewards 0.15 and 0.3 of 0.8, in a plot of 360 by 240 at (46, 40).
    assert lines[0].attrib["points"] == "226.0,235.0 406.0,190.0"


def test_runs_without_scores_have_rewards_and_no_accuracies() -> None:
    files = page.files([some_run("ours", 1, 0.1, held_out=[])], [], None)
    assert "| this package | 1 | NVIDIA H200 | 0.200 | not run yet | not run yet | not run yet |" in files[page.PAGE]
    assert "## Rewards" in files[page.PAGE] and "## Held-out accuracy" not in files[page.PAGE]
    assert len(ElementTree.fromstring(files[page.CHART]).findall(".//{*}polyline")) == 1


def test_without_runs_there_is_a_page_and_no_chart() -> None:
    text = page.files([], [], None)[page.PAGE]
    assert list(page.files([], [], None)) == [page.PAGE] and ".svg" not in text
    assert "over the learning rates 5e-06, 1e-05, 2e-05 and groups of 8, 16, was not run yet." in text


def test_the_committed_page_of_curves_matches_the_committed_results() -> None:
    for path, written in page.of_repository(REPOSITORY).items():
        assert (REPOSITORY / path).read_text() == written, "run python -m benchmarks.learn report"
