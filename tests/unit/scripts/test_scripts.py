"""Scripts that make a model and a dataset, the reward of the quickstart, and the verdict on a run."""

from __future__ import annotations

import filecmp
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.forking.client import run_script
from tests.paths import REPOSITORY
from tests.support.runs import values_of


def script(name: str, *arguments: object, ok: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "scripts" / name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not ok or result.returncode == 0, result.stderr
    return result


# ---- make_tiny_model.py


def make_tiny_model(*arguments: object) -> None:
    run_script(REPOSITORY / "scripts" / "make_tiny_model.py", *arguments)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "dense"
    make_tiny_model("--out", folder)
    return folder


def test_the_tokenizer_covers_every_byte_and_formats_chatml(dense: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(dense)
    text = "hello, Wörld \x00\n\t 漢字 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) == len(text.encode())
    assert len(tokenizer) == 259
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("<|im_start|>").input_ids == [tokenizer.convert_tokens_to_ids("<|im_start|>")]


def test_the_model_is_a_random_qwen3_in_bf16(dense: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense)
    config, tokenizer = model.config, AutoTokenizer.from_pretrained(dense)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (4, 64, 2)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert config.vocab_size >= len(tokenizer) and config.vocab_size % 8 == 0
    assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_the_seed_determines_the_weights(dense: Path, tmp_path: Path) -> None:
    make_tiny_model("--out", tmp_path / "same", "--seed", 0)
    make_tiny_model("--out", tmp_path / "other", "--seed", 1)
    weights = "model.safetensors"
    assert filecmp.cmp(dense / weights, tmp_path / "same" / weights, shallow=False)
    assert not filecmp.cmp(dense / weights, tmp_path / "other" / weights, shallow=False)


def test_kind_moe_and_shape_flags_set_the_config(tmp_path: Path) -> None:
    shape = ["--layers", 2, "--hidden", 32, "--heads", 2, "--kv-heads", 1, "--experts", 8, "--tie"]
    make_tiny_model("--out", tmp_path / "moe", "--kind", "moe", *shape)
    config = AutoConfig.from_pretrained(tmp_path / "moe")
    assert config.model_type == "qwen3_moe"
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 32, 2)
    assert (config.num_key_value_heads, config.num_experts, config.tie_word_embeddings) == (1, 8, True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "moe")(torch.arange(8)[None]).logits.isfinite().all()


# ---- make_dataset.py and the reward


def test_the_seed_determines_the_dataset(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        script("make_dataset.py", "--out", tmp_path / "new" / name, "--rows", 20, "--seed", seed)
    a, b, c = ((tmp_path / "new" / name).read_text() for name in "abc")
    assert a == b != c
    rows = [json.loads(line) for line in a.splitlines()]
    assert len(rows) == 20
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user"]
        assert row["letters"] == "abcdefghijklmnopqrstuvwxyz"
    assert len({row["messages"][0]["content"] for row in rows}) == 20
    assert len({len(row["messages"][0]["content"]) for row in rows}) > 5


def test_the_reward_is_the_share_of_given_letters() -> None:
    from swift.rewards import orms
    from swift.utils import import_external_file

    path = list(sys.path)
    import_external_file(str(REPOSITORY / "templates" / "plugins" / "letters.py"))
    sys.path[:] = path
    reward = orms["letters"]()
    completions = ["abc", "aB1 ", "", "\ufffd\ufffdx", "ABC"]
    columns: dict[str, Any] = {"letters": ["abcx"] * 5, "messages": [[]] * 5}
    assert reward(completions, **columns) == pytest.approx([1, 1 / 4, 0, 1 / 3, 0])


# ---- summarize_run.py


def make_run(folder: Path, rewards: list[float], earlier: list[float] | None = None) -> Path:
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"global_world_size": 2, "lr": 1.0}))
    lines: list[dict[str, Any]] = []
    for run in ([] if earlier is None else [earlier]) + [rewards]:
        for number, reward in enumerate(run, start=1):
            lines.append({"loss": 0.0, "reward": reward, "iteration": f"{number}/{len(run)}"})
            lines.append({"eval_reward": 9.0, "iteration": f"{number}/{len(run)}"})
        lines.append({"last_model_checkpoint": None})
    (folder / "logging.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def summarize(folder: Path, *arguments: object) -> tuple[int, str, str]:
    result = script("summarize_run.py", folder, *arguments, ok=False)
    return result.returncode, result.stdout, result.stderr


def test_a_run_whose_reward_doubled_passes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1] * 5 + [0.9] * 3 + [0.25] * 5)
    assert summarize(run) == (0, f"quickstart: reward 0.100 -> 0.250 over 13 steps on 2 ranks, run in {run}\n", "")


@pytest.mark.parametrize(
    ("rewards", "line", "reason"),
    [
        (
            [0.1] * 5 + [0.19] * 5,
            "quickstart: reward 0.100 -> 0.190 over 10 steps",
            "did not reach 2 times its initial",
        ),
        ([0.0] * 5 + [0.5] * 5, "quickstart: reward 0.000 -> 0.500 over 10 steps", "did not reach 2 times its initial"),
        ([-0.5] * 5 + [0.5] * 5, "quickstart: reward -0.500 -> 0.500 over 10 steps", "did not reach 2 times"),
        ([0.1] * 4 + [0.9] * 5, "", "9 steps are logged"),
        ([0.1] * 7 + [float("nan")] + [0.9] * 5, "", "the reward of step 8 is not finite"),
        ([0.1] * 5 + [0.9] * 4 + [float("inf")], "", "the reward of step 10 is not finite"),
        ([], "", "0 steps are logged"),
    ],
)
def test_a_run_without_enough_gain_fails(tmp_path: Path, rewards: list[float], line: str, reason: str) -> None:
    code, stdout, stderr = summarize(make_run(tmp_path / "run", rewards))
    assert code == 1
    assert stdout.startswith(line) and len(stdout.splitlines()) == bool(line)
    assert reason in stderr


def test_min_gain_sets_the_required_ratio(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1] * 5 + [0.16] * 5)
    assert [summarize(run, "--min-gain", gain)[0] for gain in (1.5, 2)] == [0, 1]


def test_only_the_last_run_of_a_folder_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1] * 5 + [0.4] * 5, earlier=[0.9] * 20)
    assert summarize(run)[1].startswith("quickstart: reward 0.100 -> 0.400 over 10 steps")


def test_a_folder_without_a_run_fails_with_the_missing_file(tmp_path: Path) -> None:
    code, stdout, stderr = summarize(tmp_path)
    assert (code, stdout) == (1, "")
    assert "no result in" in stderr and "logging.jsonl" in stderr


def make_learning_run(folder: Path, before: float, after: float) -> Path:
    run = make_run(folder, [0.1] * 10)
    with (run / "logging.jsonl").open("a") as log:
        for step, accuracy in ((0, before), (10, after)):
            log.write(json.dumps({"eval_pass@1": accuracy, "iteration": f"{step}/10"}) + "\n")
    rows = [
        {
            "rollout": rollout,
            "prompt": "<|im_start|>user\n1 + 2<|im_end|>\n",
            "completion": text,
            "total_reward": reward,
        }
        for rollout, text, reward in ((0, "It is 3.<|im_end|>", 0.125), (5, "left out", 0.0), (9, "3<|im_end|>", 1.0))
    ]
    (run / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_held_out_accuracy_must_rise_and_completions_are_printed(tmp_path: Path) -> None:
    run = make_learning_run(tmp_path / "run", 0.05, 0.25)
    printed = f"""quickstart: completions of the first step, with their rewards
  0.12  '1 + 2' -> 'It is 3.'
quickstart: completions of the last step, with their rewards
  1.00  '1 + 2' -> '3'
quickstart: held-out accuracy 0.050 -> 0.250 over 10 steps on 2 ranks, run in {run}
"""
    assert summarize(run, "--held-out", 0.2) == (0, printed, "")
    missed = "quickstart: the held-out accuracy did not rise by 0.3\n"
    assert summarize(run, "--held-out", 0.3) == (1, printed, missed)


def test_a_run_without_evaluations_has_no_held_out_accuracy(tmp_path: Path) -> None:
    code, stdout, stderr = summarize(make_run(tmp_path / "run", [0.1] * 10), "--held-out", 0.1)
    assert (code, stdout) == (1, "")
    assert "accuracy is logged for steps [], but a comparison needs 0 and a later one" in stderr


# ---- the task of quickstart.sh --real


def test_a_noun_is_trained_or_held_out_and_its_plural_alone_is_right(tmp_path: Path) -> None:
    from swift.rewards import orms
    from swift.utils import import_external_file

    plugin, path = REPOSITORY / "templates" / "plugins" / "plurals.py", list(sys.path)
    subprocess.run([sys.executable, str(plugin), str(tmp_path)], check=True)
    import_external_file(str(plugin))
    sys.path[:] = path
    parts = [(tmp_path / name).read_text().splitlines() for name in ("train.jsonl", "held_out.jsonl")]
    plurals = [json.loads(line)["solution"] for part in parts for line in part]
    assert [len(part) for part in parts] == [72, 36] and len(set(plurals)) == len(plurals)
    completions = ["cats", " Cats\n", "cat", "The plural is cats", "cats.", "7", ""]
    rewards = orms["plural"]()(completions, solution=["cats"] * len(completions), messages=[])
    assert rewards == [1, 1, 0.5, 0, 0, 0, 0]


def test_the_judge_of_the_template_asks_and_reads_the_last_grade() -> None:
    from swift.rewards import rm_plugins
    from swift.utils import import_external_file

    import_external_file(str(REPOSITORY / "templates" / "plugins" / "helpful_judge.py"))
    judge = rm_plugins.pop("helpful")()
    row = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    assert judge.request(row)["messages"][0]["content"].endswith("user: 1 + 1?\n\nassistant: 2")
    texts = ("Grade: 3 at first.\nGrade: 10", "Grade: 0", "Grade: 7.", "Grade: 11", "good")
    assert [judge.score(text) for text in texts] == [1.0, 0.0, 0.7, None, None]


# ---- the shell scripts


@pytest.mark.parametrize(
    "path",
    [
        "scripts/setup_venv.sh",
        "scripts/quickstart.sh",
        "scripts/train_real.sh",
        "scripts/test.sh",
        "templates/cpu_quickstart.sh",
        ".ci/run",
        "benchmarks/bench_h200.sh",
        "benchmarks/bench_lanes.sh",
        "templates/dense_server.sh",
        "templates/async_server.sh",
        "templates/opd.sh",
        "templates/judge.sh",
        "templates/qwen3_5_lora.sh",
        "templates/vl_lora.sh",
        "templates/video_lora.sh",
        "templates/omni_lora.sh",
        "templates/vl_server.sh",
        "templates/moe_server.sh",
        "templates/moe_full.sh",
        "templates/qwen3_5_moe_server.sh",
        "templates/recipe.sh",
        "benchmarks/recipes_chain.sh",
        "benchmarks/waits_chain.sh",
        "benchmarks/drafts_chain.sh",
        "benchmarks/two_stacks_chain.sh",
    ],
)
def test_shell_scripts_are_executable_strict_and_parse(path: str) -> None:
    file = REPOSITORY / path
    assert os.stat(file).st_mode & stat.S_IXUSR
    lines = file.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines
    subprocess.run(["bash", "-n", str(file)], check=True)


def test_the_async_template_adds_flags_to_the_server_template(tmp_path: Path) -> None:
    """A fake `megatron`, first on the path, prints its arguments."""
    fake = tmp_path / "megatron"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DATASET": "d"}
    server, async_server = (
        subprocess.check_output([REPOSITORY / "templates" / name, "train", "--lr", "1"], env=environ, text=True).split()
        for name in ("dense_server.sh", "async_server.sh")
    )
    assert server[-2:] == async_server[-2:] == ["--lr", "1"]
    assert async_server[: len(server) - 2] == server[:-2]
    flags = [argument for argument in async_server[:-2] if argument.startswith("--")]
    assert "--async_generate" in flags and len(flags) == len(set(flags))


def started(folder: Path, template: str, *arguments: str, **environ: str) -> list[str]:
    """Run a template with `swift` and `megatron` replaced; return number of ranks, name and arguments of each start."""
    for name in ("swift", "megatron"):
        (folder / name).write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$NPROC_PER_NODE" "${0##*/}" "$@"\n')
        (folder / name).chmod(0o755)
    given = {name: value for name, value in os.environ.items() if name != "NPROC_PER_NODE"}
    given |= {"PATH": f"{folder}:{os.environ['PATH']}", "DATASET": "d", "NPROC_PER_NODE": "", **environ}
    return subprocess.check_output([REPOSITORY / "templates" / template, *arguments], env=given, text=True).splitlines()


def test_the_judge_template_names_a_server_and_a_plugin(tmp_path: Path) -> None:
    _, _, _, *arguments = started(tmp_path, "judge.sh", JUDGE="http://h:1")
    from swift_megatron_grpo.settings.reward_models import RewardModels
    from tests.unit.settings.flags import faults, of

    named = values_of(arguments)
    typed = {name: [str(named[name])] for name in ("reward_model", "reward_model_plugin")}
    [model] = of(RewardModels, **typed).all
    assert faults(RewardModels, **typed) == "" and (model.address, model.name, model.is_judge) == (
        "http://h:1/v1/chat/completions", "helpful", True,
    )  # fmt: skip
    assert named["bad_reward"] == "drop"


SERVER_TEMPLATES = ["dense_server.sh", "vl_server.sh", "async_server.sh", "moe_server.sh", "qwen3_5_moe_server.sh"]


@pytest.mark.parametrize("template", [*SERVER_TEMPLATES, "multi_turn.sh server"])
def test_a_check_starts_no_server(template: str, tmp_path: Path) -> None:
    lines = started(tmp_path, *template.split(), "--check", "true")
    assert lines[1:3] == ["megatron", "rlhf"] and lines[-2:] == ["--check", "true"] and "swift" not in lines


@pytest.mark.parametrize("template", [*SERVER_TEMPLATES, "multi_turn.sh"])
def test_serve_passes_its_flags_to_the_server_alone(template: str, tmp_path: Path) -> None:
    lines = started(tmp_path, template, "serve", "--vllm_gpu_memory_utilization", "0.5")
    assert lines[1:3] == ["swift", "rollout"] and lines[-2:] == ["--vllm_gpu_memory_utilization", "0.5"]
    assert not any(flag in lines for flag in ("--async_generate", "--tuner_type", "--rlhf_type"))


@pytest.mark.parametrize("template", [*SERVER_TEMPLATES, "multi_turn.sh"])
def test_as_many_ranks_train_as_gpus_are_named(template: str, tmp_path: Path) -> None:
    assert started(tmp_path, template, "train", TRAIN_GPUS="1,2,3,4")[:2] == ["4", "megatron"]


def test_a_template_without_data_names_the_variable(tmp_path: Path) -> None:
    command = ["bash", str(REPOSITORY / "templates" / "dense_colocate_full.sh")]
    environ = {name: value for name, value in os.environ.items() if name != "DATASET"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ended.returncode != 0 and "DATASET: set a file or hub name" in ended.stderr


def test_the_template_of_qwen3_5_leaves_the_image_part_out_of_the_server(tmp_path: Path) -> None:
    server, trainer = (started(tmp_path, "qwen3_5_moe_server.sh", command) for command in ("serve", "train"))
    assert json.loads(server[server.index("--vllm_limit_mm_per_prompt") + 1]) == {"image": 0, "video": 0}
    assert server[server.index("--model") + 1] == trainer[trainer.index("--model") + 1] == "Qwen/Qwen3.5-35B-A3B"
    last = len(trainer) - 1 - trainer[::-1].index("--tuner_type")
    assert trainer[last + 1] == "lora"


def test_the_template_passes_every_flag_once_and_further_flags_last(tmp_path: Path) -> None:
    """A fake `megatron`, first on the path, prints the number of ranks and its arguments."""
    fake = tmp_path / "megatron"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$NPROC_PER_NODE" "$@"\n')
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m", "DATASET": "d", "OUTPUT": "o"}
    environ.pop("NPROC_PER_NODE", None)
    command = [str(REPOSITORY / "templates" / "cpu_quickstart.sh"), "--train_iters", "3"]
    ranks, *arguments = subprocess.check_output(command, env=environ, text=True, cwd=tmp_path).splitlines()
    assert (
        ranks == "2" and arguments[:3] == ["rlhf", "--rlhf_type", "grpo"] and arguments[-2:] == ["--train_iters", "3"]
    )
    flags = [argument for argument in arguments[:-2] if argument.startswith("--")]
    assert len(flags) == len(set(flags))
    plugin = Path(arguments[arguments.index("--external_plugins") + 1])
    assert plugin.is_absolute() and plugin.is_file()
