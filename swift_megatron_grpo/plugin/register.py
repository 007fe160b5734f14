"""The one place that hooks into ms-swift: replace its Megatron GRPO trainer and arguments with this package's.

Nothing is imported until ms-swift needs it, so `register()` may be called before ms-swift is imported, or from a
script. Other rlhf types are left unchanged.
"""

import gc
import sys
from functools import cache
from types import ModuleType
from typing import Any

from swift_megatron_grpo.generation.vllm.cuda_runtime import find_runtime_beside_tilelang
from swift_megatron_grpo.generation.vllm.triton_cache import set_triton_cache
from swift_megatron_grpo.plugin.command_line import selects_grpo
from swift_megatron_grpo.runtime.import_hooks import after_import
from swift_megatron_grpo.runtime.refusals import (
    lost_connections_reported_by_torchrun,
    reported_by_torchrun,
    set_up_reported_by_torchrun,
)

TRAINER = "MegatronGRPOTrainer"  # the name that MegatronRLHF.prepare_trainer looks up in swift.megatron.trainers


@cache  # idempotent
def register() -> None:
    """Install hooks on the two ms-swift modules that provide its GRPO trainer and arguments, and on vLLM."""
    set_triton_cache()
    find_runtime_beside_tilelang()
    after_import("swift.megatron.trainers", _replace_trainer)
    after_import("swift.megatron.pipelines.train.rlhf", _replace_arguments)


def _replace_trainer(trainers: ModuleType) -> None:
    """Resolve the trainer's name at look-up, not now: its own imports need swift.megatron.trainers to be finished.

    A `__getattr__` and not a property: an AttributeError inside a property would fall back to ms-swift's trainer.
    """

    class Trainers(type(trainers)):  # type: ignore[misc]  # ms-swift's lazy module
        def __getattr__(self, name: str) -> Any:
            if name == TRAINER:
                from swift_megatron_grpo.trainer.grpo_trainer import MegatronGRPOTrainer

                return MegatronGRPOTrainer
            return super().__getattr__(name)

    vars(trainers).pop(TRAINER, None)  # where ms-swift keeps a class it has resolved
    trainers.__class__ = Trainers


def _replace_arguments(rlhf: ModuleType) -> None:
    pipeline = rlhf.MegatronRLHF
    stock_parse_args, stock_run = pipeline._parse_args, pipeline.run
    stock_prepare_vllm_client, stock_prepare_dataset = pipeline._prepare_vllm_client, pipeline._prepare_dataset
    stock_prepare_trainer = pipeline.prepare_trainer

    def parse_args(self: Any, args: Any = None) -> Any:
        gc.enable()  # which `prepare` of a rank has disabled
        command_line = sys.argv[1:] if args is None else args
        if not isinstance(command_line, list) or not selects_grpo(command_line):
            return stock_parse_args(self, args)
        with reported_by_torchrun():
            from swift_megatron_grpo.arguments.command_line import check_typed
            from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments

            check_typed(command_line)
            self.args_class = GRPOArguments
            return stock_parse_args(self, args)

    def run(self: Any) -> Any:
        if self.args.rlhf_type != "grpo":
            return stock_run(self)
        from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
        from swift_megatron_grpo.arguments.resume import end_if_finished
        from swift_megatron_grpo.output.console.callback import reported
        from swift_megatron_grpo.runtime.stopping.request import exit_if_stopped

        if not isinstance(self.args, GRPOArguments):
            raise ValueError(
                f"a script passes {type(self.args).__name__} to ms-swift's GRPO on Megatron, which has neither the "
                "flags nor the checks of swift_megatron_grpo; pass the flags as a list of strings, or "
                "swift_megatron_grpo.arguments.grpo_arguments.GRPOArguments"
            )
        with (
            exit_if_stopped(),
            lost_connections_reported_by_torchrun(),
            end_if_finished(),
            reported(self.args),
        ):
            return stock_run(self)

    def prepare_vllm_client(self: Any) -> Any:
        if self.args.rlhf_type != "grpo":
            return stock_prepare_vllm_client(self)
        from swift_megatron_grpo.trainer.start import start

        return start(self.args, self.template)

    def prepare_dataset(self: Any) -> Any:
        if self.args.rlhf_type != "grpo":
            return stock_prepare_dataset(self)
        with reported_by_torchrun():
            return self.args.checked_datasets(*stock_prepare_dataset(self), self.template)

    def prepare_trainer(self: Any) -> Any:
        if self.args.rlhf_type != "grpo":
            return stock_prepare_trainer(self)
        with set_up_reported_by_torchrun():
            self.args.log_start()
            return stock_prepare_trainer(self)

    pipeline._parse_args, pipeline.run, pipeline._prepare_dataset = parse_args, run, prepare_dataset
    pipeline._prepare_vllm_client, pipeline.prepare_trainer = prepare_vllm_client, prepare_trainer
