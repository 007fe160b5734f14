"""Checks of what a run finds on its machine: files, folders, plugins, registries of ms-swift, checkpoints, packages.

What looks local must exist. Otherwise ms-swift takes a missing file for a dataset of a hub, and searches for it for
45 s.
"""

import difflib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

from swift.agent_template import agent_template_map
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.megatron.model.utils import ModelConfig  # of mcore-bridge
from swift.model import MODEL_MAPPING
from swift.rewards import ORM, AsyncORM, orms
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.template import TEMPLATE_MAPPING
from swift.utils import import_external_file

from swift_megatron_grpo.arguments import reward_models
from swift_megatron_grpo.arguments.derived import DerivedArguments, as_list
from swift_megatron_grpo.data.checks import refuse_rows, without_row_numbers
from swift_megatron_grpo.data.files import DATA_SUFFIXES, fault_of_name
from swift_megatron_grpo.generation.conversations import checks as turns
from swift_megatron_grpo.generation.conversations.agent_flag import scheduler_of
from swift_megatron_grpo.generation.conversations.agents import is_agent
from swift_megatron_grpo.generation.conversations.checks import check_registered
from swift_megatron_grpo.generation.conversations.groups import answers_groups
from swift_megatron_grpo.generation.vllm import batch_invariance
from swift_megatron_grpo.generation.vllm.engine_kwargs import parse_json_object, passed_on
from swift_megatron_grpo.generation.vllm.model_packages import fault_of_packages
from swift_megatron_grpo.grading.rewards import columns_needed
from swift_megatron_grpo.output.checkpoints.sources import check_optimizer_state, check_quickly
from swift_megatron_grpo.output.recording import folder as recording
from swift_megatron_grpo.settings.flag import Faults, as_typed, faults_of, raise_faults
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.reward_models import RewardModels
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.sampling import Evaluation
from swift_megatron_grpo.settings.teacher import Teacher
from swift_megatron_grpo.weights.load.quantization import check_quantization

Loaded = TypeVar("Loaded")
WRITTEN_BY_CLIENT = (".mdl", ".git")  # where ModelScope's client reads the name of a model
_TRACKERS = ("wandb", "swanlab", "tensorboard")  # each is also the name of its package
_SAMPLED = re.compile(r"#\d+$")  # the number of rows
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_JSON_FLAGS = ("megatron_extra_kwargs", "model_kwargs", "vllm_limit_mm_per_prompt", "columns")
_RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
_OF_ADAPTER = {"lora_rank": "r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora"}  # by flag, in its config
_OF_MEGATRON = ("latest_checkpointed_iteration.txt", "iter_*", ".metadata", "metadata.json")
_TABLES: Mapping[str, Mapping[str, Any]] = {
    "model_type": MODEL_MAPPING, "template": TEMPLATE_MAPPING, "agent_template": agent_template_map,
}  # fmt: skip

# --report_to none, as in transformers: ms-swift's Megatron looks it up as the name of a callback
megatron_callbacks_map.setdefault("none", MegatronCallback)


def check_environment(args: DerivedArguments) -> None:
    """Check what the flags name on this machine, before ms-swift resolves them."""
    raise_faults(_faults(args))


def _faults(args: DerivedArguments) -> Faults:
    for flag in _JSON_FLAGS:
        yield from faults_of(parse_json_object, flag, getattr(args, flag))
    yield from faults_of(_reduce_engine_settings, args)
    yield from _faults_of_paths(args)
    for flag, table in _TABLES.items():
        if getattr(args, flag) is not None:
            yield from faults_of(check_registered, flag, [getattr(args, flag)], table, "ms-swift's table")
    trackers = as_list(args.callbacks) + as_list(args.report_to)
    for name in dict.fromkeys(name for name in trackers if name in _TRACKERS and not _is_installed(name)):
        yield f"--report_to {name}: the package {name} is not installed; pip install {name}, or leave it out"
    for flag in ("callbacks", "report_to"):
        registry = "swift.megatron.callbacks.megatron_callbacks_map"
        yield from faults_of(check_registered, flag, as_list(getattr(args, flag)), megatron_callbacks_map, registry)
    yield from _faults_of_megatron_settings(args)
    yield from faults_of(_check_checkpoints, args)
    yield from faults_of(check_reward_registry, args)
    if args.of(Evaluation).runs and not args.of(Teacher).is_alone:
        yield from faults_of(lambda: args.evaluation_names)
        yield from faults_of(lambda: args.correct_reward)
    yield from faults_of(_check_turns, args)
    yield from faults_of(check_recording, args)
    yield from faults_of(check_quantization, args.rollout_quantization, args.vllm_enable_lora, None, None)
    if not args.uses_servers and batch_invariance.is_requested():
        yield (
            f"{batch_invariance.VARIABLE} is set: the training processes would get vLLM's NCCL, of one channel, and "
            "from some versions a torch.bmm without gradients; unset it, or use --vllm_mode server with "
            "--batch_invariant true"
        )
    if args.optimizer == "muon" and (missing := _missing_for_muon()) is not None:
        yield f"--optimizer muon: {missing}, or use --optimizer adam"
    if (fault := fault_of_packages(args.model, args.model_type)) is not None:
        yield fault
    if not _is_installed("vllm"):
        yield "vLLM, which generates the completions, is not installed; use the commands of docs/install.md"


def _is_installed(package: str) -> bool:
    """Return True for a package; the folder of its logs, which may have its name, has no origin."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _missing_for_muon() -> str | None:
    if not _is_installed("megatron.core.optimizer.emerging_optimizers"):
        return "this megatron-core does not know emerging-optimizers 0.3; install megatron-core 0.18.2"
    if not _is_installed("emerging_optimizers"):
        return (
            "the package emerging-optimizers is not installed; pip install 'emerging-optimizers>=0.3,<0.4', which "
            "needs Python 3.12"
        )
    return None


# ---- plugins and registries


def import_plugins(args: DerivedArguments) -> None:
    """Import files that register reward functions and more. ms-swift imports them again later, without effect."""
    for flag in ("external_plugins", "custom_register_path"):
        for file in as_list(getattr(args, flag)):
            import_plugin(flag, file, import_external_file)
    if args.agent is not None:
        if args.uses_servers:
            raise ValueError(
                f"--agent {args.agent}: agents run beside vLLM, which --vllm_mode server puts behind `swift rollout`; "
                "give the flag to that, and use --vllm_server_pass_dataset true here"
            )
        load = partial(import_plugin, "agent", load=import_external_file)
        args.multi_turn_scheduler = scheduler_of(args.agent, args.multi_turn_scheduler, args.gym_env, load)
        args.use_gym_env = args.use_gym_env is not False


def import_plugin(flag: str, file: str, load: Callable[[str], Loaded]) -> Loaded:
    """Import a file, which may raise anything."""
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"--{flag} {file}: the file {path} does not exist; use another path")
    try:
        return load(file)
    except SystemExit as ended:  # also of argparse, which reads the flags of the run
        raise ValueError(
            f"--{flag} {file}: importing it ends the process (SystemExit: {ended}): it is run as a script; use "
            '`if __name__ == "__main__":` before what parses arguments or calls sys.exit'
        ) from None
    except Exception as error:
        raise ValueError(
            f"--{flag} {file}: importing it raises {type(error).__name__}: {error}; use a file that "
            f"`python {file}` runs"
        ) from error


def check_reward_registry(args: DerivedArguments) -> None:
    """Check names of reward functions; skipped while the servers' part in grading is unknown."""
    rewards = args.of(Rewards)
    is_graded = bool(args.reward_funcs) or not (rewards.models.all or rewards.by_environment or args.of(Teacher).exists)
    if not rewards.by_servers and is_graded:
        check_reward_functions(args.reward_funcs, orms)
    reward_models.check_plugins(rewards.models)


def check_reward_functions(names: Sequence[Any], known: Mapping[str, Any]) -> None:
    """Check --reward_funcs: a registered entry must be a class, and callables of a script need no registry."""
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
        if inspect.isclass(entry):
            _check_reward_class(name, entry)


def _check_reward_class(name: str, entry: type) -> None:
    """Check what a run will do with a class: create an object with `args`, and call it with all columns."""
    called = next((vars(base)["__call__"] for base in entry.__mro__ if "__call__" in vars(base)), None)
    usable = "use a class with __call__(self, completions, **kwargs), which returns one number for each completion"
    if called in (None, ORM.__call__, AsyncORM.__call__):
        raise ValueError(f"--reward_funcs {name}: {entry.__name__} has no __call__; {usable}")
    accepted = inspect.signature(called).parameters.values()
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in accepted):
        raise ValueError(
            f"--reward_funcs {name}: the __call__ of {entry.__name__} has no **kwargs, and it is called with all "
            f"columns of the dataset, the messages and more; {usable}"
        )
    try:
        inspect.signature(entry).bind(args=None)
    except TypeError as error:
        raise ValueError(
            f"--reward_funcs {name}: ms-swift creates {entry.__name__}(args=...), and its __init__ does not accept "
            f"that ({error}); use __init__(self, args=None, **kwargs), or leave __init__ out of a class of ORM"
        ) from None


def create_reward_functions(args: DerivedArguments) -> list[Callable[..., Any]]:
    """Create the objects of --reward_funcs; their __init__ may raise anything."""
    functions: list[Callable[..., Any]] = []
    for function in args.reward_funcs:
        try:
            functions += resolve_reward_funcs([function], args=args)[0]
        except Exception as error:
            raise ValueError(
                f"--reward_funcs {function}: creating it raises {type(error).__name__}: {error}; correct its __init__, "
                f"or use another one of {', '.join(sorted(orms))}"
            ) from error
    return functions


def faults_of_columns(names: Sequence[Any] | None, dataset: Any) -> Faults:
    """Yield what the functions of --reward_funcs need, and the columns of a dataset do not have."""
    columns = without_row_numbers(dataset).column_names
    numbers = {name for name, feature in dataset.features.items() if re.search("int|float", str(feature))}
    for name in names or ():
        function = orms.get(name) if isinstance(name, str) else name
        needed = columns_needed(function) if inspect.isclass(function) else []
        if missing := [column for column in needed if column not in columns]:
            yield (
                f"--reward_funcs {name} needs the column {missing[0]}, and the columns are {', '.join(columns)}; "
                f'rename one, or map it: --columns \'{{"<your column>": "{missing[0]}"}}\''
            )
            continue
        if "solution" in numbers & {*needed} and function.__module__.startswith("swift."):
            yield f'--reward_funcs {name} compares texts, and the column solution has numbers; use texts: "7" for 7'
        for column in needed:
            values = dataset[column] if column in numbers else ()
            wrong = [(row, f"has NaN in the column {column}") for row, value in enumerate(values) if value != value]
            fault = f"cannot be graded by --reward_funcs {name}"
            yield from faults_of(refuse_rows, dataset, wrong, fault, "; correct these rows, or remove them")


def _check_turns(args: DerivedArguments) -> None:
    if args.uses_servers:  # a server has its own schedulers and environments, and reports them later
        turns.check_max_turns(args.max_turns)
        return
    turns.check_multi_turn(args)
    if answers_groups(args.multi_turn_scheduler) and args.completion_length_limit_scope == "total":
        raise ValueError(
            f"--multi_turn_scheduler {args.multi_turn_scheduler} runs all conversations of a prompt together, and "
            "--completion_length_limit_scope total limits each; use per_round"
        )


def check_agent_reads_text(scheduler: str | None, media: str | None) -> None:
    """Refuse rows with media for an agent, and for conversations that branch. `media`: that the rows have."""
    if media is not None and (is_agent(scheduler) or answers_groups(scheduler)):
        raise ValueError(
            f"--multi_turn_scheduler {scheduler}: rows of the dataset have {media}, which neither calls of an agent "
            "nor a scheduler with async_infer() can have; use a scheduler with step(), or rows of text"
        )


def _reduce_engine_settings(args: DerivedArguments) -> None:
    """Leave out of --vllm_engine_kwargs what the engine has anyway; refuse what the run excludes."""
    settings = parse_json_object("vllm_engine_kwargs", args.vllm_engine_kwargs)
    if not args.uses_servers:  # otherwise the flag has no effect, as the start-up log notes
        args.vllm_engine_kwargs = passed_on(settings, args.vllm_enable_lora, vars(args))


def _faults_of_megatron_settings(args: DerivedArguments) -> Faults:
    """Check --megatron_extra_kwargs and --recompute_modules by name: Megatron fails once the model is built."""
    known = {field.name for config in _configs(ModelConfig) for field in fields(config)}
    with suppress(ValueError):  # it is not JSON, as another fault says
        for name in parse_json_object("megatron_extra_kwargs", args.megatron_extra_kwargs):
            close = difflib.get_close_matches(name, known)
            if name not in known:
                advice = f"use {' or '.join(close)}" if close else "leave it out"
                yield f"--megatron_extra_kwargs: {name} is not a setting of a model in Megatron; {advice}"
    wrong = [module for module in as_list(args.recompute_modules or []) if module not in _RECOMPUTED]
    if wrong:
        yield f"--recompute_modules {' '.join(wrong)}: unknown; use --recompute_modules {' or '.join(_RECOMPUTED)}"


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for specialised in config.__subclasses__():
        yield from _configs(specialised)


# ---- the model, checkpoints and adapters


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


def check_weights(model: str, folder: str, flag: str = "model") -> None:
    """Raise ValueError if a model that a run is about to load has none; mcore-bridge reads safetensors only."""
    if not any(Path(folder, name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ValueError(
            f"--{flag} {model}: the folder {folder} has no weights: neither model.safetensors nor "
            "model.safetensors.index.json; use the folder of a whole checkpoint, converted to safetensors"
        )


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
        trained = {name: getattr(args, name) for name in _OF_ADAPTER}
        for folder in as_list(args.adapters):  # ms-swift takes its settings later
            trained |= _adapter_settings(folder)
        check_reference_adapter(args.ref_adapters, trained, args.modules_to_save)


def _adapter_settings(folder: str) -> dict[str, Any]:
    """Return the flags with which a saved adapter was created; none if it has no adapter_config.json."""
    file = Path(folder).expanduser() / "adapter_config.json"
    saved = json.loads(file.read_text()) if file.is_file() else {}
    return {flag: saved[key] for flag, key in _OF_ADAPTER.items() if key in saved}


def check_reference_adapter(folders: Sequence[str], trained: Mapping[str, Any], modules_to_save: Sequence[str]) -> None:
    """Check --ref_adapters: ms-swift creates its adapter with the settings of the trained one, `trained`."""
    typed, own = f"--ref_adapters {' '.join(folders)}", _adapter_settings(folders[0])
    if len(folders) != 1:
        raise ValueError(f"{typed}: the reference has one adapter; use one folder")
    if modules_to_save:
        flags = f"--modules_to_save {' '.join(modules_to_save)}"
        raise ValueError(
            f"--ref_adapters with {flags}: a reference adapter has no whole modules; leave one of them out"
        )
    if not own:
        raise ValueError(f"{typed}: no adapter_config.json is there; use a folder with a saved adapter")
    other = [flag for flag, value in own.items() if value != trained[flag]]
    if other:
        needed, given = (" ".join(f"--{f} {as_typed(values[f])}" for f in other) for values in (own, trained))
        raise ValueError(f"{typed}: its adapter has {needed}, and the trained one {given}; use {needed}")


# ---- files and folders


def _faults_of_paths(args: DerivedArguments) -> Faults:
    """Yield what a flag names and does not exist, as far as this machine can have it."""
    resumed_from = args.mcore_model or args.mcore_adapter or args.adapters  # their args.json contains the model
    if args.model is None and not resumed_from:
        yield "no model is set; use --model with a folder or a hub id"
    if not args.dataset and not args.cached_dataset and not (resumed_from and args.load_data_args):
        yield "no dataset is set; use --dataset with a file or a hub id"
    if (args.system or "").endswith(".txt") and not Path(args.system).is_file():  # which ms-swift would read
        path = Path(args.system).absolute()
        yield f"--system {args.system}: the file {path} does not exist{similar(path)}; use the text itself, or its file"
    for flag in ("model", "ref_model", "teacher_model"):
        if getattr(args, flag) is not None:
            yield from faults_of(check_model_path, getattr(args, flag), flag, args.use_hf)
    for model in args.of(RewardModels).all:
        if model.address is None:
            yield from faults_of(check_model_path, model.typed, "reward_model", args.use_hf)
    for flag in ("dataset", "val_dataset"):
        for typed in as_list(getattr(args, flag)):
            yield from filter(None, [_fault_of_dataset(flag, typed)])
    for flag in ("mcore_model", "mcore_adapter", "mcore_ref_model"):
        if getattr(args, flag) is not None:
            yield from _faults_of_folder(flag, getattr(args, flag), _OF_MEGATRON)
    for flag in ("adapters", "ref_adapters", "reward_adapters"):
        for typed in as_list(getattr(args, flag) or []):
            if not looks_like_hub_id(typed):
                yield from _faults_of_folder(flag, typed, ("adapter_config.json",))
    for typed in as_list(args.custom_dataset_info):
        path = Path(typed).expanduser()
        if not path.is_file():
            yield f"--custom_dataset_info {typed}: the file {path.absolute()} does not exist; use another path"
    for flag in ("output_dir", "rollout_dump", "tensorboard_dir"):
        if getattr(args, flag) is not None:
            yield from filter(None, [_fault_of_written(flag, getattr(args, flag))])


def _fault_of_written(flag: str, typed: str) -> str | None:
    """Return why a run cannot write to a folder, which may not exist yet: a folder inside it is made and removed."""
    path = Path(typed).expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))  # False if it is not readable
    if not typed.strip():
        return f"--{flag} {typed!r} names no folder; use --{flag} megatron_output/run, or leave it out"
    if there.is_file():
        return f"--{flag} {typed}: {there} is a file; use --{flag} {path.with_suffix('')}_run"
    try:
        Path(mkdtemp(dir=there, prefix=".writable-")).rmdir()
    except OSError as error:
        return f"--{flag} {typed}: nothing can be written to {there} ({error.strerror}); use a folder of your own"
    return None


def _fault_of_dataset(flag: str, typed: str) -> str | None:
    if not typed.strip():
        return f"--{flag} '': no name; use the path of a file, or a hub id"
    path = Path(typed)
    if not path.exists():
        path = Path(_SAMPLED.sub("", typed))
    if path.is_file() and str(path) != typed and int(typed.rpartition("#")[2]) == 0:
        return f"--{flag} {typed} takes none of its rows; use --{flag} {path}#500, or the file without a number"
    if path.is_file() and path.stat().st_size == 0:
        return f"--{flag} {typed}: the file is empty; use a file with one JSON object per line"
    looks_local = str(path).startswith(("/", "./", "../", "~")) or path.suffix.lower() in DATA_SUFFIXES
    if path.exists():
        fault = fault_of_name(path)
        return f"--{flag} {typed}: {fault}" if fault else None
    if not looks_local:
        return None
    if str(path).startswith("~") and path.expanduser().exists():
        return f"--{flag} {typed}: ms-swift does not expand ~; use --{flag} {path.expanduser()}"
    return f"--{flag} {typed}: {path.absolute()} does not exist{similar(path)}; use the path of a file, or a hub id"


def _faults_of_folder(flag: str, typed: str, has: Sequence[str]) -> Faults:
    """Yield why a folder of this machine does not exist, or has none of these files (patterns)."""
    path = Path(typed).expanduser()
    start, advice = f"--{flag} {typed}: the folder {path.absolute()}", "use one that a run has saved, or leave it out"
    if not path.is_dir():
        yield f"{start} does not exist{similar(path)}; {advice}"
    elif not any(any(path.glob(pattern)) for pattern in has):
        yield f"{start} has no {has[0]}; {advice}"


def similar(path: Path) -> str:
    """Return a phrase with the names next to a missing path that are like it."""
    if not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [sibling.name for sibling in path.parent.iterdir()])
    return f" (next to it: {', '.join(close)})" if close else ""
