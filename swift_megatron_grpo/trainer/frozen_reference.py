"""The frozen copy of the model that is the reference policy of a run with full tuning, loaded by ms-swift."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from swift.megatron.model import get_mcore_model
from swift.megatron.utils.megatron_lm_utils import load_mcore_checkpoint
from swift.template import Template
from swift.utils import safe_snapshot_download

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.loop.assemble import FrozenReference, reference_engine_settings
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.training.preparation import prepare_frozen
from swift_megatron_grpo.training.reference import ReferenceLayout
from swift_megatron_grpo.weights.export.unread_tensors import every_tensor_read


def load_frozen_reference(args: GRPOArguments, config: GRPOConfig, template: Template) -> FrozenReference | None:
    """Load the frozen copy, in its own parallel layout if it has one; None if the reference policy is not a copy."""
    settings = config.reference
    if settings.beta == 0 or settings.model_dir is None:
        return None
    sizes = settings.layout(config.batch.layout)
    layout = None if sizes is None else ReferenceLayout(sizes, args.ddp_timeout // 60)
    with nullcontext() if layout is None else layout.active():
        of_copy = args.of_reference()
        models = get_mcore_model(of_copy, template.config)
        for model in models:
            model.to(torch.cuda.current_device())
        if settings.mcore_ref_model is not None:
            load_mcore_checkpoint(of_copy, models, load_arg="mcore_ref_model")
        else:
            folder = safe_snapshot_download(settings.model_dir, use_hf=args.use_hf, hub_token=args.hub_token)
            with every_tensor_read(models[0].config, args.unread_tensors):
                models[0].config.bridge.load_weights(models, folder)
        prepare_frozen(models, args.fast_kernels)
        return FrozenReference(Passes(models, reference_engine_settings(config)), layout)
