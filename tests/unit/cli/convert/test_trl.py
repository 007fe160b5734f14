"""Programs, YAML files and command lines of TRL; a program is read and never run."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.cli.convert.programs import settings_of_program
from swift_megatron_grpo.cli.convert.tables import COMPUTED
from swift_megatron_grpo.cli.convert.trl import TRL
from swift_megatron_grpo.cli.main import main
from tests.unit.cli.convert.test_convert import converted, holds

PROGRAM = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

open("{made}", "w").write("this ran")
MODEL = "Qwen/Qwen3-4B"
RATE = 1e-5
dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.map(lambda row: {{"prompt": row["question"]}})
shared = {{"epsilon_high": 0.28, "seed": 7}}

def brief(completions, **columns):
    return [-len(text) for text in completions]

training_args = GRPOConfig(
    "my runs",
    learning_rate=RATE, per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=8,
    max_prompt_length=512, max_completion_length=1024, use_vllm=True, bf16=True, max_steps=100, warmup_ratio=0.1,
    loss_type="dr_grpo", scale_rewards=False, report_to=["wandb"], run_name=f"x-{{RATE}}", warp_factor=9,
    model_init_kwargs={{"torch_dtype": torch.bfloat16}}, logging_steps=1, steps_per_generation=16, **shared,
)
training_args.temperature = 0.7
adapter = LoraConfig(r=16, lora_alpha=-1, target_modules=["q_proj"], task_type="CAUSAL_LM")
trainer = GRPOTrainer(MODEL, [accuracy_reward, brief], args=training_args, train_dataset=dataset["train"],
                      eval_dataset=None, peft_config=adapter)
trainer.train()
"""
YAML = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/DeepMath-103K
learning_rate: 1.0e-5
use_peft: true
per_device_train_batch_size: 8
num_processes: 4
use_vllm: true
reward_funcs: [accuracy_reward]
"""


def test_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    conversion = converted(tmp_path, "train.py", PROGRAM.format(made=made))
    holds(conversion.flags, model="Qwen/Qwen3-4B", dataset="openai/gsm8k:main", output_dir="my runs", lr=1e-5,
          num_generations=8, max_length=512, max_completion_length=1024, train_iters=100, lr_warmup_fraction=0.1,
          loss_type="dr_grpo", scale_rewards="none", epsilon_high=0.28, seed=7, temperature=0.7, beta=0.0,
          weight_decay=0.0, lr_decay_style="linear", torch_dtype="bfloat16", report_to="wandb", tuner_type="lora",
          lora_rank=16, lora_alpha=-1, target_modules="all-linear", rollout_importance_sampling_mode="sequence_mask",
          recompute_granularity="full")  # fmt: skip
    assert conversion.unknown.keys() == {"warp_factor", "LoraConfig.target_modules"}
    assert conversion.by_hand["per_device_train_batch_size=4"].endswith("as num_processes=8")
    assert conversion.by_hand["run_name=(computed by the script)"] == "set --wandb_exp_name"
    assert "GRPOTrainer.reward_funcs=accuracy_reward brief" in conversion.by_hand
    assert "GRPOTrainer.train_dataset.map=(lambda row: {'prompt': row['question']})" in conversion.by_hand
    assert main(["convert", str(tmp_path / "train.py"), "num_processes=8"]) == 0
    script = capsys.readouterr().out
    for line in ("export NPROC_PER_NODE=8", "export USE_HF=1", "--global_batch_size 256", "--micro_batch_size 4",
                 "--generation_batch_size 512", "--output_dir 'my runs'"):  # fmt: skip
        assert line in script
    assert not made.exists()


def test_yaml(tmp_path: Path) -> None:
    conversion = converted(tmp_path, "run.yaml", YAML)
    holds(conversion.flags, model="Qwen/Qwen3-0.6B", dataset="trl-lib/DeepMath-103K", lr=1e-5, micro_batch_size=8,
          global_batch_size=32, num_train_epochs=3, tuner_type="lora", lora_rank=16, lora_alpha=32, lora_dropout=0.05,
          max_completion_length=256, temperature=1.0)  # fmt: skip
    assert conversion.environment == {"NPROC_PER_NODE": "4", "USE_HF": "1"} and conversion.unknown == {}


@pytest.mark.parametrize(
    "command",
    ["accelerate launch --num_processes 8 examples/train_grpo.py", "trl grpo --num_processes 8", "python grpo.py"],
)
def test_a_command_line(tmp_path: Path, command: str) -> None:
    text = f"{command} --model_name_or_path m/n --dataset_name a/b --gradient_accumulation_steps 4 --warp 9 --use_vllm"
    conversion = converted(tmp_path, "run.sh", text)
    holds(conversion.flags, model="m/n", dataset="a/b")
    assert conversion.unknown == {"warp": "9"}
    assert conversion.flags.get("global_batch_size") == (None if command.startswith("python") else ("256",))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("GRPOConfig(beta=first(), seed=args.seed)", {"beta": COMPUTED, "seed": COMPUTED}),
        ("a = 1\nif x:\n    a = 2\nGRPOConfig(seed=a)\na = 3", {"seed": 2}),
        ("GRPOConfig(**kwargs)", {"**kwargs": COMPUTED}),
        ("a = a\nGRPOConfig(seed=a)", {"seed": COMPUTED}),
        ("a = 1\na += 1\nGRPOConfig(seed=a)", {"seed": COMPUTED}),
        ("a: int = 1\nf = lambda a: a\nGRPOConfig(seed=a)", {"seed": 1}),
        ("a = 1\ndef main(a=2):\n    GRPOConfig(seed=a)", {"seed": COMPUTED}),
        ("for a in range(3):\n    GRPOConfig(seed=a)", {"seed": COMPUTED}),
        ("GRPOTrainer(A.from_pretrained('m/n', dtype='a'), train_dataset=load_dataset('json', data_files='a.jsonl'))",
         {"GRPOTrainer.model": "m/n", "model_init_kwargs": {"dtype": "a"}, "GRPOTrainer.train_dataset": "a.jsonl"}),
        ("trl.GRPOTrainer(train_dataset=rows(), args=parser.parse()[1])",
         {"GRPOTrainer.train_dataset": COMPUTED, "GRPOTrainer.args": COMPUTED}),
        ("GRPOTrainer(eval_dataset=load_dataset('m/n', split='test').select(range(9)))",
         {"GRPOTrainer.eval_dataset": "m/n", "GRPOTrainer.eval_dataset.split": "test",
          "GRPOTrainer.eval_dataset.select": "(range(9))"}),
        ("print('GRPOConfig(beta=1)')", {}),
    ],
)  # fmt: skip
def test_values_are_those_that_the_text_has(program: str, expected: dict[str, Any]) -> None:
    assert dict(settings_of_program(program)) == expected


@pytest.mark.parametrize(
    "program",
    ["GRPOConfig(", "a = 1\n" + "a = [a, a]\n" * 60 + "GRPOConfig(seed=a)", "GRPOConfig(seed=" + "9" * 5000 + ")",
     "GRPOConfig(seed=0x" + "f" * 5000 + ")", "GRPOConfig(seed=" + "-" * 5000 + "1)",
     "GRPOConfig(seed=" + "-" * 200_000 + "1)", "\0"],
)  # fmt: skip
def test_a_program_that_cannot_be_read_is_refused_in_a_sentence(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(program)
    assert main(["convert", str(path), "--trainer", "trl"]) == 1
    assert capsys.readouterr().err.startswith(f"convert: {path}: ")


NO_COUNTERPART = {"chat_template_kwargs", "vllm_structured_outputs_regex", "log_completions_hub_repo"}


def test_every_field_of_grpo_config_has_a_rule() -> None:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / "trainer" / "grpo_config.py").read_text())
    [config] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig"]
    fields = {
        node.target.id for node in config.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    grouped = {key for group in TRL.together for key in group.keys.values()}
    assert len(fields) > 40
    assert {field for field in fields if TRL.rule(field) is None and field not in grouped} == NO_COUNTERPART
