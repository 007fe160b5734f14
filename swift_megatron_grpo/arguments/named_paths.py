"""Checks of all flags that name files, folders, or entries of tables of ms-swift and Megatron."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from swift.agent_template import agent_template_map
from swift.megatron.model.utils import ModelConfig  # of mcore-bridge
from swift.model import MODEL_MAPPING
from swift.template import TEMPLATE_MAPPING

from swift_megatron_grpo.arguments import local_files as files
from swift_megatron_grpo.arguments.advice import use_flag
from swift_megatron_grpo.arguments.derived import DerivedArguments, as_list
from swift_megatron_grpo.arguments.problems import check_all
from swift_megatron_grpo.arguments.value_checks import looks_like_hub_id
from swift_megatron_grpo.generation.conversations.checks import check_registered
from swift_megatron_grpo.generation.vllm.engine_kwargs import parse_json_object

_RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
_OF_MEGATRON = ("latest_checkpointed_iteration.txt", "iter_*", ".metadata", "metadata.json")


def check_paths(args: DerivedArguments) -> None:
    """Check that what a flag names exists, as far as this machine can have it."""
    checks: list[Callable[[], object]] = [
        partial(files.check_datasets, flag, as_list(getattr(args, flag))) for flag in ("dataset", "val_dataset")
    ]
    for flag in ("mcore_model", "mcore_adapter", "mcore_ref_model"):
        if getattr(args, flag) is not None:
            checks.append(partial(files.check_folder, flag, getattr(args, flag), _OF_MEGATRON))
    for flag in ("adapters", "ref_adapters"):
        local = [path for path in as_list(getattr(args, flag)) if not looks_like_hub_id(path)]
        checks += [partial(files.check_folder, flag, path, ("adapter_config.json",)) for path in local]
    checks += [partial(files.check_file, "custom_dataset_info", path) for path in as_list(args.custom_dataset_info)]
    if args.output_dir is not None:
        checks.append(partial(files.check_output, "output_dir", args.output_dir))
    tables = {"model_type": MODEL_MAPPING, "template": TEMPLATE_MAPPING, "agent_template": agent_template_map}
    for flag, known in tables.items():
        if getattr(args, flag) is not None:
            checks.append(partial(check_registered, flag, [getattr(args, flag)], known, "ms-swift's table"))
    checks += [partial(_check_settings, args.megatron_extra_kwargs), partial(_check_modules, args.recompute_modules)]
    check_all(checks)


def _check_settings(typed: str | dict[str, object] | None) -> None:
    """Check --megatron_extra_kwargs by name; otherwise the model's config ends the run with a TypeError."""
    known = {field.name for config in _configs(ModelConfig) for field in fields(config)}
    for name in parse_json_object("megatron_extra_kwargs", typed):
        if name not in known:
            close = difflib.get_close_matches(name, known)
            advice = f"use {' or '.join(close)}" if close else "leave it out"
            raise ValueError(f"--megatron_extra_kwargs: {name} is no setting of a model in Megatron; {advice}")


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for specialised in config.__subclasses__():
        yield from _configs(specialised)


def _check_modules(typed: Sequence[str] | None) -> None:
    """Check --recompute_modules, which Megatron asserts once the model is built."""
    wrong = [module for module in as_list(typed or []) if module not in _RECOMPUTED]
    if wrong:
        raise ValueError(
            f"--recompute_modules {' '.join(wrong)}: unknown; {use_flag('recompute_modules', _RECOMPUTED)}"
        )
