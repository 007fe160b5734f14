"""Measure generation with this package's scheduling of vLLM and with vLLM's own, in turns in one engine.

    python -m benchmarks.bench_scheduling --model 0.6b --json runs/scheduling.json

The engine has random weights. A round generates completions of one length from prompts that no other round has, with
and without log-probs. Run it on a quiet machine: the difference is time of the host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

HEADS_OF_A_SMALL_LLAMA = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
HEADS_OF_QWEN3 = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, dict[str, int]] = {
    "toy": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "135m": {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152,
             **HEADS_OF_A_SMALL_LLAMA},
    "0.6b": {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936,
             **HEADS_OF_QWEN3},
    "1.7b": {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936,
             **HEADS_OF_QWEN3},
}  # fmt: skip
OURS, STOCK = "ours", "stock"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--completions", type=int, nargs="+", default=[128, 256, 512], help="requests at one time")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    return parser.parse_args()


def build_engine(args: argparse.Namespace, folder: str) -> Any:
    from transformers import Qwen3Config
    from vllm import LLM

    on_gpu = torch.cuda.is_available() and torch.version.cuda is not None
    sizes = MODELS[args.model]
    config = Qwen3Config(**sizes, max_position_embeddings=4096, tie_word_embeddings=True, torch_dtype="bfloat16")
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    most = max(args.completions)
    graphs = [size for power in range(most.bit_length()) if (size := 2**power) < most] + [most]
    return LLM(folder, load_format="dummy", dtype="bfloat16", max_model_len=args.prompt_tokens + args.tokens,
               max_num_seqs=most, seed=0, disable_log_stats=True, skip_tokenizer_init=True, enforce_eager=not on_gpu,
               **({"compilation_config": {"cudagraph_capture_sizes": graphs}} if on_gpu else {}))  # fmt: skip


def main() -> int:
    args = parse()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not torch.cuda.is_available():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
    from vllm import SamplingParams

    from swift_megatron_grpo.generation.vllm.fast_logprobs import speed_up_logprobs
    from swift_megatron_grpo.generation.vllm.fast_outputs import speed_up_decoding

    speed_up_logprobs()
    folder = tempfile.TemporaryDirectory()
    engine = build_engine(args, folder.name)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    stock = (scheduler.schedule, scheduler.update_from_output)
    if not speed_up_decoding(engine.llm_engine):
        raise SystemExit("this version of vLLM, or its settings, run with vLLM's own scheduling")
    ways = {OURS: (scheduler.schedule, scheduler.update_from_output), STOCK: stock}
    numbers = itertools.count()

    def seconds_of_round(completions: int, way: str, logprobs: int | None) -> float:
        scheduler.schedule, scheduler.update_from_output = ways[way]
        number = next(numbers)
        filler = [10] * (args.prompt_tokens - 3)
        prompts = [
            {"prompt_token_ids": [10 + number % 200, 10 + place % 200, 10 + place // 200, *filler]}
            for place in range(completions)
        ]
        sampling = SamplingParams(temperature=1.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False,
                                  logprobs=logprobs, flat_logprobs=True)  # fmt: skip
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs)
        return time.perf_counter() - began

    measured: dict[int, dict[str, list[float]]] = {}
    device = torch.cuda.get_device_name() if torch.version.cuda else "cpu"
    report = {"model": args.model, "device": device, "tokens": args.tokens, "prompt_tokens": args.prompt_tokens,
              "seconds": measured}  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for completions in args.completions:
        cases = [(way, logprobs) for way in (OURS, STOCK) for logprobs in (None, 0)]
        seconds: dict[str, list[float]] = {}
        for round_number in range(args.rounds + 1):
            for way, logprobs in cases:
                taken = seconds_of_round(completions, way, logprobs)
                if round_number:
                    name = f"{way}, {'without' if logprobs is None else 'with'} log-probs"
                    seconds.setdefault(name, []).append(taken)
        measured[completions] = seconds
        print(args.model, completions, {name: round(median(times), 3) for name, times in seconds.items()}, flush=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may outlive their engine


if __name__ == "__main__":
    sys.exit(main())
