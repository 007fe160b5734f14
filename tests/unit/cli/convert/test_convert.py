"""Settings of verl, siiRL, slime, ROLL and TRL, as flags of this trainer; no key is lost."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.write_migration_tables import PAGE, with_tables
from swift_megatron_grpo.cli.convert.command import TABLES, table_of
from swift_megatron_grpo.cli.convert.reading import read_settings
from swift_megatron_grpo.cli.convert.tables import COMPUTED, Computed, Conversion, Table, convert, text_of
from swift_megatron_grpo.cli.main import main

VERL = r"""
HF_MODEL_PATH=Qwen/Qwen3-30B-A3B
TP=${TP:-4}
python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_megatron_trainer.yaml'\
    algorithm.adv_estimator=grpo \
    data.train_files="['/data/a.parquet', '/data/b.parquet']" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.truncation='error' \
    actor_rollout_ref.model.path=$HF_MODEL_PATH \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$(nvidia-smi -L | wc -l) \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.flux_capacitor=121 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 $@
"""
SIIRL = r"""
export ALG=grpo
export MODEL_PATH=/models/Qwen3-8B
export SIZE=$(($NODES * 16))
TRAINING_CMD=(
    python3 -m siirl.client.main_dag
    algorithm.adv_estimator=\$ALG
    data.train_batch_size=\$SIZE
    actor_rollout_ref.model.path=\$MODEL_PATH
    actor_rollout_ref.actor.grad_clip=0.5
)
eval "${TRAINING_CMD[@]}" "$@"
"""
SLIME = r"""
CKPT_ARGS=(
   --hf-checkpoint /data/Qwen3-4B
   #--hf-checkpoint /data/Qwen3-4B-FP8
   --save /data/out
)
ROLLOUT_ARGS=(
   --prompt-data /data/math.jsonl
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 128
   --eval-prompt-data aime /data/aime.jsonl
)
PERF_ARGS=( --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216 )
ray start --head --num-gpus 8
ray job submit -- python3 train.py --actor-num-gpus-per-node 8 --colocate --use-kl-loss --kl-loss-coef 0.02 \
   --eps-clip-high 0.28 --warp-factor 9 \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]}
"""
ROLL = """
pretrain: Qwen/Qwen3-8B
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
use_kl_loss: true
kl_loss_coef: 0.01
advantage_clip: 10.0
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 32}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.99}
  strategy_args:
    strategy_name: vllm
    strategy_config: {gpu_memory_utilization: 0.8, max_model_len: "${response_length}"}
rewards:
  math: {worker_cls: some.Worker}
"""


def converted(tmp_path: Path, name: str, text: str) -> Conversion:
    path = tmp_path / name
    path.write_text(text)
    settings = read_settings(path)
    table = table_of(settings)
    assert table is not None
    return convert(settings, table)


def holds(flags: dict[str, tuple[str, ...]], **expected: Any) -> None:
    typed = {name: " ".join(flags.get(name, ())) for name in expected}
    assert typed == {name: text_of(value) for name, value in expected.items()}


def test_a_script_of_verl(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "run.sh", VERL)
    holds(conversion.flags, model="Qwen/Qwen3-30B-A3B", dataset="/data/a.parquet /data/b.parquet", num_generations=8,
          global_batch_size=1024, generation_batch_size=4096, micro_batch_size=4, epsilon=0.2, epsilon_high=0.28,
          tensor_model_parallel_size=4, sequence_parallel=True, ref_tensor_model_parallel_size=2, beta=0.01,
          kl_estimator="k3", loss_type="dapo", dual_clip=3.0, report_to="wandb", truncation_strategy="raise",
          recompute_granularity="full", max_length=1024, max_completion_length=512, weight_decay=0.01)  # fmt: skip
    assert conversion.environment == {"NPROC_PER_NODE": "8"}
    assert conversion.unknown == {"actor_rollout_ref.rollout.flux_capacitor": "121"}
    computed = f"actor_rollout_ref.actor.megatron.expert_model_parallel_size={COMPUTED}"
    assert conversion.by_hand[computed] == "set --expert_model_parallel_size"
    assert "actor_rollout_ref.model.use_remove_padding" in conversion.needless


@pytest.mark.parametrize("truncation", ["error", "left", "middle"])
def test_prompts_that_verl_filters_are_left_out_in_any_order_of_keys(tmp_path: Path, truncation: str) -> None:
    written = ["data.filter_overlong_prompts=True", f"data.truncation={truncation}", "actor_rollout_ref.rollout.n=8"]
    for words in (written, written[::-1]):
        conversion = converted(tmp_path, "run.sh", "python3 -m verl.trainer.main_ppo " + " ".join(words))
        holds(conversion.flags, truncation_strategy="delete")
        assert conversion.unknown == {}
    conversion = converted(tmp_path, "run.sh", f"python3 -m x {written[1]} {written[2]}")
    kept = {"error": "raise", "left": "left"}.get(truncation)
    assert conversion.flags.get("truncation_strategy") == (kept and (kept,))
    assert ("data.truncation" in conversion.unknown) is (kept is None)


def test_verls_default_for_prompts_that_are_too_long_is_written(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "run.sh", "python3 -m x actor_rollout_ref.rollout.n=8")
    assert conversion.flags["truncation_strategy"] == ("raise",)


def test_columns_of_verl_have_the_names_of_ms_swift(tmp_path: Path) -> None:
    text = "python3 -m x actor_rollout_ref.rollout.n=8 data.train_files='my rows.parquet' data.image_key=pictures"
    flags = converted(tmp_path, "run.sh", text).flags
    columns = {"prompt": "messages", "pictures": "images", "reward_model.ground_truth": "solution"}
    assert flags["dataset"] == ("my rows.parquet",) and json.loads(*flags["columns"]) == columns


def test_lora_targets_that_are_not_all_layers_are_listed(tmp_path: Path) -> None:
    text = "actor_train: {model_args: {lora_rank: 8, lora_target: 'o_proj,q_proj'}}"
    conversion = converted(tmp_path, "rlvr.yaml", text)
    holds(conversion.flags, tuner_type="lora", target_modules="all-linear")
    assert conversion.unknown["actor_train.model_args.lora_target"].startswith("o_proj,q_proj: all linear layers get")


def test_a_script_of_siirl_whose_command_is_an_array(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "run.sh", SIIRL)
    holds(conversion.flags, model="/models/Qwen3-8B", advantage_estimator="grpo", clip_grad=0.5)
    assert "global_batch_size" not in conversion.flags
    assert conversion.by_hand[f"data.train_batch_size={COMPUTED}"].startswith("set --num_generations")


def test_a_script_of_slime(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "run.sh", SLIME)
    holds(conversion.flags, model="/data/Qwen3-4B", dataset="/data/math.jsonl", val_dataset="/data/aime.jsonl",
          num_generations=8, global_batch_size=128, generation_batch_size=256, train_iters=6000, epsilon=0.2,
          epsilon_high=0.28, beta=0.02, max_tokens_per_micro_batch=9216, sequence_parallel=True, output_dir="/data/out",
          vllm_mode="colocate")  # fmt: skip
    assert conversion.unknown == {"--warp-factor": "9"}
    assert "--head" not in conversion.unknown  # of another command


def test_a_file_of_roll(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "rlvr.yaml", ROLL)
    holds(conversion.flags, model="Qwen/Qwen3-8B", lr=1e-6, num_generations=8, global_batch_size=2 * 32 * 4,
          generation_batch_size=512, micro_batch_size=2, beta=0.01, max_length=2048, max_completion_length=4096,
          temperature=0.99, vllm_gpu_memory_utilization=0.8, vllm_max_model_len=4096)  # fmt: skip
    assert conversion.unknown == {"advantage_clip": "10.0"}
    assert "rewards.math.worker_cls=some.Worker" in conversion.by_hand


def test_a_value_that_is_not_possible_here_is_listed_with_the_reason(tmp_path: Path) -> None:
    text = VERL.replace("adv_estimator=grpo", "adv_estimator=gae").replace("rollout.n=8", "rollout.n=many")
    unknown = converted(tmp_path, "run.sh", text).unknown
    assert unknown["algorithm.adv_estimator"] == "gae: it needs a critic, or is not known here"
    assert unknown["actor_rollout_ref.rollout.n"].startswith("many: ")


def test_the_printed_script_is_valid_and_lists_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL)
    assert (
        main(["convert", str(path), "actor_rollout_ref.rollout.temperature=0.6", "data.prompt_key=two words; `x`"]) == 0
    )
    script, summary = capsys.readouterr()
    columns = """--columns '{"two words; `x`": "messages", "reward_model.ground_truth": "solution"}'"""
    assert script.endswith(' "$@"\n') and columns in script and "--temperature 0.6" in script
    assert "#   actor_rollout_ref.rollout.flux_capacitor: 121" in script and "#   reward functions: name them" in script
    assert "1 without a counterpart" in summary
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


RAY = """
rlhf_type: grpo
model: Qwen/Qwen3.5-2B
seed: 1
lr: 5e-5
nnodes: 2
train: {gpus: 16, seed: 3, tuner_type: lora}
rollout: {gpus: 16, seed: 2, vllm_gpu_memory_utilization: 0.4, vllm_engine_kwargs: {max_logprobs: 64}}
teacher: {gpus: 4}
reward_funcs: [accuracy, format]
use_ray: true
beta:
"""


def test_the_roles_of_ms_swifts_ray_pipeline_become_one_command(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "ray.yaml", RAY + "colocate_groups: [[train, rollout, teacher]]")
    assert conversion.flags == {
        "model": ("Qwen/Qwen3.5-2B",), "lr": ("5e-5",), "reward_funcs": ("accuracy", "format"), "seed": ("3",),
        "tuner_type": ("lora",), "vllm_gpu_memory_utilization": ("0.4",), "vllm_mode": ("colocate",),
    }  # fmt: skip
    assert conversion.environment == {"NPROC_PER_NODE": "8", "NNODES": "2"} and not conversion.unknown
    assert set(conversion.by_hand) == {"teacher.gpus=4", "vllm_engine_kwargs.max_logprobs=64"}


def test_a_rollout_of_ray_on_gpus_of_its_own_needs_a_server(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "ray.yaml", RAY)
    assert conversion.flags["vllm_mode"] == ("server",)
    assert "swift rollout" in conversion.by_hand["rollout.gpus=16"]


def test_other_training_of_ms_swifts_ray_pipeline_has_no_counterpart(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "ray.yaml", RAY.replace("grpo", "gkd"))
    assert conversion.unknown == {"rlhf_type": "gkd: only GRPO is trained by this package"}


def test_a_file_of_another_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("learning_rate: 1")
    assert main(["convert", str(path)]) == 1
    assert (
        "none of the keys of verl, siiRL, ROLL, slime, TRL or ms-swift's Ray; name the trainer with --trainer"
        in capsys.readouterr().err
    )


def flags_of(table: Table) -> set[str]:
    named = {flag for rule in table.rules.values() if isinstance(rule, str) for flag in rule.split()}
    computed = {flag for rule in table.rules.values() if isinstance(rule, Computed) for flag in rule.flags}
    return named | computed | {flag for group in table.together for flag in group.flags}


@pytest.mark.parametrize("name", TABLES)
def test_all_flags_of_a_table_exist(name: str) -> None:
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

    flags = {flag for flag in flags_of(TABLES[name]) if not flag.isupper()}
    assert flags <= {field.name for field in fields(GRPOArguments)}
    assert {flag for flag in flags_of(TABLES[name]) if flag.isupper()} <= {"NPROC_PER_NODE", "NNODES", "USE_HF"}


@given(data=st.data())
@pytest.mark.parametrize("name", ["verl", "roll", "slime", "trl"])
def test_any_value_of_any_key_is_converted_or_listed(name: str, data: st.DataObject) -> None:
    table = TABLES[name]
    keys = [*table.rules, *(key for group in table.together for key in group.keys.values()), "no.such.key"]
    values = st.one_of(st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=4), st.lists(st.integers()))
    settings = data.draw(st.dictionaries(st.sampled_from(keys), values, max_size=8))
    conversion = convert(settings, table)
    assert set(conversion.flags) <= flags_of(table)
    assert ("no.such.key" in conversion.unknown) == ("no.such.key" in settings)


def test_the_page_has_the_tables() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run scripts/fix"


_VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=x actor_rollout_ref.rollout.n=8 "
_ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{_ACTOR}policy_loss.loss_mode=cispo {_ACTOR}clip_ratio_high=0.28", {"epsilon_high": 1.28}),
        (f"{_ACTOR}policy_loss.loss_mode=cispo", {"epsilon_high": 1.2}),
        (f"{_ACTOR}policy_loss.loss_mode=gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("algorithm.adv_estimator=rloo", {"advantage_estimator": "rloo", "scale_rewards": "none"}),
        ("algorithm.adv_estimator=reinforce_plus_plus", {"scale_rewards": "batch"}),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", {"scale_rewards": "batch"}),
        ("algorithm.norm_adv_by_std_in_grpo=False", {"scale_rewards": "none"}),
        (f"algorithm.use_kl_in_reward=True {_ACTOR}kl_loss_type=low_var_kl", {"kl_estimator": "k1"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl", {"kl_estimator": "k3"}),
        ("algorithm.filter_groups.max_num_gen_batches=10", {"max_resample_times": 9}),
    ],
)
def test_what_a_setting_of_verl_means_depends_on_others(tmp_path: Path, words: str, expected: dict[str, Any]) -> None:
    holds(converted(tmp_path, "run.sh", _VERL + words).flags, **expected)
