"""The flags of `megatron rlhf --rlhf_type grpo`: ms-swift's, and those that this package adds.

What can be known to fail is found here, before a process group exists, a model is loaded or anything is written.
"""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from copy import copy
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from swift.megatron.arguments import MegatronRLHFArguments
from swift.rewards import orms
from swift.rollout import MultiTurnScheduler, envs, multi_turns
from swift.utils import get_dist_setting, import_external_file

from swift_megatron_grpo import __version__
from swift_megatron_grpo import algorithm_checks as algorithm
from swift_megatron_grpo import argument_checks as checks
from swift_megatron_grpo import rollout_checks as rollouts
from swift_megatron_grpo import server_flags as servers
from swift_megatron_grpo.argument_table import refusals
from swift_megatron_grpo.autoload import VARIABLE
from swift_megatron_grpo.batching import BatchPlan, format_table, resolve
from swift_megatron_grpo.config import Estimator, KlEstimator, LayoutConfig, SyncCheckMode
from swift_megatron_grpo.data.checks import check_rows, no_prompt_dropped
from swift_megatron_grpo.grading import gym_reward
from swift_megatron_grpo.recording import folder as recording
from swift_megatron_grpo.wire import API_KEY_VARIABLE

_LAYOUT_FLAGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # in the order of LayoutConfig
_STOCK_TRAINER = f"{VARIABLE}=off for ms-swift's own trainer"


@dataclass
class GRPOArguments(MegatronRLHFArguments):
    vllm_mode: Literal["server", "colocate"] | None = "colocate"  # ms-swift has no default, and stops without one
    bad_reward: Literal["stop", "drop"] = field(
        default="stop",
        metadata={
            "help": "What happens when a completion gets no valid reward: every reward function returned None, or one "
            "returned NaN or infinity. stop: the run stops and names the function and the completion. drop: the "
            "completion is left out of its group's statistics and is not trained. Default: stop."
        },
    )

    advantage_estimator: Estimator = field(
        default="grpo",
        metadata={
            "help": "The baseline of a reward. grpo: the mean of the prompt's completions. rloo: the mean of the "
            "others. reinforce_plus_plus: as grpo, scaled over the batch; the paper calls it REINFORCE++-baseline. "
            "reinforce_plus_plus_plain: the mean of the whole rollout, the paper's REINFORCE++; with it "
            "num_generations may be 1. The first three are ms-swift's. Default: grpo."
        },
    )
    kl_estimator: KlEstimator | None = field(
        default=None,
        metadata={
            "help": "How the KL to the reference is estimated per token: k1 is log(pi/ref), abs its absolute value, "
            "k2 half its square, k3 is ref/pi - 1 - log(ref/pi). Default: as ms-swift, k3 in the loss and k1 in "
            "the reward (--kl_in_reward)."
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={
            "help": "KL per token that beta is adapted to: it grows while the measured KL is above, and shrinks while "
            "it is below. --beta is where it starts. Default: none, beta is fixed."
        },
    )
    kl_horizon: int = field(
        default=10000,
        metadata={"help": "Completions over which --kl_target adapts beta; more is slower. Default: 10000."},
    )
    dual_clip: float | None = field(
        default=None,
        metadata={
            "help": "Bound of the loss where the advantage is negative: at most this times its size, however large "
            "the ratio. Above 1 + epsilon_high; 3 is usual. --delta is ms-swift's flag for the same bound. Default: "
            "none."
        },
    )
    entropy_coef: float = field(
        default=0.0,
        metadata={
            "help": "Weight of an entropy bonus: the loss is lowered by this times the policy's entropy, averaged as "
            "the loss is. Default: 0, no bonus."
        },
    )

    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a packed micro batch, prompts and padding included: completions fill micro "
            "batches up to it, and data-parallel ranks get equal work. --micro_batch_size is not used then. A "
            "completion longer than the budget gets a micro batch of its own. Default: none, and "
            "--micro_batch_size completions make a micro batch."
        },
    )
    infer_max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a packed micro batch in passes that only compute log-probs, which need less "
            "memory than training. Default: micro batches as in training."
        },
    )
    infer_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Completions of a micro batch in passes that only compute log-probs: the same as "
            "--infer_max_tokens_per_micro_batch, counted in completions. Default: micro batches as in training."
        },
    )

    fast_kernels: bool = field(
        default=True,
        metadata={
            "help": "On GPUs, Transformer Engine's kernels for rotary embedding, SwiGLU, norms and the sum of weight "
            "gradients, where they compute the same as Megatron's. false: Megatron's. Default: true."
        },
    )
    recompute_elementwise: bool = field(
        default=False,
        metadata={
            "help": "On GPUs, make the outputs of norms and SwiGLU again in backward instead of keeping them, in micro "
            "batches of 4,096 tokens and more: less memory for activations, for some 2 % of the time. Comes with "
            "--fast_kernels. Default: false."
        },
    )
    ref_tensor_model_parallel_size: int | None = field(
        default=None,
        metadata={
            "help": "Tensor-parallel size of the frozen reference copy (full tuning, --beta above 0), which needs less "
            "memory than the model that trains. Default: as in training, for each of these flags that is left out."
        },
    )
    ref_pipeline_model_parallel_size: int | None = field(
        default=None, metadata={"help": "Pipeline-parallel size of the frozen reference copy. Default: as in training."}
    )
    ref_context_parallel_size: int | None = field(
        default=None, metadata={"help": "Context-parallel size of the frozen reference copy. Default: as in training."}
    )
    ref_expert_model_parallel_size: int | None = field(
        default=None, metadata={"help": "Expert-parallel size of the frozen reference copy. Default: as in training."}
    )
    ref_expert_tensor_parallel_size: int | None = field(
        default=None,
        metadata={"help": "Tensor-parallel size of the experts of the frozen reference copy. Default: as in training."},
    )

    sync_check: SyncCheckMode = field(
        default="canary",
        metadata={
            "help": "Proof, after every weight sync, that vLLM runs the trained weights. canary: the names and shapes "
            "that were sent are those of the sync before, and the log-probs of a fixed text agree between trainer and "
            "vLLM as far as rounding goes; the first sync of a run is checked in full. full: a checksum of every "
            "tensor as well. A sync that fails is repeated once, then the run stops and names the tensors that differ. "
            "off: nothing is checked. With --vllm_enable_lora true nothing is checked in full: vLLM must "
            "have a module for each of the adapter's, and the log-probs must agree. Default: canary."
        },
    )
    offload_grad: bool = field(
        default=False,
        metadata={
            "help": "Whether the gradients' buffers may leave the GPU while vLLM generates and log-probs are computed, "
            "beside --offload_model and --offload_optimizer. They hold nothing between steps: they are freed, not "
            "copied. As with those two, nothing leaves while everything fits. Default: false."
        },
    )

    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that one reward function may take for a rank's share of a rollout. One that takes longer "
            "ends the run with an error that names it. Default: none, --phase_timeout ends the run."
        },
    )
    phase_timeout: float = field(
        default=3600.0,
        metadata={
            "help": "Seconds that one phase of a step (generation, grading, training, ...) or what lies between two "
            "phases (checkpoints, callbacks) may take on any rank. Past it every rank writes its Python stacks and "
            "unfinished collectives to stuck-<time>.txt in --output_dir, and the run ends. 0: no limit. Default: 3600."
        },
    )
    rollout_dump: str | None = field(
        default=None,
        metadata={
            "help": "Folder for every rollout of this run: completions token by token, with their rewards, as lines of "
            "JSON. docs/rollouts.md has the format. Default: none, rollouts are not kept."
        },
    )
    rollout_replay: str | None = field(
        default=None,
        metadata={
            "help": "Folder that --rollout_dump of another run has written: this run trains on those completions and "
            "rewards, starts no vLLM and asks no reward function. Default: none."
        },
    )
    rollout_only: bool = field(
        default=False,
        metadata={
            "help": "Generate, grade and dump (--rollout_dump) the rollouts of this run with the weights as they are, "
            "and train nothing. Default: false."
        },
    )
    vllm_server_api_key: str | None = field(
        default=None,
        metadata={
            "help": "The --api_key of the rollout servers. The environment variable SWIFT_ROLLOUT_API_KEY says the "
            "same, to both ends, and shows up in no list of processes. It is not written to args.json. Default: none."
        },
    )
    vllm_request_timeout: float = field(
        default=3600.0,
        metadata={
            "help": "Seconds within which a rollout server must complete one request, or load new weights; then the "
            "request goes to another one, and the first one gives it up. Longer than the longest completion takes, "
            "waiting included. Default: 3600."
        },
    )
    seed_completions: bool = field(
        default=False,
        metadata={
            "help": "Sample every completion with a seed of its own, which follows from --seed: then completions "
            "depend neither on the server that makes them nor on what else it makes meanwhile, but for rounding. "
            "vLLM draws seeded completions one by one, some 10 microseconds each per token on a GPU. Default: false."
        },
    )

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
                self._check_turns,
                self._check_recording,
                lambda: rollouts.check_deadlines(self.reward_timeout, self.phase_timeout),
                self._check_servers,
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
                self._check_layout,
                self._check_interleaving,
                self._check_modality,
                self._check_algorithm,
                self._check_rewards,
                self._check_turns,
                self._check_recording,
                self._check_servers,
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
            servers.check_combinations(self.multi_turn_scheduler, self.rollout_replay)

    def _check_micro_batches(self) -> None:
        checks.check_micro_batches(
            self.max_tokens_per_micro_batch, self.infer_max_tokens_per_micro_batch, self.infer_batch_size
        )

    def _check_algorithm(self) -> None:
        algorithm.check_algorithm(algorithm.flags_of(vars(self)))

    def _check_rewards(self) -> None:
        if self.reward_funcs or not self.grades_by_environment:
            checks.check_reward_functions(self.reward_funcs, orms)
        checks.check_reward_weights(self.reward_weights, len(self.reward_names))

    def _check_turns(self) -> None:
        led_by_run = [name for name, each in multi_turns.items() if each.run is not MultiTurnScheduler.run]
        rollouts.check_multi_turn(
            self.multi_turn_scheduler, self.max_turns, self.use_gym_env, self.gym_env, multi_turns, led_by_run, envs
        )
        rollouts.check_seeds(self.seed_completions, self.multi_turn_scheduler)

    def _check_recording(self) -> None:
        rollouts.check_recording(self.rollout_dump, self.rollout_replay, self.rollout_only)
        dump, replay = self.recording_folders()
        if dump is not None:
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

    def server_urls(self) -> tuple[str, ...]:
        return servers.server_urls(self.vllm_server_base_url, self.vllm_server_host, self.vllm_server_port)

    @property
    def has_adapter(self) -> bool:
        return self.tuner_type != "full" or bool(self.adapters or self.mcore_adapter)

    # ---- what ms-swift asks

    def _init_grpo(self) -> None:
        chosen: int = vars(self)["num_iterations"]
        self.num_iterations = 1  # ms-swift's own trainer refuses more
        try:
            super()._init_grpo()
        finally:
            self.num_iterations = chosen

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
