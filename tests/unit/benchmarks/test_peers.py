"""Other projects' trainers in the benchmark: their settings and flags, and their rows on docs/performance.md."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from trl import GRPOConfig, ModelConfig, TrlParser

from benchmarks import bench
from benchmarks.harness import other_pages, results_pages
from benchmarks.harness.chart import draw
from benchmarks.harness.processes import Setting, interleave, switch_of
from benchmarks.harness.results import Process, Run, Step
from benchmarks.harness.workload import places, reward_of
from benchmarks.peers.settings import SwiftFlags
from benchmarks.peers.trl_settings import PARTS, TrlSetting, trl_flags
from benchmarks.peers.verl_settings import VerlSetting
from swift_megatron_grpo.arguments.derived import AddedFlags
from tests.paths import REPOSITORY

LORA = ["--tuner_type", "lora", "--lora_rank", "16", "--lora_alpha", "32", "--target_modules", "all-linear"]


def flags_of(setting: str, *swift: str, dtype: str = "bfloat16") -> tuple[str, ...]:
    return trl_flags(TrlSetting.parse(setting), 64, 8, SwiftFlags.parse(swift), dtype)


def parsed(flags: tuple[str, ...], folder: Path) -> tuple[GRPOConfig, ModelConfig]:
    """Read the flags as TRL does, without the one flag that only the arm has."""
    place = flags.index("--enforce_eager")
    arguments = [*flags[:place], *flags[place + 2 :], "--output_dir", str(folder), "--use_cpu", "true"]
    return TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config(arguments)  # type: ignore[no-any-return]


# ---- settings and flags of TRL


def test_a_setting_has_a_micro_batch_and_parts() -> None:
    assert TrlSetting.parse("mbs16+liger+awake") == TrlSetting(16, frozenset({"liger", "awake"}))
    assert TrlSetting.parse("mbs4") == TrlSetting(4, frozenset())


@pytest.mark.parametrize(
    "name", ["", "mbs0", "mbs", "tokens16384", "mbs8+flash", "mbs8+liger+liger", "liger", "tp2+mbs8"]
)
def test_a_malformed_setting_is_rejected(name: str) -> None:
    with pytest.raises(SystemExit, match=r"expected mbsN and, each at most once, awake, fp32, liger, recompute"):
        TrlSetting.parse(name)


def test_trl_reads_one_optimizer_step_per_rollout_and_the_same_loss(tmp_path: Path) -> None:
    config, model = parsed(flags_of("mbs16", "--vllm_gpu_memory_utilization", "0.4", "--sleep_level", "2"), tmp_path)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.generation_batch_size == 64 and config.num_generations == 8 and config.num_iterations == 1
    assert (config.beta, config.loss_type, config.temperature, config.epsilon) == (0.0, "grpo", 1.0, 0.2)
    assert (config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (0.9, 0.95, 1e-8)
    assert (config.weight_decay, config.max_grad_norm, config.learning_rate) == (0.1, 1.0, 1e-6)
    assert config.use_vllm and config.vllm_mode == "colocate" and config.vllm_gpu_memory_utilization == 0.4
    assert config.vllm_enable_sleep_mode and not config.gradient_checkpointing and not config.use_liger_kernel
    assert not config.vllm_importance_sampling_correction and not config.shuffle_dataset
    assert model.dtype == "bfloat16" and not config.bf16 and not model.use_peft


def test_every_part_of_a_setting_changes_its_flag(tmp_path: Path) -> None:
    swift = ("--sleep_level", "1")
    plain, _ = parsed(flags_of("mbs8", *swift), tmp_path)
    changed, model = parsed(flags_of("mbs8+" + "+".join(PARTS), *swift), tmp_path)
    assert plain.vllm_enable_sleep_mode and not changed.vllm_enable_sleep_mode
    assert changed.gradient_checkpointing and changed.use_liger_kernel
    assert model.dtype == "float32" and changed.bf16  # weights in fp32, products in bf16


def test_lora_has_the_same_rank_and_modules_and_computes_in_bf16(tmp_path: Path) -> None:
    config, model = parsed(flags_of("mbs8", *LORA), tmp_path)
    assert model.use_peft and (model.lora_r, model.lora_alpha) == (16, 32)
    assert model.lora_dropout == AddedFlags.lora_dropout == 0
    assert model.lora_target_modules == "all-linear"
    assert config.bf16 and model.dtype == "bfloat16"
    in_fp32, _ = parsed(flags_of("mbs8", *LORA, dtype="float32"), tmp_path)
    assert not in_fp32.bf16


def test_a_flag_without_a_counterpart_in_trl_is_rejected() -> None:
    with pytest.raises(SystemExit, match="--offload_model"):
        SwiftFlags.parse(["--sleep_level", "1", "--offload_model", "true"])
    with pytest.raises(SystemExit, match="mbs24: 64 completions of a step are not divisible by it"):
        flags_of("mbs24")


def test_the_benchmark_translates_the_flags_of_all_arms_and_those_of_trl() -> None:
    args = bench.parse(["step", "--json", "x.json", "--ours", "tokens64", "--trl", "mbs8", "mbs16+awake",
                        "--flags", "--sleep_level 2 " + " ".join(LORA),
                        "--trl-flags", "--vllm_gpu_memory_utilization 0.2"])  # fmt: skip
    settings, ranks = bench.settings_of(args)
    assert ranks == 1 and [setting.arm for setting in settings] == ["ours", "trl", "trl"]
    flags = [dict(zip(setting.flags[::2], setting.flags[1::2], strict=True)) for setting in settings[1:]]
    assert [one["--vllm_enable_sleep_mode"] for one in flags] == ["true", "false"]
    assert {one["--vllm_gpu_memory_utilization"] for one in flags} == {"0.2"}
    assert {one["--lora_r"] for one in flags} == {"16"}


@pytest.mark.parametrize(
    "arguments", [["--servers", "http://a", "http://b", "--lengths", "constant:8"], ["--shape", "2b-qwen3.5"]]
)
def test_a_workload_that_trl_cannot_run_is_rejected(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="--trl"):
        bench.check_for_peers(bench.parse(["step", "--json", "x.json", "--trl", "mbs8", *arguments]))


def test_the_train_phase_has_no_trl_arm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["train", "--json", "x.json", "--trl", "mbs8"])
    assert "--trl" in capsys.readouterr().err


def test_the_settings_of_the_h200_script_are_valid_for_their_workload() -> None:
    script = (REPOSITORY / "benchmarks" / "bench_h200.sh").read_text().replace("\\\n", " ")
    in_groups = re.findall(r"--(trl|verl) ([a-z\d+ ]+?) (?:--|;;)", script)
    of_cards = re.findall(r"(trl|verl)_\db=\((.+?)\)", script)
    searches = [(trainer, settings.split()) for trainer, settings in in_groups + of_cards]
    assert Counter(trainer for trainer, _ in searches) == {"trl": 5, "verl": 3}
    for trainer, settings in searches:
        assert len(settings) >= 2, "the best setting of several counts"
        for name in settings:
            flags_of(name) if trainer == "trl" else VerlSetting.parse(name)


# ---- the same work for all trainers


def test_rows_of_a_group_get_their_places_and_texts_their_rewards() -> None:
    assert list(places([1, 1, 0, 1, 0])) == [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1)]
    assert reward_of("a") == reward_of("a") != reward_of("b") and 0 <= reward_of("a") < 1


def test_only_megatron_processes_load_this_package() -> None:
    modes = {(arm, gpu): switch_of(arm, gpu) for arm in ("ours", "stock", "trl") for gpu in (True, False)}
    assert modes == {
        ("ours", True): "on", ("ours", False): "on", ("stock", True): "off", ("stock", False): "platform",
        ("trl", True): "off", ("trl", False): "off",
    }  # fmt: skip


# ---- rows of the page


def run_with_trl() -> Run:
    def process(arm: str, setting: str, seconds: float, status: str = "ok") -> Process:
        step = Step(seconds=seconds, phases={"generation": 1.0, "forward_backward": seconds - 1}, compute=[seconds - 1],
                    peak_gb={"generation": 80.0, "forward_backward": 50.0}, reserved_gb=95.0, loss=0.0,
                    grad_norm=1.5)  # fmt: skip
        return Process(arm, setting, status, [step] * 2 if status == "ok" else [], [])

    return Run(
        name="some", kind="step", device="NVIDIA H200", ranks=1, versions={"torch": "2", "trl": "0.29.1"},
        workload={"shape": "tiny", "completions": 8, "generations": 4, "lengths": "constant:8",
                  "prompt_lengths": "constant:4", "seed": 0},
        prompt_tokens=300, completion_tokens=500, flops=989e12, memory_cap_gb=None, pairs=[], goal="2.3, over TRL 2.2",
        flags=["--y"], warm_up=1,
        processes=[process("ours", "tokens1", 4.0), process("stock", "mbs4", 8.0), process("trl", "mbs8", 7.0),
                   process("trl", "mbs16+awake", 6.0), process("trl", "mbs32", 0.0, "out of memory")],
    )  # fmt: skip


def test_the_best_setting_of_a_peer_is_compared() -> None:
    pairs = [(pair.what, pair.other.arm, pair.other.setting, pair.ratio) for pair in run_with_trl().comparisons()]
    assert pairs == [("each at its best", "stock", "mbs4", 2.0), ("with a peer", "trl", "mbs16+awake", 1.5)]
    assert ("trl", "mbs16+awake") in run_with_trl().compared_settings()  # later rounds repeat it
    without = replace(run_with_trl(), processes=[one for one in run_with_trl().processes if one.arm != "ours"])
    assert without.comparisons() == []


def test_the_page_has_a_section_for_a_peer_with_its_ratio_and_search() -> None:
    text = "\n".join(results_pages.pages([run_with_trl()]).values())
    section = text.split("## Step: TRL, each at its best setting\n")[1].split("\n## ")[0]
    assert "The authors of this package ran TRL's `GRPOTrainer`" in section
    assert "some: mbs8, mbs16+awake, mbs32." in section
    assert "| run | ratio | this package | seconds | TRL | seconds  | train phase | its ratio | goal |" in section
    assert (
        "| some | **1.50** | tokens1 | 4.000 (4.000-4.000) | mbs16+awake | 6.000 (6.000-6.000) | 3.00 / 5.00 | 1.67 | "
        "2.3, over TRL" in section
    )
    assert "| some | TRL | mbs32 | out of memory | 0 | - |" in text
    assert "with TRL: 1.50 times as fast" in draw([run_with_trl()])


def test_a_run_without_peers_has_no_section_for_them() -> None:
    run = run_with_trl()
    texts = results_pages.pages([replace(run, processes=run.processes[:2])])
    text = "\n".join(text for path, text in texts.items() if path != results_pages.INDEX)
    assert "TRL" not in text.replace(run.goal, "").replace(run.versions["trl"], "").replace(", trl ", "")


def test_the_readme_compares_with_ms_swift_and_with_peers_in_two_tables() -> None:
    runs = [replace(run_with_trl(), name=name) for name in other_pages.HEADLINES]
    assert other_pages.headlines(runs).count("| **2.00** | 8.00 s | 4.00 s |") == len(other_pages.HEADLINES)
    sentence = "On the same work, a whole step is 1.50 to 1.50 times as fast as in TRL.\n"
    assert other_pages.peers_in_words(runs) == sentence
    on_h100 = replace(run_with_trl(), device="NVIDIA H100 80GB HBM3")
    longer = replace(on_h100, workload=on_h100.workload | {"completions": 16})
    table = other_pages.beside_peers([run_with_trl(), on_h100, longer])
    assert table.count("| Qwen3 TINY | **1.50** | TRL | 6.00 s | 4.00 s | 8 x 8 | 4 | H200 |") == 1
    assert table.count("| H100 |") == table.count("| 16 x 8 | 4 | H100 |") == 1 and "stock" not in table


def test_trainers_alternate_whatever_their_number() -> None:
    names = (("ours", "a"), ("stock", "b"), ("stock", "c"), ("trl", "d"), ("trl", "e"), ("trl", "f"))
    ordered = interleave([Setting(arm, name, ()) for arm, name in names])
    assert [setting.name for setting in ordered] == ["a", "b", "d", "c", "e", "f"]
