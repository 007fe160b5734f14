"""Checks of the teacher's checkpoint, before a model loads: its type, its layout, and its tokens.

A teacher scores the token ids that the policy has sampled. Vocabularies of equal size may give them other meanings, so
the maps from tokens to ids are compared, not their sizes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoTokenizer

from swift_megatron_grpo.arguments import models
from swift_megatron_grpo.arguments.derived import shape_of
from swift_megatron_grpo.arguments.environment import check_weights
from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.generation.protocol.model_identity import language_config, model_identity, read_model_config
from swift_megatron_grpo.settings.flag import Faults, as_typed, faults_of, raise_faults
from swift_megatron_grpo.settings.parallel import faults_of_layout
from swift_megatron_grpo.settings.teacher import Teacher

_SHOWN = 3  # tokens that an error names


def check_teacher(args: GRPOArguments, tokenizer: Any) -> None:
    """Raise ValueError unless the copy of --teacher_model can be loaded and reads the policy's tokens."""
    if args.of(Teacher).is_copy:
        check_weights(args.teacher_model, args.teacher_model_dir, "teacher_model")
        raise_faults(f"the teacher (--teacher_model): {fault}" for fault in _faults_of_model(args))
        other = AutoTokenizer.from_pretrained(args.teacher_model_dir, trust_remote_code=True)
        check_tokens(args.teacher_model, tokenizer.get_vocab(), other.get_vocab())


def _faults_of_model(args: GRPOArguments) -> Faults:
    name, config = args.teacher_model, read_model_config(args.teacher_model_dir)
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    yield from faults_of(models.check_type, name, config, args.teacher_model_meta.is_multimodal)
    yield from faults_of(models.check_kernels, name, config, on_hopper)
    yield from faults_of(models.check_attention_layers, name, config)
    yield from faults_of(models.check_sinks, name, config, as_typed(args.attention_backend))
    kinds = args.model_config["model_type"], config["model_type"]
    if kinds[0] != kinds[1] and (args.is_multimodal or args.teacher_model_meta.is_multimodal):
        yield (
            f"it is a {kinds[1]} and --model a {kinds[0]}: a model with an image part and another one do not read the "
            f"same rows; use a teacher of the type {kinds[0]}"
        )
    yield from faults_of_layout(args.reference_layout or args.layout, shape_of(config, name))
    rows = model_identity(args.model_config)["vocab_size"], language_config(config)["vocab_size"]
    if rows[1] < rows[0]:
        yield (
            f"its embedding has {rows[1]} rows and --model's {rows[0]}, so the policy may sample tokens that it does "
            "not have; use a teacher with the tokens of --model"
        )


def check_tokens(teacher: str, own: Mapping[str, int], others: Mapping[str, int]) -> None:
    """Raise ValueError unless the teacher has every token of the policy under the same id. It may have more."""
    differing = sorted((token for token, number in own.items() if others.get(token) != number), key=own.__getitem__)
    if not differing:
        return
    shown = ", ".join(f"{token!r} is {own[token]} and {others.get(token, 'unknown')}" for token in differing[:_SHOWN])
    raise ValueError(
        f"--teacher_model {teacher}: it would read other tokens than the policy samples: {len(differing)} of "
        f"{len(own)} tokens of --model have another id in its tokenizer ({shown}); use a teacher with the tokenizer of "
        "--model, of the same family"
    )
