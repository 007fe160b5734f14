"""The cases of one node: what users train on eight GPUs, and its half and quarter on four and two."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NODES = (8, 4, 2)  # GPUs
_IN_WORDS = {8: "eight", 4: "four", 2: "two"}
_DRY_COMPLETIONS = 32  # of each rank in a dry run: ms-swift's trainer has a whole micro batch of prompts on each
_FIXED = ("--lengths", "constant:512", "--prompts", "constant:48")
_LORA = ("--tuner_type", "lora", "--lora_rank", "16", "--lora_alpha", "32", "--target_modules", "all-linear")
_MOE = ("--moe_grouped_gemm", "true", "--moe_permute_fusion", "true")
_BF16_MOMENTS = ("--use_precision_aware_optimizer", "true", "--exp_avg_dtype", "bf16", "--exp_avg_sq_dtype", "bf16")
_OFFLOAD = ("--offload_model", "true", "--offload_optimizer", "true")
_OFFLOAD_GRADIENTS = ("--offload_grad", "true")
_AHEAD = ("--async_generate", "true", "--rollout_importance_sampling_mode", "token_truncate")
# Gradients of cuDNN's attention are wrong with 256 channels per head: torch's kernel.
_QWEN3_5 = ("--attention_backend", "flash", "--vit_attn_impl", "sdpa")
# CUDA graphs of decoding alone, without torch.compile, which would take a minute of each start. FlashInfer compiles the
# prefill of delta nets for five minutes.
_DECODING = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [8, 16, 64, 128],
    },
    "gdn_prefill_backend": "triton",
}
# Servers that start next to others on a GPU must not size their caches by the memory that is free.
_CACHE_GB = 8.0
_DRY_CACHE_GB = 0.064


@dataclass(frozen=True, slots=True)
class Servers:
    """Rollout servers of a case, each with one GPU."""

    gpus: tuple[int, ...]
    flags: tuple[str, ...]  # of `swift rollout`
    beside_trainers: bool = False  # on the same GPUs


@dataclass(frozen=True, slots=True)
class Case:
    name: str  # of its result file
    kind: str  # of bench.py: train, step
    shape: str
    ours: tuple[str, ...]  # settings of this package
    stock: tuple[str, ...]  # settings of ms-swift's own trainer, measured in turns with them
    workload: tuple[str, ...]  # arguments of bench.py
    flags: tuple[str, ...]  # of `megatron rlhf`
    seconds: int  # that a rental needs to start it
    ours_flags: tuple[str, ...] = ()  # that ms-swift's trainer does not have
    servers: Servers | None = None

    def arguments(self, dry: bool = False, urls: Sequence[str] = ()) -> list[str]:
        """Return the arguments of bench.py, without its files and limits.

        `dry`: with the smallest model of the type on CPU ranks, and few tokens. `urls`: of the servers.
        """
        shape = toy(self.shape) if dry else self.shape
        arguments = [self.kind, "--shape", shape, "--random-weights", "--rounds", "1", "--ahead", *self.workload]
        for arm, settings in (("--ours", self.ours), ("--stock", self.stock)):
            arguments += [arm, *settings] if settings else []
        arguments += ["--ours-flags", shlex.join(self.ours_flags)] if self.ours_flags else []
        if self.servers is not None:
            arguments += ["--servers", " ".join(urls), " ".join(urls)]
            arguments += ["--beside-servers"] if self.servers.beside_trainers else []
        if not dry:
            return [*arguments, "--flags", shlex.join(self.flags)]
        # Arguments that come later override earlier ones.
        few = ["--completions", str(_DRY_COMPLETIONS * self.ranks), "--generations", "2", "--lengths", "constant:16",
               "--prompts", "constant:48", "--steps", "2", "--warm-up", "1", "--dtype", "float32"]  # fmt: skip
        return [*arguments, *few, "--flags", shlex.join([*self.flags, *light_engine(self.kind)])]

    @property
    def ranks(self) -> int:
        """Return the ranks of the trainer."""
        from swift_megatron_grpo.cli.check_layouts.layouts import Variant

        return Variant.parse(self.ours[0]).ranks


def toy(shape: str) -> str:
    """Return the shape of the same type that a CPU runs."""
    return f"toy-{shape.partition('-')[2]}" if "-" in shape else "toy"


def light_engine(kind: str) -> list[str]:
    """Return the flags of a vLLM that CPU ranks start next to each other."""
    if kind == "train":
        return []
    return ["--vllm_enforce_eager", "true", "--sleep_level", "0", "--vllm_gpu_memory_utilization", "0.2",
            "--vllm_engine_kwargs", json.dumps(_engine(_DRY_CACHE_GB, {}))]  # fmt: skip


def _engine(cache_gb: float | None, more: Mapping[str, object]) -> dict[str, object]:
    """Return --vllm_engine_kwargs of an engine whose weights come with the first sync."""
    cache = {} if cache_gb is None else {"kv_cache_memory_bytes": int(cache_gb * 1e9)}
    return {"load_format": "dummy", **cache, **more}


def _colocated(ranks: int, share: float, sleep_level: int = 2) -> tuple[str, ...]:
    """Return the flags of engines of so many ranks each, which sleep while the ranks train."""
    return ("--vllm_gpu_memory_utilization", str(share), "--vllm_tensor_parallel_size", str(ranks), "--sleep_level",
            str(sleep_level), "--vllm_engine_kwargs", json.dumps(_engine(None, _DECODING)))  # fmt: skip


def cases(gpus: int) -> list[Case]:
    """Return the cases of a node with so many GPUs, in the order of their worth."""
    if gpus not in NODES:
        raise ValueError(f"there are no cases for {gpus} GPUs; use one of {', '.join(map(str, NODES))}")
    return [
        _full_8b(gpus, engine_ranks=1),
        *_full_30b(gpus),
        _adapters_of_35b(gpus),
        _ahead_of_35b(gpus),
        _sync(gpus),
        *_omni(gpus),
        _full_8b(gpus, engine_ranks=2),
        _data_parallel(gpus),
    ]


def _full_8b(gpus: int, engine_ranks: int) -> Case:
    """Return all weights of 8B: data parallelism alone, and two ranks for each layer. ms-swift's trainer has both."""
    engine = "" if engine_ranks == 1 else f"-vtp{engine_ranks}"
    split = f"tp2+sp+dp{gpus // 2}"
    return Case(
        f"step-full-8b{engine}-{gpus}",
        "step",
        "8b",
        ours=(f"dp{gpus}+tokens8192", f"{split}+tokens16384"),
        stock=(f"dp{gpus}+mbs8", f"{split}+mbs16") if engine_ranks == 1 else (f"dp{gpus}+mbs8",),
        workload=(*_FIXED, "--completions", str(64 * gpus), "--steps", "4", "--timeout", "300"),
        flags=(*_colocated(engine_ranks, 0.4), *_OFFLOAD),
        seconds=300,
        ours_flags=_OFFLOAD_GRADIENTS,
    )


def _full_30b(gpus: int) -> Iterator[Case]:
    """Yield all weights of 30B-A3B with the settings of templates/moe_full.sh and long-tailed completions."""
    if gpus < 4:
        return  # two H200 are too small for the states of the optimizer
    layout = f"dp{gpus}+ep{gpus}"
    yield Case(
        f"step-full-30b-template-ep{gpus}",
        "step",
        "30b-qwen3-moe",
        ours=(f"{layout}+tokens6144+shared",),
        stock=(f"{layout}+mbs2",),
        workload=("--lengths", "lognormal:700:0.9:4096", "--prompts", "constant:256", "--completions", "128", "--steps",
                  "3", "--timeout", "420"),
        flags=(*_colocated(2, 0.4), *_MOE, *_BF16_MOMENTS, *_OFFLOAD),
        seconds=300,
        ours_flags=_OFFLOAD_GRADIENTS,
    )  # fmt: skip


def _adapters_of_35b(gpus: int) -> Case:
    """Return adapters of Qwen3.5-35B-A3B. The first steps compile and tune kernels for minutes."""
    return Case(
        f"{_IN_WORDS[gpus]}-colocated-35b-lora-{64 * gpus}",
        "step",
        "35b-qwen3.5-moe",
        ours=(f"dp{gpus}+ep{gpus}+tokens{12288 if gpus > 2 else 8192}",),
        stock=(),
        workload=(*_FIXED, "--completions", str(64 * gpus), "--steps", "5", "--warm-up", "2", "--timeout", "480"),
        flags=(*_colocated(2, 0.4), "--offload_model", "true", *_MOE, *_LORA, *_QWEN3_5),
        seconds=420,
    )


def _ahead_of_35b(gpus: int) -> Case:
    """Return the same with servers on half of the GPUs, ahead of trainers on the others."""
    half = gpus // 2
    no_media = json.dumps({"image": 0, "video": 0})
    engine = json.dumps(_engine(None, _DECODING))
    return Case(
        f"{_IN_WORDS[gpus]}-server-35b-lora-{64 * gpus}",
        "step",
        "35b-qwen3.5-moe",
        ours=((f"dp{half}+ep{half}" if half > 1 else "dp1") + f"+tokens{12288 if half > 2 else 8192}",),
        stock=(),
        workload=(*_FIXED, "--completions", str(64 * gpus), "--steps", "7", "--warm-up", "3", "--timeout", "480"),
        flags=(*_AHEAD, *_MOE, *_LORA, *_QWEN3_5),
        seconds=420,
        servers=Servers(
            tuple(range(half, gpus)),
            ("--vllm_gpu_memory_utilization", "0.85", "--vllm_limit_mm_per_prompt", no_media, "--vllm_engine_kwargs",
             engine),
        ),
    )  # fmt: skip


def _sync(gpus: int) -> Case:
    """Return the weight sync of 8B with adapters merged, from all ranks to as many servers.

    NCCL admits no two processes of a GPU to a group. Rank 0 sends, so no server is on its GPU, and the first of the
    others has two.
    """
    others = gpus - 1
    engine = json.dumps(_engine(_CACHE_GB, {}))
    return Case(
        f"sync-8b-lora-{gpus}x{gpus}",
        "step",
        "8b",
        ours=(f"dp{gpus}+tokens16384",),
        stock=(),
        workload=("--lengths", "constant:64", "--prompts", "constant:48", "--completions", str(8 * gpus), "--steps",
                  "6", "--warm-up", "2", "--timeout", "420"),
        flags=_LORA,
        seconds=240,
        servers=Servers(
            tuple(1 + place % others for place in range(gpus)),
            ("--vllm_enforce_eager", "true", "--vllm_gpu_memory_utilization", "0.1", "--vllm_engine_kwargs", engine),
            beside_trainers=True,
        ),
    )  # fmt: skip


def _omni(gpus: int) -> Iterator[Case]:
    """Yield adapters of Qwen3-Omni with the layout of templates/omni_lora.sh: 8 s of sound in every other row, with
    ms-swift's trainer in turns, and an image in each row. ms-swift's has no flash attention without flash-attn."""
    layout = f"tp2+sp+dp{gpus // 2}+ep{gpus}"
    ours, flash = (f"{layout}+tokens16384",), ("--attention_backend", "flash")
    stock = (f"{layout}+mbs{min(4, 16 // gpus)}",)  # 8 prompts, of which each rank has whole micro batches
    flags = (*_colocated(2, 0.5, sleep_level=1), "--offload_model", "true", *_MOE, *_LORA)
    workload = ("--lengths", "constant:256", "--prompts", "constant:48", "--completions", "64", "--steps", "4",
                "--timeout", "420")  # fmt: skip
    yield Case(f"step-lora-omni-audio-{gpus}", "step", "30b-qwen3-omni-audio", ours, stock, workload,
               flags, 400, flash)  # fmt: skip
    yield Case(f"step-lora-omni-{gpus}", "step", "30b-qwen3-omni", ours, (), workload, flags, 300, flash)


def _data_parallel(gpus: int) -> Case:
    """Return the train phase of adapters of 8B, as measured on one, two and four GPUs."""
    return Case(
        f"dp{gpus}-8b-lora",
        "train",
        "8b",
        ours=(f"dp{gpus}+tokens16384",),
        stock=(),
        workload=(*_FIXED, "--completions", str(64 * gpus), "--steps", "4", "--timeout", "300"),
        flags=_LORA,
        seconds=120,
    )


def is_measured(case: Case, out: Path) -> bool:
    """Return True if every setting of the case was tried in an earlier rental and this package's were measured."""
    file = out / f"{case.name}.json"
    if not file.exists():
        return False
    tried = {
        (process["arm"], process["setting"]): process["status"] for process in json.loads(file.read_text())["processes"]
    }
    wanted = [("ours", name) for name in case.ours] + [("stock", name) for name in case.stock]
    return all(one in tried for one in wanted) and all(tried["ours", name] == "ok" for name in case.ours)
