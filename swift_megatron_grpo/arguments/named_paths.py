"""Checks of all flags that name files, folders, or entries of ms-swift's tables of models and templates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from swift.model import MODEL_MAPPING
from swift.template import TEMPLATE_MAPPING

from swift_megatron_grpo.arguments import local_files as files
from swift_megatron_grpo.arguments.derived import DerivedArguments, as_list
from swift_megatron_grpo.arguments.problems import check_all
from swift_megatron_grpo.arguments.value_checks import looks_like_hub_id
from swift_megatron_grpo.conversations.registries import check_registered

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
    for flag, known in (("model_type", MODEL_MAPPING), ("template", TEMPLATE_MAPPING)):
        if getattr(args, flag) is not None:
            checks.append(partial(check_registered, flag, [getattr(args, flag)], known, "ms-swift's table"))
    check_all(checks)
