"""Stand-ins for what a script for a cluster needs: made-up rows, rewards and environments, and smaller sizes.

`reduce` changes sizes alone, and keeps how they relate: parallelism above 1 stays above 1 while there are ranks for it,
and a context that is too short for prompt and completion stays too short.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

Flags = dict[str, list[str]]  # by name, without dashes; no value for a bare boolean

ROWS = 32
_LONGEST_PROMPT, _LONGEST_COMPLETION = 2036, 12  # the positions of a tiny model; longer prompts are refused
_WITH_MATH_VERIFY = ("accuracy", "cosine")  # rewards of ms-swift that need this package
_PLUGIN = '''"""Rewards, environments and schedulers in place of those that cannot run on this machine."""

from swift.rewards import ORM, orms
from swift.rollout import MultiTurnScheduler, multi_turns
from swift.rollout.gym_env import Env, envs


class StandIn(ORM):
    def __call__(self, completions, **columns):
        return [sum(map(ord, text)) % 11 / 10 for text in completions]


class Echo(Env):
    async def reset(self, config):
        return config.messages[-1]["content"], {{}}, ""

    async def step(self, action):
        text = action[-1]["content"]
        return "Go on.", sum(map(ord, text)) % 11 / 10, False, {{}}

    async def close(self): ...


class GoOn(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({{"role": "user", "content": "Go on."}})
        return {{"infer_request": infer_request}}


for name in {rewards}:
    orms[name] = type(name, (StandIn,), {{}})
for name in {environments}:
    envs[name] = Echo
for name in {schedulers}:
    multi_turns[name] = GoOn
'''


class NoStandIn(ValueError):
    """Something of the script has no stand-in."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The model of a script, as ms-swift and transformers name it."""

    model_type: str  # of ms-swift
    hf_type: str  # of transformers
    class_name: str
    template: str | None


def architecture_of(flags: Flags) -> Architecture:
    """Find the architecture of --model: from its config.json, or from ms-swift's list of models."""
    from swift.model import MODEL_MAPPING, get_matched_model_meta

    from swift_megatron_grpo.cli.tiny_models import TYPES, model_type_of

    name = "".join(flags.get("model", [])[:1])
    named_type = "".join(flags.get("model_type", [])[:1]) or None
    config, by_name = Path(name).expanduser() / "config.json", get_matched_model_meta(name)
    if config.is_file():
        values: dict[str, Any] = json.loads(config.read_text())
        class_name, hf_type = values["architectures"][0], values["model_type"]
        meta = MODEL_MAPPING.get(named_type or hf_type)
    else:
        meta = MODEL_MAPPING.get(named_type or "", by_name)
        if meta is None:
            unknown = f"model_type {named_type}" if named_type else f"model {name}"
            raise NoStandIn(f"--{unknown}: ms-swift does not list it; add --model_type with a type that it lists")
        class_name = meta.architectures[0]
        hf_type = model_type_of(class_name) or meta.model_type
    if hf_type not in TYPES:
        raise NoStandIn(
            f"--model {name}: there is no tiny model of type {hf_type} ({class_name}); there are "
            f"{', '.join(sorted(TYPES))}"
        )
    known_type = hf_type if meta is None else meta.model_type
    model_type = named_type if named_type and named_type in MODEL_MAPPING else known_type
    template = (by_name or meta).template if by_name or meta else None  # a type alone may have several
    return Architecture(model_type, hf_type, class_name, template)


def replace_inputs(flags: Flags, folder: Path, servers: Sequence[Flags]) -> tuple[Flags, list[str]]:
    """Replace data, rewards, trackers and paths that this machine does not have. Return what was replaced, as lines."""
    from swift.dataset import DATASET_MAPPING
    from swift.template import TEMPLATE_MAPPING

    flags, notes = dict(flags), []
    missing = [path for path in flags.get("dataset", []) if not Path(path.split("#")[0]).expanduser().is_file()]
    if not missing and "dataset" in flags:
        flags["dataset"] = [os.path.abspath(os.path.expanduser(path)) for path in flags["dataset"]]
    else:
        names = [path.split("#")[0].split(":")[0] for path in missing]
        listed = DATASET_MAPPING.items()
        images = any(name in key and "vision" in meta.tags for key, meta in listed for name in names)
        flags["dataset"] = [str(_write_rows(folder / "rows.jsonl", images))]
        notes.append(f"--dataset {' '.join(missing)}: {ROWS} made-up rows{' with images' if images else ''}")
    for name in list(flags):
        if name in ("val_dataset", "split_dataset_ratio", "cached_dataset") or name.startswith("eval_"):
            notes.append(f"--{name} {' '.join(flags.pop(name))}: left out")
    if "system" in flags and Path(flags["system"][0]).is_file():
        flags["system"] = [os.path.abspath(flags["system"][0])]
    elif "system" in flags and flags["system"][0].endswith(".txt"):  # ms-swift reads such a file
        notes.append(f"--system {flags['system'][0]}: a made-up line, because it is not on this machine")
        flags["system"] = ["Answer briefly."]
    flags |= agent_of(flags)
    flags["external_plugins"], left_out = _import_plugins(flags)
    notes += left_out
    _replace_reward_models(flags)
    stand_in, made_up = _registry(flags, folder, servers, bool(left_out))
    notes += made_up
    flags["external_plugins"] += stand_in
    if not flags["external_plugins"]:
        del flags["external_plugins"]
    if left_out and "template" in flags and flags["template"][0] not in TEMPLATE_MAPPING:
        notes.append(f"--template {' '.join(flags.pop('template'))}: the model's, because it is not here")
    if (trackers := flags.get("report_to", ["none"])) != ["none"]:
        notes.append(f"--report_to {' '.join(trackers)}: none")
    flags["report_to"] = ["none"]
    for name in ("mcore_model", "mcore_adapter", "adapters", "ref_adapters", "ref_model", "mcore_ref_model"):
        if name in flags and not all(Path(path).expanduser().is_dir() for path in flags[name]):
            notes.append(f"--{name} {' '.join(flags.pop(name))}: left out, because it is not on this machine")
    return flags, notes


def agent_of(flags: Flags) -> Flags:
    """Return --agent with its file as an absolute path, and a command as it is; nothing if there is none."""
    agents = flags.get("agent", [])
    given = [os.path.abspath(each) if Path(each.rpartition(":")[0]).is_file() else each for each in agents]
    return {"agent": given} if given else {}


def _import_plugins(flags: Flags) -> tuple[list[str], list[str]]:
    """Take the plugins out of the flags and import those that are here. Return them, and notes about the others."""
    from swift.utils import import_external_file

    plugins, notes = [], []
    for flag in ("external_plugins", "custom_register_path"):  # the second is ms-swift's older name of the first
        for path in flags.pop(flag, []):
            if Path(path).is_file():
                plugins.append(os.path.abspath(path))
                import_external_file(plugins[-1])
            else:
                notes.append(f"--{flag} {path}: left out, because it is not on this machine")
    return plugins, notes


def _replace_reward_models(flags: Flags) -> None:
    """Name a reward function, which will be made up, in place of every reward model: it keeps the model's weight."""
    for name in [name for name in flags if name.startswith("reward_model_")]:
        del flags[name]
    names = [f"reward_model_{place}" for place, _ in enumerate(flags.pop("reward_model", []), start=1)]
    if names:
        flags["reward_funcs"] = [*flags.get("reward_funcs", []), *names]


def _registry(flags: Flags, folder: Path, servers: Sequence[Flags], plugin_lacks: bool) -> tuple[list[str], list[str]]:
    """Write a plugin with what is not registered here. Return its path in a list, which may be empty, and notes.

    A scheduler that no plugin is left out for has a wrong name, which the run would refuse.
    """
    from swift.rewards import orms
    from swift.rollout import multi_turns
    from swift.rollout.gym_env import envs

    def named(flag: str) -> list[str]:
        return [name for given in (flags, *servers) for name in given.get(flag, [])]

    lacking = _WITH_MATH_VERIFY if find_spec("math_verify") is None else ()
    rewards = [name for name in flags.get("reward_funcs", []) if name not in orms or name in lacking]
    environments = [name for name in named("gym_env") if name not in envs]
    schedulers = [name for name in named("multi_turn_scheduler") if plugin_lacks and name not in multi_turns]
    if not (rewards or environments or schedulers):
        return [], []
    path = folder / "stand_ins.py"
    path.write_text(_PLUGIN.format(rewards=rewards, environments=environments, schedulers=schedulers))
    return [str(path)], [
        *(f"--reward_funcs {name}: made-up rewards, because it cannot run here" for name in rewards),
        *(f"--gym_env {name}: an environment that echoes, because it is not here" for name in environments),
        *(f"--multi_turn_scheduler {name}: one that says `Go on.`, because it is not here" for name in schedulers),
    ]


def _write_rows(path: Path, images: bool) -> Path:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"{n} + {n + 1} = ?"}], "solution": f"\\boxed{{{2 * n + 1}}}"}
        for n in range(ROWS)
    ]
    for n, row in enumerate(rows if images else []):
        file = path.with_name(f"row{n}.png")
        Image.new("RGB", (56 + n, 84), (8 * n, 255 - 8 * n, 100)).save(file)
        row["images"] = [str(file)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reduce(flags: Flags, ranks: int, steps: int) -> Flags:
    """Return the flags with sizes for this many ranks of a small machine and for this many steps."""

    def number(name: str, default: int) -> int:
        return int(flags[name][0]) if flags.get(name) else default

    sizes = _layout(number, ranks)
    sizes |= _batch(number, ranks, sizes) | dict.fromkeys(("train_iters", "save_steps", "eval_steps"), steps)
    prompt = min(number("max_length", _LONGEST_PROMPT), _LONGEST_PROMPT)
    completion = sizes["max_completion_length"] = min(number("max_completion_length", 512), _LONGEST_COMPLETION)
    if "vllm_max_model_len" in flags:
        needed = number("max_length", 1) + number("max_completion_length", 512)
        sizes["vllm_max_model_len"] = prompt + completion - (4 if number("vllm_max_model_len", 0) < needed else 0)
    most = {"max_length": prompt, "max_turns": 2, "lora_rank": 8}
    sizes |= {name: min(number(name, size), size) for name, size in most.items() if name in flags}
    left_out = {*_SIZES_OF_CLUSTERS}
    if sizes["pipeline_model_parallel_size"] == 1:
        left_out |= {"virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"}
    kept = {name: values for name, values in flags.items() if name not in left_out}
    return kept | {name: [str(size)] for name, size in sizes.items()} | _OF_SMALL_RUNS


_OF_SMALL_RUNS: Flags = {
    "save_strategy": ["steps"], "logging_steps": ["1"], "dataset_num_proc": ["1"], "dataloader_num_workers": ["0"],
    "load_from_cache_file": ["false"], "check_model": ["false"], "add_version": ["false"],
    "vllm_gpu_memory_utilization": ["0.3"], "vllm_enforce_eager": ["true"],
}  # fmt: skip
_SIZES_OF_CLUSTERS = (
    "num_train_epochs", "generation_batch_size", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "max_tokens_per_micro_batch",
    "infer_max_tokens_per_micro_batch", "vllm_max_num_seqs", "ref_tensor_model_parallel_size",
    "ref_pipeline_model_parallel_size", "ref_context_parallel_size", "ref_expert_model_parallel_size",
    "ref_expert_tensor_parallel_size",
)  # fmt: skip


def _layout(number: Callable[[str, int], int], ranks: int) -> dict[str, int]:
    """Halve what is parallel until it fits: every size becomes 2 or 1, context and pipeline first."""
    sizes, free = {}, ranks
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        sizes[name] = 2 if number(name, 1) > 1 and free % 2 == 0 else 1
        free //= sizes[name]
    for name, group in {"expert_model": 2 * sizes["pipeline_model_parallel_size"], "vllm_tensor": 2}.items():
        sizes[f"{name}_parallel_size"] = 2 if number(f"{name}_parallel_size", 1) > 1 and ranks % group == 0 else 1
    return sizes | {"expert_tensor_parallel_size": 1}


def _batch(number: Callable[[str, int], int], ranks: int, layout: Mapping[str, int]) -> dict[str, int]:
    stages = layout["pipeline_model_parallel_size"]
    model = layout["tensor_model_parallel_size"] * stages * layout["context_parallel_size"]
    generations, micro = min(number("num_generations", 8), 4), min(number("micro_batch_size", 1), 2)
    if number("micro_batch_size", 1) % number("num_generations", 8) == 0:
        micro = generations  # --loss_type real requires whole groups
    rollout, step = number("generation_batch_size", 0), number("global_batch_size", 16)
    return {
        "num_generations": generations,
        "micro_batch_size": micro,
        "global_batch_size": math.lcm(generations, micro * (ranks // model) * stages),
        "steps_per_generation": 2 if number("steps_per_generation", 1) > 1 or rollout > step else 1,
    }


def differences(before: Flags, after: Flags) -> list[str]:
    """Return one line for every flag that differs, for people."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        old, new = (" ".join(flags[name]) if name in flags else None for flags in (before, after))
        if old != new:
            lines.append(f"--{name}: {'(not set)' if old is None else old} -> {'(left out)' if new is None else new}")
    return lines
