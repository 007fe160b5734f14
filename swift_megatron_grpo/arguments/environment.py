"""Checks of what a run finds on its machine: files, folders, plugins, registries of ms-swift, checkpoints, packages.

What looks local must exist. Otherwise ms-swift takes a missing file for a dataset of a hub, and searches for it for
45 s.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift.agent_template import agent_template_map
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.megatron.model.utils import ModelConfig  # of mcore-bridge
from swift.model import MODEL_MAPPING
from swift.rewards import orms
from swift.rollout import MultiTurnScheduler, envs, multi_turns
from swift.template import TEMPLATE_MAPPING
from swift.utils import import_external_file

from swift_megatron_grpo.arguments.derived import DerivedArguments, as_list
from swift_megatron_grpo.arguments.problems import check_all
from swift_megatron_grpo.generation.conversations import checks as turns
from swift_megatron_grpo.generation.conversations.checks import check_registered
from swift_megatron_grpo.generation.vllm.engine_kwargs import check_engine_kwargs, parse_json_object
from swift_megatron_grpo.output.checkpoints.sources import check_optimizer_state, check_quickly
from swift_megatron_grpo.output.recording import folder as recording
from swift_megatron_grpo.settings.flag import as_typed
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.sampling import Evaluation
from swift_megatron_grpo.weights.load.quantization import check_quantization

WRITTEN_BY_CLIENT = (".mdl", ".git")  # where ModelScope's client reads the name of a model
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")
_SAMPLED = re.compile(r"#\d+$")  # the number of rows
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_JSON_FLAGS = ("megatron_extra_kwargs", "model_kwargs", "vllm_limit_mm_per_prompt", "columns")
_RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
_OF_MEGATRON = ("latest_checkpointed_iteration.txt", "iter_*", ".metadata", "metadata.json")

# --report_to none, as in transformers: ms-swift's Megatron looks it up as the name of a callback
megatron_callbacks_map.setdefault("none", MegatronCallback)


def check_environment(args: DerivedArguments) -> None:
    """Check what the flags name on this machine, before ms-swift resolves them."""
    check_all(
        [
            partial(_check_json, args),
            partial(_check_model_path, args),
            partial(check_paths, args),
            partial(_check_checkpoints, args),
            partial(check_reward_registry, args),
            partial(_check_evaluation, args),
            partial(_check_callbacks, args),
            partial(_check_turns, args),
            partial(check_recording, args),
            partial(check_quantization, args.rollout_quantization, args.vllm_enable_lora, None, None),
            _check_vllm_installed,
        ]
    )


# ---- plugins and registries


def import_plugins(args: DerivedArguments) -> None:
    """Import files that register reward functions and more. ms-swift imports them again later, without effect."""
    for flag in ("external_plugins", "custom_register_path"):
        for file in as_list(getattr(args, flag)):
            import_plugin(flag, file, import_external_file)


def import_plugin(flag: str, file: str, load: Callable[[str], object]) -> None:
    """Import a file, which may raise anything."""
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"--{flag} {file}: the file {path} does not exist; use another path")
    try:
        load(file)
    except Exception as error:
        raise ValueError(
            f"--{flag} {file}: importing it raises {type(error).__name__}: {error}; use a file that "
            f"`python {file}` runs"
        ) from error


def check_reward_registry(args: DerivedArguments) -> None:
    """Check names of reward functions; skipped while the servers' part in grading is unknown."""
    rewards = args.of(Rewards)
    if not rewards.by_servers and (args.reward_funcs or not rewards.by_environment):
        check_reward_functions(args.reward_funcs, orms)


def check_reward_functions(names: Sequence[Any], known: Mapping[str, Any]) -> None:
    """Check --reward_funcs; callables, which a script may pass, need no registry.

    ms-swift calls a registered entry with `args` to create the function, so it must be a class.
    """
    if not names:
        choices = ", ".join(sorted(known))
        raise ValueError(f"no reward function is set; use --reward_funcs with one or more of {choices}")
    check_registered("reward_funcs", [name for name in names if isinstance(name, str)], known, "swift.rewards.orms")
    for name in names:
        entry = known[name] if isinstance(name, str) else None
        takes_completions = inspect.isfunction(entry) and "completions" in inspect.signature(entry).parameters
        if entry is not None and (takes_completions or not callable(entry)):
            raise ValueError(
                f"--reward_funcs {name}: orms[{name!r}] is of type {type(entry).__name__}, and ms-swift creates an "
                f"object from it; use a class with __call__(self, completions, **kwargs) in its place"
            )


def _check_evaluation(args: DerivedArguments) -> None:
    """Check names against the datasets and the reward functions."""
    if args.of(Evaluation).runs:
        check_all([lambda: args.evaluation_names, lambda: args.correct_reward])


def _check_callbacks(args: DerivedArguments) -> None:
    for flag in ("callbacks", "report_to"):
        registry = "swift.megatron.callbacks.megatron_callbacks_map"
        check_registered(flag, as_list(getattr(args, flag)), megatron_callbacks_map, registry)


def _check_turns(args: DerivedArguments) -> None:
    if args.uses_servers:  # a server has its own schedulers and environments, and reports them later
        turns.check_max_turns(args.max_turns)
        return
    with_own_run = [name for name, scheduler in multi_turns.items() if scheduler.run is not MultiTurnScheduler.run]
    turns.check_multi_turn(
        args.multi_turn_scheduler, args.max_turns, args.use_gym_env, args.gym_env, multi_turns, envs, with_own_run
    )


# ---- JSON


def _check_json(args: DerivedArguments) -> None:
    """Check the flags that take JSON, and the settings of vLLM in the training processes among them."""

    def check_engine() -> None:
        settings = parse_json_object("vllm_engine_kwargs", args.vllm_engine_kwargs)
        if not args.uses_servers:  # otherwise the flag has no effect, as the start-up log notes
            check_engine_kwargs(settings, adapter_only=args.vllm_enable_lora)

    check_all([check_engine, *(partial(parse_json_object, flag, getattr(args, flag)) for flag in _JSON_FLAGS)])


def _check_settings(typed: str | dict[str, object] | None) -> None:
    """Check --megatron_extra_kwargs by name; otherwise the model's config ends the run with a TypeError."""
    known = {field.name for config in _configs(ModelConfig) for field in fields(config)}
    for name in parse_json_object("megatron_extra_kwargs", typed):
        if name not in known:
            close = difflib.get_close_matches(name, known)
            advice = f"use {' or '.join(close)}" if close else "leave it out"
            raise ValueError(f"--megatron_extra_kwargs: {name} is not a setting of a model in Megatron; {advice}")


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for specialised in config.__subclasses__():
        yield from _configs(specialised)


def _check_modules(typed: Sequence[str] | None) -> None:
    """Check --recompute_modules, which Megatron asserts once the model is built."""
    wrong = [module for module in as_list(typed or []) if module not in _RECOMPUTED]
    if wrong:
        raise ValueError(
            f"--recompute_modules {' '.join(wrong)}: unknown; use --recompute_modules {' or '.join(_RECOMPUTED)}"
        )


# ---- the model, checkpoints and adapters


def _check_model_path(args: DerivedArguments) -> None:
    resumed_from = args.mcore_model or args.mcore_adapter or args.adapters  # their args.json contains the model
    if args.model is None and not resumed_from:
        raise ValueError("no model is set; use --model with a folder or a hub id")
    for flag in ("model", "ref_model"):
        if getattr(args, flag) is not None:
            check_model_path(getattr(args, flag), flag, bare_ids=args.use_hf)


def check_model_path(model: str, flag: str = "model", bare_ids: bool = False) -> None:
    """Accept a folder with a config.json, or a string that may be a hub id; with `bare_ids` also without a slash."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"--{flag} {model}: the folder {path.resolve()} has no config.json, so it is not a model; use the "
                "folder of a checkpoint of transformers"
            )
        return
    if looks_like_hub_id(model, bare_ids):
        return
    advice = "use a folder with a config.json, or a hub id of the form organisation/name"
    raise ValueError(f"--{flag} {model}: the folder {path.resolve()} does not exist{similar(path)}; {advice}")


def looks_like_hub_id(typed: str, bare_ids: bool = False) -> bool:
    """Return True for organisation/name, unless there is such a folder."""
    looks_local = typed.startswith(("/", "./", "../", "~")) or typed.count("/") > 1 or Path(typed).exists()
    return not looks_local and (_HUB_ID.fullmatch(typed) is not None or bare_ids)


def is_from_modelscope(folder: str) -> bool:
    """Return True if ModelScope's client has written this folder, and so can tell if the model is the latest.

    Before it trains, ms-swift asks ModelScope (--check_model). For another folder it asks for a model named `unknown`,
    which fails, and without a network connection only after 22 seconds.
    """
    return any(Path(folder, name).exists() for name in WRITTEN_BY_CLIENT)


def _check_checkpoints(args: DerivedArguments) -> None:
    """Check the files that ms-swift reads next; the trainer verifies the large ones, in parallel."""
    if args.verify_checkpoint:
        check_quickly(args.checkpoint_sources)
    if args.resumes and not args.no_load_optim:
        check_optimizer_state(source for source in args.checkpoint_sources if source.flag != "mcore_ref_model")


def check_recording(args: DerivedArguments) -> None:
    """Check the recording flags, and the folders on disk against the settings of this run."""
    folders = args.of(Recording)
    if folders.dump is not None and not args.of(Rewards).by_servers:
        stopped_early = dict(args.typed) if args.resume == "auto" else None  # before its first checkpoint
        recording.check_dump(folders.dump, args.recording_settings(), args.resumes, stopped_early)
    if folders.replay is not None:
        recording.check_replay(folders.replay, args.recording_settings())


def check_reference_adapter_of(args: DerivedArguments) -> None:
    if args.ref_adapters:
        trained = {name: getattr(args, name) for name in ("lora_rank", "lora_alpha", "use_rslora")}
        for folder in as_list(args.adapters):  # ms-swift takes its settings later
            trained |= adapter_settings(folder)
        check_reference_adapter(args.ref_adapters, trained, args.modules_to_save)


def adapter_settings(folder: str) -> dict[str, Any]:
    """Return the flags with which a saved adapter was created; none if it has no adapter_config.json."""
    file = Path(folder).expanduser() / "adapter_config.json"
    saved = json.loads(file.read_text()) if file.is_file() else {}
    flags = {"lora_rank": "r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora"}
    return {flag: saved[key] for flag, key in flags.items() if key in saved}


def check_reference_adapter(folders: Sequence[str], trained: Mapping[str, Any], modules_to_save: Sequence[str]) -> None:
    """Check --ref_adapters: ms-swift creates its adapter with the settings of the trained one.

    `trained`: --lora_rank, --lora_alpha and --use_rslora.
    """
    if len(folders) != 1:
        raise ValueError(f"--ref_adapters {' '.join(folders)}: the reference has one adapter; use one folder")
    if modules_to_save:
        flags = f"--modules_to_save {' '.join(modules_to_save)}"
        raise ValueError(
            f"--ref_adapters with {flags}: a reference adapter has no whole modules; leave one of them out"
        )
    own = adapter_settings(folders[0])
    if not own:
        raise ValueError(
            f"--ref_adapters {folders[0]}: no adapter_config.json is there; use a folder with a saved adapter"
        )
    other = [flag for flag, value in own.items() if value != trained[flag]]
    if other:
        needed, given = (" ".join(f"--{f} {as_typed(values[f])}" for f in other) for values in (own, trained))
        raise ValueError(
            f"--ref_adapters {folders[0]}: its adapter has {needed}, and the trained one {given}; use {needed}"
        )


def _check_vllm_installed() -> None:
    if find_spec("vllm") is None:
        raise ValueError(
            'vLLM, which generates the completions, is not installed; pip install "swift-megatron-grpo[gpu]"'
        )


# ---- files and folders


def check_paths(args: DerivedArguments) -> None:
    """Check that what a flag names exists, as far as this machine can have it."""
    checks: list[Callable[[], object]] = [
        partial(check_datasets, flag, as_list(getattr(args, flag))) for flag in ("dataset", "val_dataset")
    ]
    for flag in ("mcore_model", "mcore_adapter", "mcore_ref_model"):
        if getattr(args, flag) is not None:
            checks.append(partial(check_folder, flag, getattr(args, flag), _OF_MEGATRON))
    for flag in ("adapters", "ref_adapters"):
        local = [path for path in as_list(getattr(args, flag)) if not looks_like_hub_id(path)]
        checks += [partial(check_folder, flag, path, ("adapter_config.json",)) for path in local]
    checks += [partial(check_file, "custom_dataset_info", path) for path in as_list(args.custom_dataset_info)]
    if args.output_dir is not None:
        checks.append(partial(check_output, "output_dir", args.output_dir))
    tables = {"model_type": MODEL_MAPPING, "template": TEMPLATE_MAPPING, "agent_template": agent_template_map}
    for flag, known in tables.items():
        if getattr(args, flag) is not None:
            checks.append(partial(check_registered, flag, [getattr(args, flag)], known, "ms-swift's table"))
    checks += [partial(_check_settings, args.megatron_extra_kwargs), partial(_check_modules, args.recompute_modules)]
    check_all(checks)


def check_datasets(flag: str, typed: Sequence[str]) -> None:
    """Check the datasets of --dataset or --val_dataset that are files, or look as if they should be."""
    problems = [problem for dataset in typed if (problem := _problem_of_dataset(flag, dataset)) is not None]
    if problems:
        raise ValueError("\n".join(problems))


def _problem_of_dataset(flag: str, typed: str) -> str | None:
    path = Path(typed)
    if not path.exists():
        path = Path(_SAMPLED.sub("", typed))
    if path.is_file() and str(path) != typed and int(typed.rpartition("#")[2]) == 0:
        return f"--{flag} {typed} takes none of its rows; use --{flag} {path}#500, or the file without a number"
    if path.is_file() and path.stat().st_size == 0:
        return f"--{flag} {typed}: the file is empty; use a file with one JSON object per line"
    if path.exists() or not _looks_local(str(path)):
        return None
    if str(path).startswith("~") and path.expanduser().exists():
        return f"--{flag} {typed}: ms-swift does not expand ~; use --{flag} {path.expanduser()}"
    return f"--{flag} {typed}: {path.absolute()} does not exist{similar(path)}; use the path of a file, or a hub id"


def _looks_local(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or Path(path).suffix.lower() in DATA_SUFFIXES


def explain_unreadable(flag: str, typed: Sequence[str]) -> None:
    """Raise ValueError for the first line of a dataset's files that is not a JSON object.

    Files are read only after they could not be loaded: they may be large.
    """
    for dataset in typed:
        path = Path(dataset if Path(dataset).exists() else _SAMPLED.sub("", dataset))
        if path.is_file() and path.suffix.lower() == ".jsonl":
            _check_lines(flag, path)


def _check_lines(flag: str, path: Path) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            fault = None
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    fault = "not a JSON object"
            except ValueError as error:
                fault = f"not JSON ({error})"
            if fault is not None:
                raise ValueError(f"--{flag} {path}, line {number}: {fault}; use one JSON object per line")


def check_folder(flag: str, typed: str, has: Sequence[str]) -> None:
    """Check that a folder of this machine exists and has one of these files (patterns)."""
    path = Path(typed).expanduser()
    if not path.is_dir():
        raise ValueError(
            f"--{flag} {typed}: the folder {path.absolute()} does not exist{similar(path)}; use one that a run has "
            "saved, or leave it out"
        )
    if not any(any(path.glob(pattern)) for pattern in has):
        raise ValueError(
            f"--{flag} {typed}: the folder {path.absolute()} has no {has[0]}; use a checkpoint that a run has "
            "saved, or leave it out"
        )


def check_file(flag: str, typed: str) -> None:
    if not Path(typed).expanduser().is_file():
        raise ValueError(f"--{flag} {typed}: the file {Path(typed).absolute()} does not exist; use another path, or "
                         "leave it out")  # fmt: skip


def check_output(flag: str, typed: str) -> None:
    """Check that a folder can be created there."""
    path = Path(typed).expanduser().absolute()
    file = next((parent for parent in (path, *path.parents) if parent.is_file()), None)
    if file is not None:
        raise ValueError(f"--{flag} {typed}: {file} is a file; use --{flag} {path.with_suffix('')}_run")


def similar(path: Path) -> str:
    """Return a phrase with the names next to a missing path that are like it."""
    if not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [sibling.name for sibling in path.parent.iterdir()])
    return f" (next to it: {', '.join(close)})" if close else ""
