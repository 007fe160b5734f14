"""Values derived from the flags; the rest of the package reads these instead of the flags."""

import inspect
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields
from itertools import chain, count
from pathlib import Path
from typing import Any, Self, TypeVar

from swift.megatron.arguments import MegatronRLHFArguments
from swift.utils import get_dist_setting
from transformers import AutoConfig

from swift_megatron_grpo.arguments.refused import TAKES_IMAGES, TAKES_RECORDINGS, TAKES_VIDEOS
from swift_megatron_grpo.data.evaluation_sets import names_of
from swift_megatron_grpo.data.streams import Stream
from swift_megatron_grpo.generation.protocol.model_identity import language_config, read_model_config
from swift_megatron_grpo.grading.rewards import gym_reward
from swift_megatron_grpo.output.checkpoints.sources import Source
from swift_megatron_grpo.output.recording import folder as recording
from swift_megatron_grpo.output.report.completions import FIXED
from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.settings.algorithm import defaults_of
from swift_megatron_grpo.settings.batches import Batches, BatchSizes
from swift_megatron_grpo.settings.flag import Flags, parser_class
from swift_megatron_grpo.settings.groups import GROUPS
from swift_megatron_grpo.settings.layout import DataShape, Facts, Layout, ModelShape, unread_window, why_repeated
from swift_megatron_grpo.settings.modules import module_paths
from swift_megatron_grpo.settings.parallel import Parallel
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.reference import Reference
from swift_megatron_grpo.settings.reward_models import RewardModels
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.sampling import Evaluation, Sampling
from swift_megatron_grpo.settings.servers import Servers

F = TypeVar("F", bound=Flags)


AddedFlags: Any = parser_class(MegatronRLHFArguments, GROUPS)


@dataclass
class DerivedArguments(AddedFlags):
    """The flags, with the values that follow from them."""

    resumed_step = 0  # no flag: the step of the checkpoint that --resume has found
    notes_on_rows = tuple[str, ...]()  # no flag: lines to log about rows of the datasets
    typed = tuple[tuple[str, str], ...]()  # no flag: those that decide what a run generates and trains, as typed

    # ---- the classes of settings/

    def of(self, group: type[F]) -> F:
        """Return the flags of a class of settings/, as they are now."""
        return group.of(vars(self))

    def defaults(self) -> dict[str, Any]:
        """Return the values of all flags that are left out, also of those that the estimator sets."""
        stated = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        return stated | defaults_of(self.advantage_estimator)

    def facts(self, rows: DataShape | None = None, *, typed: bool = False) -> Facts:
        """Return what is known by now. The config of a hub's model is known once ms-swift has downloaded it."""
        is_known = (self._model_folder / "config.json").is_file()
        config, shape = (self.model_config, self.model_shape) if is_known else (None, None)
        return Facts(self.layout, config, shape, rows, typed)

    @property
    def model_shape(self) -> ModelShape:
        return shape_of(self.model_config, str(self._model_folder))

    @property
    def model_config(self) -> Mapping[str, Any]:
        """The content of the model's config.json."""
        return read_model_config(self._model_folder)

    @property
    def takes_images(self) -> bool:
        """True if rows with images are trained."""
        return bool(self.is_multimodal) and self.model_config["model_type"] in TAKES_IMAGES

    @property
    def takes_recordings(self) -> bool:
        """True if rows with audio are trained."""
        return bool(self.is_multimodal) and self.model_config["model_type"] in TAKES_RECORDINGS

    @property
    def takes_videos(self) -> bool:
        """True if rows with videos are trained."""
        return bool(self.is_multimodal) and self.model_config["model_type"] in TAKES_VIDEOS

    @property
    def _model_folder(self) -> Path:
        """The folder of --model, or of its download once ms-swift has resolved the flags."""
        return Path(vars(self).get("model_dir") or self.model or "").expanduser()

    # ---- the run

    @property
    def resumes(self) -> bool:
        """True if a checkpoint sets the iteration at which training continues, as in ms-swift."""
        return not self.finetune

    @property
    def checkpoint_sources(self) -> tuple[Source, ...]:
        """The folders that this run loads, the one that it resumes from first."""
        megatron = [("mcore_adapter", self.mcore_adapter), ("mcore_model", self.mcore_model)]
        if self.resume != "never" and self.resumes:  # name the flag that the user has typed
            megatron[0 if self.has_adapter else 1] = ("resume", megatron[0 if self.has_adapter else 1][1])
        others = [("adapters", path) for path in as_list(self.adapters)]
        others += [("model", self.model), ("ref_model", self.ref_model), ("teacher_model", self.teacher_model)]
        typed = [(flag, path, True) for flag, path in megatron] + [(flag, path, False) for flag, path in others]
        typed.append(("mcore_ref_model", self.mcore_ref_model, True))
        typed += [("ref_adapters", path, False) for path in as_list(self.ref_adapters)]
        return tuple(
            Source(flag, Path(path).expanduser(), is_megatron)
            for flag, path, is_megatron in typed
            if path is not None and Path(path).expanduser().is_dir()  # not an id of a hub
        )

    @property
    def experts_in_order(self) -> bool:
        """True if Megatron's buffers, of all ranks, have experts' weights in their order (moe/grouped_experts.py)."""
        return bool(self.fast_kernels and self.model_shape.experts)

    @property
    def has_adapter(self) -> bool:
        return self.of(Adapter).exists

    # ---- layout and batches

    @property
    def layout(self) -> Layout:
        return self.of(Parallel).layout(world_size())

    @property
    def reference_layout(self) -> Layout | None:
        """Layout of the frozen reference copy; None: the layout of training."""
        return self.of(Reference).layout(self.layout)

    def of_reference(self) -> Self:
        """Copy these arguments with the sizes of the reference copy, to load weights alone."""
        other, layout = copy(self), self.reference_layout
        other.finetune = other.no_load_optim = other.no_load_rng = True
        other.mtp_num_layers = None  # only the policy's drafts are read
        if layout is not None:
            for size, value in self.of(Reference).sizes.items():
                setattr(other, size, value)
            other.virtual_pipeline_model_parallel_size = other.pipeline_model_parallel_layout = None
            other.microbatch_group_size_per_vp_stage = None
            other.sequence_parallel = layout.sequence_parallel
            other.decoder_first_pipeline_num_layers = layout.first_stage_layers
            other.decoder_last_pipeline_num_layers = layout.last_stage_layers
        return other

    def of_teacher(self) -> Self:
        """Copy these arguments for the frozen teacher, which may have another architecture."""
        other = self.of_reference()
        other.megatron_model_meta = self.teacher_megatron_model_meta
        if self.teacher_model_dir != self.model_dir:
            other.rope_scaling = None  # ms-swift's config of it has its own
        return other

    def teacher_model_config(self, of_student: Any) -> Any:
        """Return the config of transformers for the teacher; the student's has what flags change in it."""
        if self.teacher_model_dir == self.model_dir:
            return of_student
        return AutoConfig.from_pretrained(self.teacher_model_dir, trust_remote_code=True)

    def batch_sizes(self) -> BatchSizes:
        """Resolve the batch sizes. Raises BatchError if they do not fit together."""
        return self.of(Batches).sizes(self.layout)

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps that train on one rollout."""
        iterations: int = self.num_iterations
        return self.batch_sizes().steps_per_generation * iterations

    @property
    def read_of_streams(self) -> Stream | None:
        """The part of --dataset that is read with --streaming true; None: all of it is loaded."""
        if not self.streaming:
            return None
        rollouts = self.train_iters if self.rollout_only else -(-self.train_iters // self.steps_per_rollout)
        return Stream(
            rows=rollouts * self.batch_sizes().rollout_prompts,
            buffer=self.shuffle_buffer_size if self.dataset_shuffle else None,
            seed=self.data_seed,
        )

    # ---- servers

    @property
    def uses_servers(self) -> bool:
        return self.of(Servers).used

    # ---- rewards

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The names of reward functions and models in logs: as typed, and each of them once."""
        names = [*map(_reward_name, self.reward_funcs), *(model.name for model in self.of(RewardModels).all)]
        return numbered([*names, gym_reward.__name__] if self.of(Rewards).by_environment else names)

    # ---- evaluation

    @property
    def longest_completion(self) -> int:
        """The most tokens of a completion, in training or in evaluation."""
        usual, evaluation = self.of(Sampling).max_completion_length, self.of(Evaluation)
        return max(usual, evaluation.length) if evaluation.runs else usual

    @property
    def evaluated_at_once(self) -> int:
        """Prompts that are evaluated together: with as many completions as a rollout of training has."""
        return max(1, self.batch_sizes().generation_batch_size // self.of(Evaluation).generations)

    @property
    def evaluation_names(self) -> dict[str, str]:
        """The names of the validation datasets, by their paths or hub ids; empty if they count as one."""
        names = names_of(as_list(self.val_dataset), self.eval_names)
        return names if self.eval_names is not None or len(set(names.values())) > 1 else {}

    @property
    def correct_reward(self) -> int:
        """The place of --eval_correct_reward among the reward functions."""
        chosen, names = self.eval_correct_reward, self.reward_names
        if chosen is None:
            return 0
        if chosen not in names:
            raise ValueError(
                f"--eval_correct_reward {chosen}: this run has no such reward function; "
                f"use --eval_correct_reward {' or '.join(names)}"
            )
        return names.index(chosen)

    # ---- recording

    def recording_settings(self) -> recording.Settings:
        """Return the settings that a folder of recorded rollouts must match."""
        plan = self.batch_sizes()
        return recording.Settings(plan.num_generations, plan.generation_batch_size, self.temperature, self.reward_names)

    def check_replay_reach(self, rollouts_done: int) -> None:
        """Raise ValueError unless the replayed folder contains every rollout that this run will read, undamaged."""
        folder = self.of(Recording).replay
        if folder is not None:
            total = -(-self.train_iters // self.steps_per_rollout)
            rank, _, ranks, _ = get_dist_setting()
            share = (max(rank, 0), max(ranks, 1))
            recording.check_rollouts(folder, rollouts_done, total - rollouts_done, self.steps_per_rollout, share)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a config.json as transformers writes it; of a composed model, of its text part."""
    text = language_config(config)

    def number(*keys: str) -> int | None:
        return next((text[key] for key in keys if isinstance(text.get(key), int)), None)

    experts = number("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts")
    latent = "kv_lora_rank" in text  # every rank holds the whole latent, and all heads are alike
    linear = [number("linear_num_key_heads"), number("linear_num_value_heads")]
    return ModelShape(
        name=name,
        attention_heads=number("num_attention_heads"),
        kv_heads=None if latent else number("num_key_value_heads"),
        ffn=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        experts=experts,
        expert_ffn=number("moe_intermediate_size"),
        linear_heads=tuple(heads for heads in linear if heads is not None),
        modules=module_paths(text, experts is not None) if text == config else (),
        repeats_prompts=why_repeated(text),
        unread_window=unread_window(text),
    )


def world_size() -> int:
    """Return the launcher's world size, which does not need a process group."""
    size: int = get_dist_setting()[2]
    return size


def as_list(values: str | Sequence[str]) -> list[str]:
    """Return the values of a flag that may be a single string."""
    return [values] if isinstance(values, str) else list(values)


def _reward_name(function: Any) -> str:
    """Return a reward function's name in --reward_funcs; Python code may also pass a function or an object."""
    if isinstance(function, str):
        return function
    return function.__name__ if inspect.isfunction(function) else type(function).__name__


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Append _2, _3, ... to a name that is taken, by an earlier one or by a column of completions.jsonl."""
    taken = list(FIXED)
    for name in names:
        candidates = chain([name], (f"{name}_{number}" for number in count(2)))
        taken.append(next(candidate for candidate in candidates if candidate not in taken))
    return tuple(taken[len(FIXED) :])
