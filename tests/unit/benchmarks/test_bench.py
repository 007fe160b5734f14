"""The benchmark's arithmetic, and the numbers of docs/performance.md and README.md against the files in benchmarks/."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench
from benchmarks.harness import other_pages, page, processes, results_pages
from benchmarks.harness.chart import draw
from benchmarks.harness.instrument.clock import Clock
from benchmarks.harness.instrument.vllm_pool import bytes_at
from benchmarks.harness.models import count_template_tokens, fill_vocabulary, make_model, random_weights
from benchmarks.harness.processes import Setting, interleave, tokens_of_early_ends, visible_devices
from benchmarks.harness.results import Process, Run, Step, merge_ranks
from benchmarks.harness.shapes import SHAPES, Shape
from benchmarks.harness.workload import (
    Lengths,
    Workload,
    flops_as_verl_counts,
    row_of,
    training_flops,
    write_dataset,
)
from scripts.make_tiny_model import make_tokenizer
from swift_megatron_grpo.training import passes
from tests.paths import REPOSITORY

# ---- workload


def test_lengths_follow_the_distribution_and_the_seed() -> None:
    drawn = Lengths("lognormal:700:0.9:4096").draw(20_000, random.Random(1))
    assert statistics.median(drawn) == pytest.approx(700, rel=0.03)
    assert max(drawn) == 4096 and min(drawn) >= 1
    assert sum(tokens > 700 * 2.4596 for tokens in drawn) / 20_000 == pytest.approx(0.159, abs=0.01)  # beyond one sigma
    one, same, other = (Workload("tiny", 16, 4, "lognormal:64:0.9:256", "constant:9", seed) for seed in (0, 0, 1))
    assert one.completion_tokens() == same.completion_tokens() != other.completion_tokens()
    assert [len(group) for group in one.completion_tokens()] == [4] * 4
    assert one.prompt_tokens(at_least=1) == [9] * 4 and one.prompt_tokens(at_least=20) == [20] * 4


@pytest.mark.parametrize(("log", "status"), [
    ("", "ok"), (passes._LOWERED % ("the train phase", "--max_tokens_per_micro_batch", 16384, 8192), "out of memory"),
])  # fmt: skip
def test_a_run_that_lowered_its_budget_is_not_measured_under_its_name(tmp_path: Path, log: str, status: str) -> None:
    (tmp_path / "log.txt").write_text(f"{log}\n")
    assert processes._wait(subprocess.Popen(["true"]), 10.0, tmp_path) == status


def test_the_reason_of_a_failure_has_no_log_lines_of_torch() -> None:
    log = "\n".join([
        "ValueError: prompts must be divisible by 16",
        "[rank0]:[W1125 10:53:35.6 ProcessGroupNCCL.cpp:1575] Warning: destroy_process_group() was not called",
        "E1125 10:53:36.1 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1) local_rank: 0",
    ])  # fmt: skip
    assert processes._reason(log) == "ValueError: prompts must be divisible by 16"


def test_one_length_is_an_outlier() -> None:
    drawn = Lengths("outlier:200:20").draw(128, random.Random(1))
    assert sorted(drawn) == [200] * 127 + [4000]


@pytest.mark.parametrize("text", ["512", "constant:many", "lognormal:700:0.9", "uniform:1:2", "constant:"])
def test_malformed_lengths_are_rejected(text: str) -> None:
    with pytest.raises(
        ValueError, match="expected constant:TOKENS, outlier:TOKENS:FACTOR or lognormal:MEDIAN:SIGMA:CAP"
    ):
        Lengths(text)


def test_prompts_have_exactly_the_given_lengths(tmp_path: Path) -> None:
    tokenizer = fill_vocabulary(make_tokenizer(), vocabulary=1000)
    template_tokens = count_template_tokens(tokenizer, "qwen3")
    write_dataset(tmp_path / "data.jsonl", [60, 61, 200], template_tokens)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    contents = [row["messages"][0]["content"] for row in rows]
    assert [len(tokenizer(content).input_ids) + template_tokens for content in contents] == [60, 61, 200]
    assert [row_of(content) for content in contents] == [0, 1, 2]
    assert [tokenizer.decode([token]) for token in (259, 999)] == [
        "<259>",
        "<999>",
    ]  # vLLM decodes every token it samples


def test_flops_count_only_the_required_matrix_products() -> None:
    shape = Shape(layers=3, hidden=8, ffn=20, heads=4, kv_heads=2, head_dim=6, vocabulary=50)
    forward = 0.0
    for prompt, completion in [(5, 3), (5, 7), (2, 1), (2, 4)]:
        t = prompt + completion
        query, key_value, output, mlp = 8 * 24, 2 * 8 * 12, 24 * 8, 3 * 8 * 20
        scores_and_mix = 2 * (t * t / 2) * 24  # half of the scores, each used twice, over all heads
        forward += 2 * (3 * (t * (query + key_value + output + mlp) + scores_and_mix) + completion * 8 * 50)
    assert training_flops(shape, [5, 2], [[3, 7], [1, 4]]) == pytest.approx(3 * forward)
    assert training_flops(shape, [5, 2], [[3, 7], [1, 4]], adapters=True) == pytest.approx(2 * forward)


def test_shapes_have_as_many_parameters_as_their_names_say() -> None:
    for name, billions in (("0.6b", 0.6), ("1.7b", 1.72), ("4b", 4.02)):
        shape = SHAPES[name]
        attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
        layer = attention + 3 * shape.hidden * shape.ffn
        assert (shape.layers * layer + shape.vocabulary * shape.hidden) / 1e9 == pytest.approx(billions, rel=0.02)


# ---- clock


def test_every_moment_of_a_step_belongs_to_one_phase() -> None:
    """A sleep may last longer, so phases are compared with the time that all sleeps together took too long."""
    clock = Clock()
    clock.switch("before any step: not counted")
    inner = clock.timed("inner", lambda: time.sleep(0.03), then="after")
    began = time.perf_counter()
    with clock.step() as record:
        time.sleep(0.01)
        with clock.phase("outer"):
            time.sleep(0.02)
            inner()
            time.sleep(0.04)
        time.sleep(0.01)
    ended = time.perf_counter()
    slept = {"other": 0.02, "outer": 0.02, "inner": 0.03, "after": 0.04}
    late = ended - began - sum(slept.values())
    assert record["phases"].keys() == slept.keys()
    assert all(slept[phase] <= record["phases"][phase] <= slept[phase] + late for phase in slept)
    assert sum(record["phases"].values()) == pytest.approx(record["seconds"], abs=1e-4)
    assert sum(slept.values()) <= record["seconds"] <= ended - began
    with clock.step() as record:
        pass
    assert set(record["phases"]) == {"other"} and len(clock.steps) == 2


# ---- results


def step(seconds: float, **changes: object) -> Step:
    values = {"seconds": seconds + 1, "phases": {"forward_backward": seconds * 0.75, "optimizer": seconds * 0.25,
                                                 "other": 1.0},
              "compute": [seconds], "peak_gb": {"forward_backward": 40.0, "other": 90.0}, "reserved_gb": 95.0,
              "loss": 1e-9, "grad_norm": 1.5}  # fmt: skip
    return Step(**{**values, **changes})  # type: ignore[arg-type]


def some_run(kind: str = "train") -> Run:
    def process(arm: str, setting: str, *seconds: float, status: str = "ok") -> Process:
        return Process(arm, setting, status, [step(value) for value in seconds], ["--x"])

    return Run(
        name="some", kind=kind, device="NVIDIA H200", ranks=2, versions={"torch": "2"},
        workload={"shape": "tiny", "completions": 8, "generations": 4, "lengths": "constant:8",
                  "prompt_lengths": "constant:4", "seed": 0},
        prompt_tokens=300, completion_tokens=500, flops=989e12, memory_cap_gb=100.0, pairs=[["tokens1", "mbs4"]],
        goal="1.5", flags=["--y"], warm_up=1,
        processes=[process("ours", "mbs4", 3.0, 3.2), process("stock", "mbs4", 6.0, 9.0),
                   process("ours", "tokens1", 2.0, 4.0), process("stock", "mbs8", 5.0, 5.1),
                   process("stock", "mbs16", status="out of memory"), process("ours", "tokens1", 1.9)],
    )  # fmt: skip


def test_comparisons_use_medians_over_all_processes_of_a_setting() -> None:
    compared = {pair.what: (pair.ours.setting, pair.other.setting, pair.ratio) for pair in some_run().comparisons()}
    assert compared == {
        "equal flags": ("mbs4", "mbs4", pytest.approx(7.5 / 3.1)),
        "each at its best": ("tokens1", "mbs8", pytest.approx(5.05 / 2.0)),
        "chosen pair": ("tokens1", "mbs4", pytest.approx(7.5 / 2.0)),
    }
    whole = {pair.what: pair.ratio for pair in some_run("step").comparisons()}
    assert whole["equal flags"] == pytest.approx(8.5 / 4.1)  # including time outside the train phase


def test_memory_and_mfu_describe_the_train_phase() -> None:
    best = some_run().best("ours")
    assert best is not None and best.peak_gb == 40.0
    assert step(2.0, vllm_gb=15.0).train_peak_gb == 25.0  # that of a vLLM that sleeps has gone back to the GPU
    assert best.mfu == pytest.approx(1.0 / (2.0 * 0.75) / 2)  # one second of one chip's peak, on two chips
    assert best.tokens_per_second_per_device == pytest.approx(800 / 2.0 / 2)


def results(runs: Sequence[Run]) -> str:
    return "\n".join(results_pages.pages(runs).values())


def test_the_page_has_the_settings_of_the_allocator() -> None:
    assert "ALLOC_CONF" not in results([some_run()])
    assert "`PYTORCH_CUDA_ALLOC_CONF=some:1`" in results([replace(some_run(), allocator="some:1")])


def test_a_run_is_equal_after_writing_and_reading(tmp_path: Path) -> None:
    run = some_run()
    run.write(tmp_path / "some.json")
    assert Run.read(tmp_path / "some.json") == run


def test_ranks_are_merged_into_steps_without_the_warm_up() -> None:
    def rank(scale: float, loss: float | None, vllm: int | None = None) -> dict[str, object]:
        return {"steps": [{"seconds": scale * n, "phases": {"forward_backward": scale * n, "other": 0.5},
                           "peak_bytes": {"forward_backward": 1e9 * scale, "other": 1e9}, "reserved_bytes": 2e9,
                           "vllm_bytes": vllm, "busy_cores": 3.0, "outside_bytes": vllm and 1e9 * scale,
                           "allocator_retries": int(scale), "loss": loss, "grad_norm": float(n)}
                          for n in (1, 2)]}  # fmt: skip

    (merged,) = merge_ranks([rank(1.0, None), rank(3.0, 0.25)], warm_up=1)
    assert merged.seconds == 6.0 and merged.compute == [2.0, 6.0] and merged.phases["forward_backward"] == 4.0
    assert merged.peak_gb == {"forward_backward": 3.0, "other": 1.0} and merged.reserved_gb == 2.0
    assert merged.loss == 0.25 and merged.grad_norm == 2.0  # only the last pipeline stage has the loss
    assert merged.vllm_gb is None and merged.outside_gb is None and merged.allocator_retries == 3
    (merged,) = merge_ranks([rank(1.0, 0.25, 42 * 10**9), rank(3.0, 0.25, 41 * 10**9)], warm_up=1)
    assert merged.vllm_gb == 41.0 and merged.outside_gb == 3.0  # vLLM's of the rank with the highest peak


def test_memory_of_vllm_is_what_its_segments_hold() -> None:
    segments = [
        {"address": 10, "total_size": 20, "allocated_size": 15},
        {"address": 40, "total_size": 8, "allocated_size": 8},  # the trainer's
        {"address": 60, "total_size": 4, "allocated_size": 3},
    ]
    assert bytes_at({10: object(), 60: object(), 90: object()}, segments) == 18


def test_a_step_without_a_vllm_that_sleeps_has_no_memory_of_it() -> None:
    clock = Clock()
    with clock.step() as record:
        pass
    assert record["vllm_bytes"] is None


def test_a_step_has_the_cores_that_worked() -> None:
    clock, began = Clock(), time.process_time()
    with clock.step() as record:
        while time.process_time() < began + 0.2:
            pass
    assert 0.2 < record["busy_cores"] <= (os.cpu_count() or 1) + 0.5


def test_trainers_alternate_and_later_rounds_repeat_compared_settings() -> None:
    settings = [Setting(arm, name, ()) for arm, name in
                (("ours", "a"), ("ours", "b"), ("stock", "c"), ("stock", "d"), ("stock", "e"))]  # fmt: skip
    assert [setting.name for setting in interleave(settings)] == ["a", "c", "b", "d", "e"]
    compared = set(some_run().compared_settings())
    assert compared == {("ours", "mbs4"), ("ours", "tokens1"), ("stock", "mbs4"), ("stock", "mbs8")}


def test_settings_with_different_numbers_of_ranks_are_rejected() -> None:
    args = bench.parse(["train", "--json", "x.json", "--ours", "tp2+tokens64", "--stock", "dp2+mbs4", "--stock-flags",
                         "--sleep_level 1"])  # fmt: skip
    settings, ranks = bench.settings_of(args)
    assert ranks == 2
    assert settings[0].flags == (
        "--share_prompts",
        "false",
        "--tensor_model_parallel_size",
        "2",
        "--max_tokens_per_micro_batch",
        "64",
        "--sync_check",
        "off",
    )
    assert settings[1].flags == ("--micro_batch_size", "4", "--sleep_level", "1")
    with pytest.raises(SystemExit, match="same number of ranks"):
        bench.settings_of(bench.parse(["train", "--json", "x.json", "--ours", "tp2", "--stock", "mbs4"]))


def test_a_server_may_omit_the_tokens_of_a_few_completions_that_end_early() -> None:
    assert tokens_of_early_ends([[512] * 8] * 16, vocabulary=151936) < 0.03 * 512 * 128
    assert tokens_of_early_ends([[16] * 8] * 2, vocabulary=512) < 0.25 * 16 * 16


def test_benchmarks_wait_only_for_those_that_see_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert visible_devices() == ["0", "1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices() == ([str(gpu) for gpu in range(torch.cuda.device_count())] or ["cpu"])


# ---- the page


def test_the_page_shows_ratios_losses_and_failures() -> None:
    text = results([some_run(), some_run("step")])
    assert "| some | **2.42** | mbs4 | 3.100 (3.000-3.200) | mbs4 | 7.500 (6.000-9.000) | 1.5 | 1.00e-09 / " in text
    assert "| some | ms-swift | mbs16 | out of memory | 0 | - |" in text
    assert "times as fast" in draw([some_run()])


def test_the_committed_page_matches_the_committed_results() -> None:
    runs = page.read_runs(REPOSITORY)
    assert runs, "benchmarks/ has no results"
    advice = "run scripts/fix"
    for path, written in page.files(runs).items():
        assert (REPOSITORY / path).read_text() == written, advice
    for path, marks, table in other_pages.tables(runs):
        text = (REPOSITORY / path).read_text()
        assert text == other_pages.with_table(text, marks, table), advice
    for run in (run for run in runs if run.name in other_pages.HEADLINES):  # README states these facts above the table
        assert run.device == "NVIDIA H200" and run.versions["ms-swift"] == "4.6.0"
        assert run.workload["generations"] == 8


def test_shared_prompts_are_compared_and_count_once_in_the_mfu() -> None:
    run = some_run()
    steps = run.measured("ours", "mbs4").steps
    processes = [*run.processes, Process("ours", "mbs4+shared", "ok", steps, [])]
    run = replace(run, device="NVIDIA H200", processes=processes, flops=8e12, flops_with_shared_prompts=2e12)
    assert " / 4 | 3.10 s | 3.10 s | **1.00** | 5.05 s (mbs8) | **1.63** |" in other_pages.shared_prompts([run])
    shared, repeated = (run.measured("ours", setting).mfu for setting in ("mbs4+shared", "mbs4"))
    assert shared is not None and repeated == pytest.approx(4 * shared)


def test_families_are_compared_by_train_phase_and_whole_step() -> None:
    flags = ["--vllm_mode", "server"]
    served = some_run("step")
    served = replace(served, processes=[replace(process, flags=flags) for process in served.processes])
    text = other_pages.with_ms_swift([some_run(), some_run("step"), served])
    assert "| does not run | 2.00 / 5.05 s | **2.52** | - | - |" in text
    assert (
        "| in the trainer | 2.00 / 5.05 s | **2.52** | 3.00 / 6.05 s | **2.02** |" in text
        and "| on another GPU | 2.00 /" in text
    )


def test_verl_counts_all_scores_and_embeddings() -> None:
    shape = SHAPES["tiny"]  # 2 layers, 256 channels, 768 in the MLP, 4 heads of 64 with 2 for keys, 32,768 tokens
    weights = 2 * (3 * 256 * 768 + 256 * (2 * 256 + 2 * 128)) + 2 * 256 * 32768
    assert flops_as_verl_counts(shape, [4], [[6, 8]]) == 6 * weights * 22 + 12 * (10**2 + 12**2) * 256 * 2


def test_runs_of_this_package_are_compared_by_name() -> None:
    def run(name: str, ranks: int, seconds: float, **phases: float) -> Run:
        measured = step(seconds, phases={"forward_backward": seconds, **phases})
        process = Process("ours", "tokens1", "ok", [measured], [])
        kind = "train" if name[1] == "p" else "step"
        flags = ["--sleep_level", "2"] if name.startswith("two-colocated") else []
        return replace(some_run(kind), name=name, ranks=ranks, processes=[process], flags=flags)

    runs = [
        run("two-colocated-1.7b-128", 2, 3.0, generation=1.7), run("two-server-1.7b-128", 1, 2.0, generation=0.5),
        run("dp1-8b", 1, 2.0), run("dp2-8b", 2, 2.05), run("pp2-8b", 2, 2.2),
        run("sync-8b", 1, 1.0, weight_sync=0.06, sync_check=0.08),
        run("step-lora-8b-fp8-h100", 1, 1.0, generation=0.7), run("step-lora-8b-h100", 1, 2.0, generation=1.5),
        replace(run("moe-8b-ep2-h100", 2, 4.0), kind="train", flops_as_verl_counts=989e12, device="NVIDIA H200"),
    ]  # fmt: skip
    text = results(runs)
    row = "| two-server-1.7b-128 | 8 | 4.00 s | asleep | 1.70 / 3.00 s | 3.00 s | 0.50 / 2.00 s | **1.33** |"
    assert row in text  # a step takes a second more than its train phase
    assert "| dp1-8b | 1 | 2.000 s | 400 | 1.000 |" in text and "| dp2-8b | 2 | 2.050 s | 195 | 1.025 |" in text
    assert "| pp2-8b | 2 | 2.200 s | 182 | 1.100 |" in text
    assert "| sync-8b | 0.060 s | 0.080 s |" in text
    assert "| step-lora-8b-fp8-h100 | 3.00 s | 1.50 / 0.000 s | 2.00 s | 0.70 / 0.000 s | **1.50** |" in text
    [row] = [line for line in text.splitlines() if line.startswith("| moe-8b-ep2-h100 | tokens1 | 8 |")]
    assert row.startswith("| moe-8b-ep2-h100 | tokens1 | 8 | 4.00 s | 100 |") and "| 12.5% |" in row


def test_the_report_replaces_only_the_table_in_the_readme() -> None:
    begin, end = other_pages.IN_README
    runs = [replace(some_run(), name=name) for name in other_pages.HEADLINES]
    readme = other_pages.with_table(
        f"before\n{begin}| old |\n{end}after\n", other_pages.IN_README, other_pages.headlines(runs)
    )
    assert readme.startswith(f"before\n{begin}|  | model |") and readme.endswith(f"|\n{end}after\n")
    row = "| train phase | Qwen3 TINY | **2.52** | 5.05 s | 2.00 s | 8 x 8 | 2 |\n"
    assert "| old |" not in readme and readme.count(row) == len(other_pages.HEADLINES)


def test_the_recorded_train_phase_on_a_cpu_is_1_5_times_ms_swifts_speed() -> None:
    """Compares the recorded results; tests/e2e/test_bench.py measures again."""
    run = Run.read(REPOSITORY / "benchmarks" / "cpu" / "train-tiny.json")
    (best,) = (pair for pair in run.comparisons() if pair.what == "each at its best")
    assert best.ratio >= 1.5
    assert len(best.ours.steps) >= 5 and len(best.other.steps) >= 5
    assert len(run.settings("stock")) >= 3  # the best of several settings
    assert best.ours.steps[0].grad_norm == pytest.approx(best.other.steps[0].grad_norm, rel=1e-4)


def test_no_token_of_a_random_model_has_a_zero_embedding() -> None:
    """RMSNorm would amplify its gradient wherever a completion contains the token."""
    for shape in ("toy", "toy-qwen3-moe", "toy-qwen3.5", "toy-qwen3.5-moe", "toy-qwen3-vl"):
        with random_weights():
            _, model = make_model(SHAPES[shape])
        assert model.get_input_embeddings().weight.norm(dim=-1).min() > 0.01
