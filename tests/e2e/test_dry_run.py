"""`--check true` reads what a run would read, in one process and without weights, and trains nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from tests.forking.client import run_code
from tests.support.runs import grpo_flags, make_model, megatron_command

pytestmark = pytest.mark.e2e
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 36,
}
SIZES = ["--vllm_max_model_len", "3072", "--max_length", "1024", "--max_completion_length", "2048",
         "--global_batch_size", "64", "--num_generations", "8", "--vllm_engine_kwargs", "{}"]  # fmt: skip
CHECK = """
import os, sys
os.environ |= {{"NPROC_PER_NODE": "{ranks}"}}
from swift_megatron_grpo.cli.check.command import check_flags
from swift_megatron_grpo.cli.command_line import Refused
try:
    print("EXIT", check_flags(sys.argv[1:]))
except Refused as refused:
    print("check:", refused)
    print("EXIT", 1)
"""


@pytest.fixture(scope="module")
def large(folder: Path, dense: Path) -> Path:
    """Return the folder of a model with the sizes of Qwen3-8B and without weights."""
    config = json.loads((dense / "config.json").read_text()) | QWEN3_8B
    target = folder / "8b"
    target.mkdir()
    for file in dense.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    (target / "config.json").write_text(json.dumps(config))
    return target


def check(arguments: Sequence[str], ranks: int) -> tuple[int, str]:
    """Run a check in a fork."""
    output = run_code("trainer", CHECK.format(ranks=ranks), *arguments, "--check", "true", "--check_gpu", "H100-80G")
    [code] = re.findall(r"^EXIT (\d)$", output, re.MULTILINE)
    return int(code), output


@pytest.mark.nightly
def test_the_command_prints_the_memory_of_a_run_that_does_not_fit(folder: Path, large: Path, dataset: Path) -> None:
    """The real command: the switch is seen before torchrun would start ranks."""
    flags = [*SIZES, "--max_tokens_per_micro_batch", "16384", "--check", "true", "--check_gpu", "H100-80G"]
    run = megatron_command(large, dataset, folder / "unused", 4, flags)
    assert run.code == 1, run.output[-4000:]
    assert "8.19 billion parameters" in run.output and "32 rows" in run.output
    assert "world 4" in run.output and "The run does not fit: " in run.output
    assert "--tuner_type lora" in run.output and "--tensor_model_parallel_size" in run.output
    assert not run.folder.exists() and "Loading: " not in run.output


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_check_needs_no_output_folder_and_makes_none(
    evaluates: bool, folder: Path, large: Path, dataset: Path
) -> None:
    """A run writes the rows that it splits off for evaluation to its output folder, before it trains."""
    unused = folder / "not made"
    arguments = grpo_flags(
        large, dataset, unused, [*SIZES, "--tuner_type", "lora", "--max_tokens_per_micro_batch", "4096"]
    )
    if evaluates:
        arguments += ["--split_dataset_ratio", "0.25", "--eval_iters", "1"]
    else:
        place = arguments.index("--output_dir")
        del arguments[place : place + 2]
    code, output = check(arguments, 4)
    assert code == 0 and "The run fits: " in output, output[-4000:]
    assert not unused.exists()


def test_a_proposed_setting_fits(folder: Path, large: Path, dataset: Path) -> None:
    arguments = grpo_flags(large, dataset, folder / "unused", [*SIZES, "--max_tokens_per_micro_batch", "16384"])
    code, output = check(arguments, 4)
    assert code == 1
    [line] = [line for line in output.splitlines() if line.strip().startswith("--") and "lora" in line]
    proposed = line.split("    (")[0].split()
    code, output = check([*arguments, *proposed], 4)
    assert code == 0 and "The run fits: " in output, output[-4000:]


def test_memory_is_for_micro_batches_of_answers_too(folder: Path, large: Path, dataset: Path) -> None:
    """Answers longer than a prompt with its completion are the largest micro batch; short ones change no memory."""
    chord = ["--chord_sft_per_device_train_batch_size", "1", "--chord_mu_warmup_steps", "0", "--chord_mu_peak", "0.9",
             "--chord_mu_decay_steps", "20", "--chord_mu_valley", "0.05"]  # fmt: skip
    sizes = ["--max_length", "1024", "--max_completion_length", "1024", "--vllm_max_model_len", "3072",
             "--global_batch_size", "64", "--num_generations", "8", "--micro_batch_size", "1",
             "--vllm_engine_kwargs", "{}"]  # fmt: skip

    def activations(words: int | None) -> tuple[float, str]:
        """Return the GB of activations of a step with answers of so many words; None: without answers."""
        flags = sizes
        if words is not None:
            answers = folder / f"answers of {words}.jsonl"
            turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "a " * words}]
            answers.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(4)))
            flags = [*sizes, "--chord_sft_dataset", str(answers), *chord]
        _, output = check(grpo_flags(large, dataset, folder / "unused", flags), 4)
        [row] = re.findall(r"^ +stage +weights .* activations .*\n +0 +(.*)$", output, re.MULTILINE)
        return float(row.split()[4]), output

    without, _ = activations(None)
    short, output = activations(10)
    assert short == without and "16 micro batches more; the largest has " in output
    long, output = activations(900)
    [largest] = re.findall(r"micro batches more; the largest has ([\d,]+) tokens", output)
    of_completions = int(re.findall(r"the largest has ([\d,]+) tokens", output)[0].replace(",", ""))
    assert long / without == pytest.approx(int(largest.replace(",", "")) / of_completions, rel=0.02)


def test_memory_has_one_copy_of_each_frozen_model(folder: Path, large: Path, dataset: Path) -> None:
    """The teacher has half the layers of the policy, and the copy of the reference may be the teacher."""
    teacher = folder / "half"
    shutil.copytree(large, teacher)
    layers = {"num_hidden_layers": 18, "layer_types": ["full_attention"] * 18}
    (teacher / "config.json").write_text(json.dumps(json.loads((large / "config.json").read_text()) | layers))

    def frozen(*flags: str) -> tuple[float, float]:
        """Return the GB of weights that are trained, and of frozen copies."""
        flags = (*SIZES, "--max_tokens_per_micro_batch", "4096", *flags)
        _, output = check(grpo_flags(large, dataset, folder / "unused", flags), 4)
        [row] = re.findall(r"^ +stage +weights +gradients +optimizer +reference .*\n +0 +(.*)$", output, re.MULTILINE)
        weights, _, _, copies, *_ = map(float, row.split())
        return weights, copies

    weights, none = frozen()
    kinds = ["--teacher_model_type", "qwen3"]
    _, of_half = frozen("--teacher_model", str(teacher), *kinds)
    assert none == 0 and 0.5 * weights < of_half < 0.65 * weights  # the embedding is whole
    reference = ["--beta", "0.1"]
    assert frozen(*reference) == frozen(*reference, "--teacher_model", str(large), *kinds) == (weights, weights)
    both = frozen(*reference, "--teacher_model", str(teacher), *kinds)
    assert both == (weights, pytest.approx(weights + of_half, abs=0.11))


def test_proposed_layers_of_the_last_stage_make_the_pipeline_faster(folder: Path, large: Path, dataset: Path) -> None:
    flags = [*SIZES, "--max_tokens_per_micro_batch", "4096", "--pipeline_model_parallel_size", "4",
             "--tuner_type", "lora", "--target_modules", "all-linear"]  # fmt: skip
    arguments = grpo_flags(large, dataset, folder / "unused", flags)
    code, output = check(arguments, 8)
    assert code == 0 and "waits for the stage with the output layer" in output
    [layers] = re.findall(r"with --decoder_last_pipeline_num_layers (\d+) the fullest", output)
    code, evener = check([*arguments, "--decoder_last_pipeline_num_layers", layers], 8)
    assert code == 0 and "output layer" not in evener
    before, after = (float(re.findall(r"train phase ([\d.]+) s", text)[0]) for text in (output, evener))
    assert after < before


def test_two_steps_on_a_rollout_generate_in_the_time_that_is_named(folder: Path, large: Path, dataset: Path) -> None:
    flags = [*SIZES, "--max_tokens_per_micro_batch", "4096", "--tuner_type", "lora"]
    arguments = grpo_flags(large, dataset, folder / "unused", flags)
    _, output = check(arguments, 4)
    named, now = (
        float(re.findall(text, output)[0])
        for text in (r"with --steps_per_generation 2, generation takes ([\d.]+) s", r"generation ([\d.]+) s per step")
    )
    assert now / 2 < named < 0.7 * now
    _, faster = check([*arguments, "--steps_per_generation", "2"], 4)
    assert f"generation {named:.3g} s per step" in faster and "with --steps_per_generation" not in faster
    _, full = check([*arguments, "--vllm_max_num_seqs", "2"], 4)
    assert "with --steps_per_generation" not in full  # as many completions follow one another in each slot


def test_prompts_have_the_tokens_of_their_images(folder: Path) -> None:
    """The larger of two images has 250 x 250 pixels, so 9 x 9 tokens of 28 x 28 pixels after rounding."""
    model, rows = make_model(folder / "qwen2_5_vl", "qwen2_5_vl"), folder / "images.jsonl"
    for name, size in (("small", (56, 56)), ("large", (250, 250))):
        Image.new("RGB", size).save(folder / f"{name}.png")
    lines = [
        {
            "messages": [{"role": "user", "content": "<image>What is it?"}],
            "images": [str(folder / f"{name}.png")],
            "letters": "e",
        }
        for name in ("small", "large") * 8
    ]
    rows.write_text("\n".join(map(json.dumps, lines)))
    arguments = grpo_flags(model, rows, folder / "unused", ["--max_length", "512", "--vllm_max_model_len", "1024"])

    def longest(*flags: str) -> int:
        code, output = check([*arguments, *flags], 1)
        assert code == 0, output[-4000:]
        [found] = re.findall(r"prompts of \d+ tokens at the median, (\d+) at most", output)
        return int(found)

    whole = longest()
    assert longest("--max_pixels", str(56 * 56)) == whole - 9 * 9 + 2 * 2
    # --max_length counts an image as one token, as ms-swift does.
    assert longest("--max_length", str(whole - 9 * 9 + 1)) == whole
    code, output = check([*arguments, "--max_length", "20"], 1)
    assert code == 1 and "16 of 16 prompts are longer than --max_length 20 (row" in output, output[-4000:]
    for part in ("--freeze_vit", "--freeze_aligner"):
        assert longest(part, "false") == whole


def test_problems_of_flags_rows_and_rewards_are_errors(folder: Path, dense: Path, dataset: Path) -> None:
    def problem(*flags: str, rows: Path = dataset) -> str:
        code, output = check(grpo_flags(dense, rows, folder / "unused", flags), 1)
        assert code == 1, output[-4000:]
        return output

    assert "--lrr is not a flag" in problem("--lrr", "1")
    assert "unknown name 'lettres' in --reward_funcs; did you mean letters?" in problem("--reward_funcs", "lettres")
    mixed = folder / "mixed.jsonl"
    mixed.write_text("\n".join([*dataset.read_text().splitlines()[:8], json.dumps({"query": "1+1"})]))
    assert "row 8 has query but no messages" in problem(rows=mixed)
    plugin = folder / "broken.py"
    plugin.write_text(
        "from swift.rewards import ORM, orms\n"
        "class Broken(ORM):\n"
        "    def __call__(self, completions, **kwargs):\n"
        "        return [1 / 0 for _ in completions]\n"
        "orms['broken'] = Broken\n"
    )
    assert "ZeroDivisionError" in problem("--external_plugins", str(plugin), "--reward_funcs", "broken")
    assert not (folder / "unused").exists()


def test_a_reward_model_of_the_ranks_is_counted_and_not_loaded(folder: Path, large: Path, dataset: Path) -> None:
    flags = [*SIZES, "--tuner_type", "lora", "--max_tokens_per_micro_batch", "2560", "--reward_model", str(large)]
    code, output = check(grpo_flags(large, dataset, folder / "unused", flags), 4)
    assert code == 0 and "reward      8b: not loaded in a check" in output, output[-4000:]
    [numbers] = re.findall(r"offloaded weight sync  generation       train\n +0 (.*)\n", output)
    assert numbers.split()[3] == "16.4"  # 8.19 billion parameters of two bytes, in the column of references
