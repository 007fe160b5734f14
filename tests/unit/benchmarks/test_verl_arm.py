"""verl in the benchmark: its settings and overrides, its prompts, and its steps from the metrics that it logs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from datasets import Dataset

from benchmarks import bench
from benchmarks.harness.models import count_template_tokens, fill_vocabulary
from benchmarks.harness.results import merge_ranks
from benchmarks.harness.workload import reward_of, row_of, write_dataset
from benchmarks.peers.settings import SwiftFlags
from benchmarks.peers.verl_arm import write_rows
from benchmarks.peers.verl_results import result_of
from benchmarks.peers.verl_reward import compute_score
from benchmarks.peers.verl_settings import PARTS, VerlSetting, VerlSizes, verl_overrides
from scripts.make_tiny_model import make_tokenizer

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))


def overrides_of(setting: str, *swift: str) -> dict[str, str]:
    texts = verl_overrides(VerlSetting.parse(setting), VerlSizes(16, 8, 48, 512), SwiftFlags.parse(swift))
    return dict(text.split("=", 1) for text in texts)  # type: ignore[misc]


def test_a_micro_batch_is_sized_by_completions_or_tokens() -> None:
    assert VerlSetting.parse("mbs16+awake") == VerlSetting(16, None, frozenset({"awake"}))
    assert VerlSetting.parse("tokens16384") == VerlSetting(None, 16384, frozenset())
    padded, packed = overrides_of("mbs16"), overrides_of("tokens16384")
    assert (padded[f"{ACTOR}.ppo_micro_batch_size_per_gpu"], padded[f"{ACTOR}.use_dynamic_bsz"]) == ("16", "False")
    assert (packed[f"{ACTOR}.ppo_max_token_len_per_gpu"], packed[f"{ACTOR}.use_dynamic_bsz"]) == ("16384", "True")
    assert (padded[f"{MODEL}.use_remove_padding"], packed[f"{MODEL}.use_remove_padding"]) == ("False", "True")


def test_the_sampler_is_a_class_of_the_file_that_verl_loads() -> None:
    overrides = overrides_of("mbs16")
    sampler = "trainer.v1.sampler.custom_sampler"
    module = ast.parse(Path(overrides[f"{sampler}.path"]).read_text())
    assert overrides[f"{sampler}.name"] in [node.name for node in module.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("name", ["", "mbs0", "tokens", "mbs8+liger", "mbs8+awake+awake", "awake"])
def test_a_malformed_setting_is_rejected(name: str) -> None:
    with pytest.raises(SystemExit, match="expected mbsN or tokensN and, each at most once, awake, bf16, bypass"):
        VerlSetting.parse(name)


def test_every_part_of_a_setting_changes_its_override() -> None:
    swift = ("--sleep_level", "2", "--tuner_type", "lora")
    plain, changed = (overrides_of(name, *swift) for name in ("mbs8", "mbs8+" + "+".join(PARTS)))
    assert {name: (plain[name], changed[name]) for name in plain if plain[name] != changed[name]} == {
        f"{ROLLOUT}.free_cache_engine": ("True", "False"),
        f"{ACTOR}.fsdp_config.model_dtype": ("fp32", "bf16"),
        "algorithm.rollout_correction.bypass_mode": ("False", "True"),
        f"{MODEL}.enable_gradient_checkpointing": ("False", "True"),
        f"{MODEL}.lora.merge": ("False", "True"),
    }


def test_only_adapters_are_merged() -> None:
    with pytest.raises(SystemExit, match="have --tuner_type lora; remove"):
        overrides_of("mbs8+merged")


def test_verl_receives_the_lengths_the_groups_and_the_adapter() -> None:
    lora = overrides_of("mbs8", "--tuner_type", "lora", "--lora_rank", "16", "--lora_alpha", "32")
    assert (lora["data.max_response_length"], lora[f"{ROLLOUT}.ignore_eos"]) == ("512", "True")
    assert (lora["data.train_batch_size"], lora[f"{ACTOR}.ppo_mini_batch_size"], lora[f"{ROLLOUT}.n"]) == (
        "16",
        "16",
        "8",
    )
    assert (lora[f"{MODEL}.lora_rank"], lora[f"{MODEL}.lora_alpha"]) == ("16", "32")
    assert lora[f"{MODEL}.target_modules"] == "all-linear" and overrides_of("mbs8")[f"{MODEL}.lora_rank"] == "0"


def test_verl_needs_constant_lengths_and_no_memory_cap() -> None:
    base = ["step", "--json", "x.json", "--verl", "mbs8", "--prompts", "constant:48"]
    with pytest.raises(SystemExit, match="--verl needs --lengths and --prompts of the form constant:TOKENS"):
        bench.check_for_peers(bench.parse([*base, "--lengths", "lognormal:64:0.9:256"]))
    with pytest.raises(SystemExit, match="--memory-cap-gb does not reach the processes of --verl"):
        bench.check_for_peers(bench.parse([*base, "--lengths", "constant:64", "--memory-cap-gb", "100"]))
    args = bench.parse([*base, "--lengths", "constant:64"])
    bench.check_for_peers(args)
    (setting,), ranks = bench.settings_of(args)
    assert (setting.arm, ranks) == ("verl", 1) and "data.max_response_length=64" in setting.flags


def test_prompts_have_the_given_lengths_with_the_models_chat_template(tmp_path: Path) -> None:
    tokenizer = fill_vocabulary(make_tokenizer(), vocabulary=1000)
    write_dataset(tmp_path / "rows.jsonl", [60, 90], count_template_tokens(tokenizer, "qwen3"))
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    contents = [json.loads(line)["messages"][0]["content"] for line in lines]
    write_rows(tmp_path / "rows.parquet", contents, [60, 90], tokenizer)
    rows = list(Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path)))
    encoded = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True) for row in rows
    ]
    assert [len(prompt["input_ids"]) for prompt in encoded] == [60, 90]
    assert [row_of(row["prompt"][0]["content"]) for row in rows] == [0, 1]
    with pytest.raises(ValueError, match="more than 5"):
        write_rows(tmp_path / "rows.parquet", contents, [5, 90], tokenizer)


def test_steps_have_verls_times_and_the_rest_is_other() -> None:
    logged = {
        "timing_s/step": 5.0, "timing_s/gen": 2.0, "timing_s/reward": 0.25, "timing_s/adv": 0.25,
        "timing_s/update_actor": 1.5, "timing_s/update_weights": 0.5, "actor/loss": 0.0, "actor/grad_norm": 1.5,
        "actor/perf/max_memory_allocated_gb": 40.0, "actor/perf/max_memory_reserved_gb": 50.0,
        "prompt_length/mean": 48.0, "response_length/mean": 512.0,
    }  # fmt: skip
    result = result_of([logged, {**logged, "timing_s/step": 4.75}], completions=128)
    assert (result["tokens"], result["completion_tokens"]) == (128 * 560, 128 * 512)
    (step,) = merge_ranks([result], warm_up=1)
    assert step.seconds == 4.75 and step.grad_norm == 1.5
    assert step.phases == {"generation": 2.0, "weight_sync": 0.5, "grading": 0.5, "logprobs": 0.0,
                           "forward_backward": 1.5, "other": 0.25}  # fmt: skip
    assert step.train_peak_gb == pytest.approx(40 * 1.0737, rel=1e-3) and step.reserved_gb > 50


def test_the_reward_is_the_one_of_the_other_trainers() -> None:
    assert compute_score("benchmark", "some text", "") == reward_of("some text")
