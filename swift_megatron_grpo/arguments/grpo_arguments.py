"""What `megatron rlhf --rlhf_type grpo` was asked for: the flags of flags.py, checked, and what follows from them.

What can be known to fail is found here, before a process group exists, a model is loaded or anything is written.
"""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from copy import copy
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.rewards import orms
from swift.rollout import MultiTurnScheduler, envs, multi_turns
from swift.utils import get_dist_setting, import_external_file

from swift_megatron_grpo import __version__
from swift_megatron_grpo.arguments import algorithm_checks as algorithm
from swift_megatron_grpo.arguments import layout_checks as checks
from swift_megatron_grpo.arguments import rollout_checks as rollouts
from swift_megatron_grpo.arguments import server_checks as servers
from swift_megatron_grpo.arguments.batch_plan import format_table, resolve
from swift_megatron_grpo.arguments.flags import GRPOFlags
from swift_megatron_grpo.arguments.support_table import refusals
from swift_megatron_grpo.config import BatchPlan, LayoutConfig
from swift_megatron_grpo.conversations import checks as turns
from swift_megatron_grpo.data.checks import check_rows, no_prompt_dropped
from swift_megatron_grpo.grading import gym_reward
from swift_megatron_grpo.plugin.mode import VARIABLE
from swift_megatron_grpo.protocol.messages import API_KEY_VARIABLE
from swift_megatron_grpo.recording import folder as recording

_LAYOUT_FLAGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # in the order of LayoutConfig
# --report_to none, as under transformers: for ms-swift's Megatron it is the name of a callback
megatron_callbacks_map.setdefault("none", MegatronCallback)
_STOCK_TRAINER = f"{VARIABLE}=off for ms-swift's own trainer"


@dataclass
class GRPOArguments(GRPOFlags):
    def __post_init__(self) -> None:
        if self.rlhf_type != "grpo":
            raise ValueError(f"GRPOArguments are those of --rlhf_type grpo, got {self.rlhf_type}")
        if self.vllm_server_api_key is not None:  # not for args.json, and not for the log
            os.environ[API_KEY_VARIABLE], self.vllm_server_api_key = self.vllm_server_api_key, None
        self._check_what_is_typed()
        for flag, value in algorithm.defaults_of(self.advantage_estimator).items():
            if getattr(self, flag) is None:  # ms-swift would, for its own estimators, and refuse ours
                setattr(self, flag, value)
        existing = _with_parents(Path(self.output_dir or "megatron_output").expanduser())
        try:
            super().__post_init__()
        except Exception:
            _remove_empty(_with_parents(Path(self.output_dir or "megatron_output")), but=existing)
            raise

    # ---- checks

    def _check_what_is_typed(self) -> None:
        plugins = _listed(self.external_plugins) + _listed(self.custom_register_path)
        checks.check_plugin_files(plugins)
        # Reward functions register themselves; ms-swift imports the files later, once more in vain.
        for plugin in plugins:
            import_external_file(plugin)
        checks.check_all(
            [
                self._check_flags,
                self._check_model_path,
                self.batch_plan,
                self._check_layout,
                self._check_interleaving,
                self._check_reference,
                lambda: checks.check_iterations(self.num_iterations),
                self._check_algorithm,
                self._check_micro_batches,
                self._check_lengths,
                lambda: checks.check_duration(self.train_iters, self.num_train_epochs),
                self._check_rewards,
                self._check_callbacks,
                self._check_turns,
                self._check_recording,
                lambda: rollouts.check_deadlines(self.reward_timeout, self.phase_timeout),
                self._check_servers,
                self._check_ahead,
                self._check_adapter_sync,
                checks.check_vllm_installed,
            ]
        )

    def _init_output_dir(self) -> None:
        """ms-swift calls this when it has read the model's config, before it makes process groups and the folder."""
        checks.check_all([self._check_flags, self._check_layout, self._check_modality, self._check_precision])
        super()._init_output_dir()

    def check_adopted(self) -> None:
        """For arguments that ms-swift's own class has parsed: what __post_init__ would have refused."""
        checks.check_all(
            [
                self._check_flags,
                self._check_callbacks,
                self._check_layout,
                self._check_interleaving,
                self._check_modality,
                self._check_algorithm,
                self._check_rewards,
                self._check_turns,
                self._check_recording,
                self._check_servers,
                self._check_ahead,
                self._check_adapter_sync,
            ]
        )

    def _check_flags(self) -> None:
        problems = refusals({each.name: getattr(self, each.name) for each in fields(self)}, _STOCK_TRAINER)
        if self.ref_model is not None and self.has_adapter:
            problems.append("--ref_model: the reference of a LoRA run is the model without its adapter; leave it out")
        if self.has_adapter and self.expert_tensor_parallel_size > 1:
            problems.append(
                f"--expert_tensor_parallel_size {self.expert_tensor_parallel_size}: mcore-bridge has no LoRA for cut "
                "experts; use --expert_tensor_parallel_size 1, and --expert_model_parallel_size to spread experts"
            )
        if self.recompute_elementwise and not self.fast_kernels:
            problems.append(
                "--recompute_elementwise true comes with the kernels that --fast_kernels false turns off; leave one out"
            )
        if problems:
            raise ValueError("\n".join(problems))

    def _check_callbacks(self) -> None:
        for flag in ("callbacks", "report_to"):
            registry = "swift.megatron.callbacks.megatron_callbacks_map"
            checks.check_registered(flag, _listed(getattr(self, flag)), megatron_callbacks_map, registry)

    def _check_model_path(self) -> None:
        resumes = self.mcore_model or self.mcore_adapter or self.adapters  # their args.json names the model
        if self.model is None and not resumes:
            raise ValueError("no model is set; use --model with a folder or a hub id")
        for flag in ("model", "ref_model"):
            if getattr(self, flag) is not None:
                checks.check_model_path(getattr(self, flag), flag, bare_ids=self.use_hf)

    def _check_layout(self) -> None:
        checkpoint = Path(self.model_dir if "model_dir" in vars(self) else self.model or "").expanduser()
        if not (checkpoint / "config.json").is_file():
            return  # on a hub: again when ms-swift has fetched it
        checks.check_layout(self._parallelism(), checks.read_model_shape(checkpoint))
        if self.reference_layout() is not None:
            with checks.said_of("the reference copy (--ref_...)"):
                checks.check_layout(self.of_reference()._parallelism(), checks.read_model_shape(checkpoint))

    def _check_interleaving(self) -> None:
        micro_batches = None if self.max_tokens_per_micro_batch is not None else self.batch_plan().gradient_accumulation
        checks.check_interleaving(self._parallelism(), micro_batches)

    def _check_reference(self) -> None:
        """The batch sizes suit the data-parallel size of a reference copy in a layout of its own."""
        layout = self.reference_layout()
        if layout is None:
            return
        if self.beta == 0 or self.has_adapter:
            why = "a LoRA run is the model without its adapter" if self.has_adapter else "--beta 0 is not there"
            raise ValueError(
                f"the --ref_..._parallel_size flags lay out a frozen copy, and the reference of {why}; leave them out"
            )
        resolve(
            world_size=_world_size(),
            tensor_parallel=layout.tensor,
            pipeline_parallel=layout.pipeline,
            context_parallel=layout.context,
            micro_batch_size=1,
            global_batch_size=self.global_batch_size,
            num_generations=self.num_generations,
            generation_batch_size=self.generation_batch_size,
            steps_per_generation=self.steps_per_generation,
        )

    def _parallelism(self) -> checks.Parallelism:
        return checks.Parallelism(
            world_size=_world_size(),
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
            vllm_tensor_parallel_size=1 if self.uses_servers else self.vllm_tensor_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size or 1,
            microbatch_group_size_per_vp_stage=self.microbatch_group_size_per_vp_stage,
            sequence_parallel=self.sequence_parallel,
            first_stage_layers=self.decoder_first_pipeline_num_layers,
            last_stage_layers=self.decoder_last_pipeline_num_layers,
            extra_layers=self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split,
        )

    def _check_modality(self) -> None:
        if self.model_meta.is_multimodal:
            raise ValueError(
                f"--model {self.model}: models with an image, video or audio part are not supported yet; use a text "
                f"model, or {_STOCK_TRAINER}"
            )

    def _check_precision(self) -> None:
        """ms-swift trains fp16 and fp32 checkpoints in fp16 unless told otherwise. NOT_YET says why that is refused."""
        if self.fp16 is None and self.torch_dtype in (torch.float16, torch.float32):
            raise ValueError(
                f"--model {self.model} has torch_dtype {str(self.torch_dtype).removeprefix('torch.')}, which ms-swift "
                "would train in fp16, and fp16 is not supported; use --torch_dtype bfloat16, or --fp16 false for fp32"
            )

    def _check_lengths(self) -> None:
        """A server says itself how long its sequences may be."""
        engine = None if self.uses_servers else self.vllm_max_model_len
        checks.check_lengths(self.max_length, self.max_completion_length, engine)

    def _check_adapter_sync(self) -> None:
        sleep_level = 0 if self.uses_servers else self.sleep_level
        checks.check_adapter_sync(
            self.vllm_enable_lora, self.has_adapter, self.lora_rank, sleep_level, self.mcore_model, self.sync_check
        )

    def _check_servers(self) -> None:
        servers.check_mode(self.vllm_mode, vars(self))
        if self.uses_servers:
            servers.check_timeouts(self.vllm_server_timeout, self.vllm_request_timeout)
            servers.group_ports(self.vllm_server_group_port, len(self.server_urls()))
            servers.check_combinations(self.rollout_replay)

    def _check_ahead(self) -> None:
        rollouts.check_ahead(
            self.async_generate, self.max_staleness, self.uses_servers, self.rollout_replay, self.rollout_only
        )

    def _check_micro_batches(self) -> None:
        checks.check_micro_batches(
            self.max_tokens_per_micro_batch, self.infer_max_tokens_per_micro_batch, self.infer_batch_size
        )

    def _check_algorithm(self) -> None:
        algorithm.check_algorithm(algorithm.flags_of(vars(self)))

    def _check_rewards(self) -> None:
        if self._servers_may_grade:
            return
        if self.reward_funcs or not self.grades_by_environment:
            checks.check_reward_functions(self.reward_funcs, orms)
        checks.check_reward_weights(self.reward_weights, len(self.reward_names))

    def _check_turns(self) -> None:
        if self.uses_servers:  # they know the schedulers and environments, and say what they lead
            turns.check_max_turns(self.max_turns)
            return
        led_by_run = [name for name, each in multi_turns.items() if each.run is not MultiTurnScheduler.run]
        turns.check_multi_turn(
            self.multi_turn_scheduler, self.max_turns, self.use_gym_env, self.gym_env, multi_turns, led_by_run, envs
        )

    def _check_recording(self) -> None:
        rollouts.check_recording(self.rollout_dump, self.rollout_replay, self.rollout_only)
        dump, replay = self.recording_folders()
        if dump is not None and not self._servers_may_grade:
            recording.check_dump(dump, self.recording_settings(), self.resumes)
        if replay is not None:
            recording.check_replay(replay, self.recording_settings())

    @property
    def resumes(self) -> bool:
        """As ms-swift decides whether a checkpoint says at which iteration training goes on."""
        return not self.finetune

    @property
    def uses_servers(self) -> bool:
        return self.vllm_mode == "server"

    @property
    def asks_servers_for_turns(self) -> str | None:
        """The flags that do."""
        return servers.asks_for_turns(vars(self)) if self.uses_servers else None

    @property
    def _servers_may_grade(self) -> bool:
        """As in ms-swift: without --use_gym_env here, whether environments grade is what the servers were told."""
        return self.asks_servers_for_turns is not None and self.use_gym_env is None and self.gym_env is None

    def learn_of_servers(self, environments_grade: bool) -> None:
        if self._servers_may_grade:
            self.use_gym_env: bool | None = environments_grade
            checks.check_all([self._check_rewards, self._check_recording])

    def server_urls(self) -> tuple[str, ...]:
        return servers.server_urls(self.vllm_server_base_url, self.vllm_server_host, self.vllm_server_port)

    @property
    def has_adapter(self) -> bool:
        return self.tuner_type != "full" or bool(self.adapters or self.mcore_adapter)

    # ---- what ms-swift asks

    def _init_grpo(self) -> None:
        iterations: int = vars(self)["num_iterations"]
        asynchronous: bool = vars(self)["async_generate"]
        self.num_iterations, self.async_generate = 1, False  # ms-swift's own trainer refuses all else
        try:
            super()._init_grpo()
        finally:
            self.num_iterations, self.async_generate = iterations, asynchronous

    def _init_generation_batch_params(self) -> None:
        """In place of ms-swift's own arithmetic, which also refuses what only its trainer cannot do."""
        plan = self.batch_plan()
        self.micro_batch_size = plan.micro_batch_size  # what ms-swift divides by; with a token budget nobody else
        self.generation_batch_size = plan.generation_batch_size
        self.steps_per_generation = plan.steps_per_generation
        self.per_device_generation_batch_size = -(-plan.generation_batch_size // plan.world_size)

    def load_dataset(self) -> tuple[Any, Any]:
        with no_prompt_dropped():
            return super().load_dataset()

    def init_iters(self, train_dataset: Any, val_dataset: Any) -> None:
        """The datasets are there, the model is not."""
        for dataset in (train_dataset, val_dataset):
            if dataset is not None:
                check_rows(dataset)
        if self.rollout_replay is not None and val_dataset is not None:
            raise ValueError(
                "--rollout_replay starts no vLLM, which would complete the prompts of --val_dataset or "
                "--split_dataset_ratio; leave these two out"
            )
        super().init_iters(train_dataset, val_dataset)
        if self.num_train_epochs is not None:
            self.train_iters *= self.num_iterations
        if self.save_strategy == "epoch":
            self.save_steps *= self.num_iterations
            self.eval_steps = self.save_steps
        if self.train_iters < 1:
            raise ValueError(
                f"the dataset's {len(train_dataset)} prompts are too few for one training step in --num_train_epochs "
                f"{self.num_train_epochs}; use --train_iters, which goes through the dataset as often as it takes"
            )
        if not self.resumes:
            self.check_replay_reach(rollouts_done=0)

    # ---- what the rest of the package asks

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that one rollout feeds."""
        return self.batch_plan().steps_per_generation * self.num_iterations

    @property
    def rollouts_ahead(self) -> int:
        """That generation may be ahead of training."""
        if not self.async_generate:
            return 0
        return 1 if self.max_staleness is None else self.max_staleness

    def recording_folders(self) -> tuple[Path | None, Path | None]:
        """--rollout_dump and --rollout_replay."""
        dump, replay = (
            None if typed is None else Path(typed).expanduser().absolute()
            for typed in (self.rollout_dump, self.rollout_replay)
        )
        return dump, replay

    def recording_settings(self) -> recording.Settings:
        plan = self.batch_plan()
        return recording.Settings(plan.num_generations, plan.generation_batch_size, self.temperature, self.reward_names)

    def check_replay_reach(self, rollouts_done: int) -> None:
        """The folder holds every rollout that this run will ask for."""
        replay = self.recording_folders()[1]
        if replay is not None:
            wanted = -(-self.train_iters // self.steps_per_rollout)
            recording.check_reach(replay, rollouts_done, wanted - rollouts_done, self.steps_per_rollout)

    def batch_plan(self) -> BatchPlan:
        return resolve(
            world_size=_world_size(),
            tensor_parallel=self.tensor_model_parallel_size,
            pipeline_parallel=self.pipeline_model_parallel_size,
            context_parallel=self.context_parallel_size,
            micro_batch_size=1 if self.max_tokens_per_micro_batch is not None else self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            num_generations=self.num_generations,
            generation_batch_size=self.generation_batch_size,
            steps_per_generation=self.steps_per_generation,
        )

    @property
    def reward_names(self) -> tuple[str, ...]:
        names = tuple(map(_reward_name, self.reward_funcs))
        return (*names, gym_reward.__name__) if self.grades_by_environment else names

    @property
    def grades_by_environment(self) -> bool:
        """The environment's total reward counts beside those of reward functions, as in ms-swift."""
        return self.gym_env is not None if self.use_gym_env is None else self.use_gym_env

    def reference_layout(self) -> LayoutConfig | None:
        """Of the frozen reference copy, where it is not the one of training."""
        pairs = [(getattr(self, f"ref_{flag}"), getattr(self, flag)) for flag in _LAYOUT_FLAGS]
        if all(own is None for own, _ in pairs):
            return None
        return LayoutConfig(*(training if own is None else own for own, training in pairs))

    def of_reference(self) -> GRPOArguments:
        """As if the reference copy were what is trained: for those who build models."""
        layout, other = self.reference_layout(), copy(self)
        if layout is not None:
            for flag, size in zip(_LAYOUT_FLAGS, astuple(layout), strict=True):
                setattr(other, flag, size)
            other.virtual_pipeline_model_parallel_size = None
            other.microbatch_group_size_per_vp_stage = None
            other.sequence_parallel = layout.tensor > 1
            if layout.pipeline != self.pipeline_model_parallel_size:
                other.decoder_first_pipeline_num_layers = other.decoder_last_pipeline_num_layers = None
        return other

    def start_up_lines(self) -> list[str]:
        """For the log: which trainer this is, the layout, the batch arithmetic."""
        plan = self.batch_plan()
        sequence = " with SP" if self.sequence_parallel else ""
        virtual = self.virtual_pipeline_model_parallel_size
        interleaved = f" with VPP {virtual}" if virtual else ""
        layout = (
            f"TP {plan.tensor_parallel}{sequence}, PP {plan.pipeline_parallel}{interleaved}, "
            f"CP {plan.context_parallel}, EP {self.expert_model_parallel_size}, DP {plan.data_parallel}, "
            f"world {plan.world_size}; vLLM TP {self.vllm_tensor_parallel_size}"
        )
        if self.uses_servers:
            layout = layout.rpartition(";")[0] + f"; vLLM at {', '.join(self.server_urls())}"
        own = self.reference_layout()
        if own is not None:
            data = plan.world_size // (own.tensor * own.pipeline * own.context)
            layout += f"; reference TP {own.tensor}, PP {own.pipeline}, CP {own.context}, EP {own.expert}, DP {data}"
        return [
            f"swift_megatron_grpo {__version__} trains this run ({VARIABLE}=off turns it off): {layout}",
            *format_table(plan, self.max_tokens_per_micro_batch).splitlines(),
            *plan.notes,
            *self._offload_notes(),
            *servers.notes(self.vllm_mode, vars(self)),
            *rollouts.notes_ahead(self.rollouts_ahead, vars(self)),
            *algorithm.notes(algorithm.flags_of(vars(self))),
        ]

    def _offload_notes(self) -> list[str]:
        flags = [f"--{flag}" for flag in ("offload_model", "offload_optimizer", "offload_grad") if getattr(self, flag)]
        if not flags or self.sleep_level or self.uses_servers:
            return []
        return [
            f"{', '.join(flags)}: nothing leaves the GPU once vLLM has started, because at --sleep_level 0 vLLM keeps "
            "its memory; use --sleep_level 2 to let them take turns"
        ]


def _world_size() -> int:
    """As the launcher says, before any process group exists."""
    world_size: int = get_dist_setting()[2]
    return world_size


def _listed(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def _reward_name(function: Any) -> str:
    """ms-swift names a reward function after its class."""
    registered = orms[function] if isinstance(function, str) else function
    named = inspect.isclass(registered) or inspect.isfunction(registered)
    return registered.__name__ if named else type(registered).__name__


def _with_parents(folder: Path) -> list[Path]:
    """The folder and those it lies in, innermost first, as far as they exist."""
    return [each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir()]


def _remove_empty(folders: list[Path], but: list[Path]) -> None:
    for folder in folders:
        if folder not in but:
            with suppress(OSError):  # not empty, or another rank was faster
                folder.rmdir()
