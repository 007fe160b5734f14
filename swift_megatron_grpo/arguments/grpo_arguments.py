"""The arguments class that ms-swift parses `megatron rlhf --rlhf_type grpo` into: checks, and overrides of ms-swift."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from swift.dataset import load_dataset
from swift.model import model_meta
from swift.template import Template
from swift.utils import get_logger

from swift_megatron_grpo.arguments.derived import DerivedArguments, as_list
from swift_megatron_grpo.arguments.environment import (
    check_agent_reads_text,
    check_environment,
    check_recording,
    check_reference_adapter_of,
    check_reward_registry,
    faults_of_columns,
    import_plugins,
    is_from_modelscope,
)
from swift_megatron_grpo.arguments.models import check_engine, faults_of_model
from swift_megatron_grpo.arguments.refused import refusals
from swift_megatron_grpo.arguments.resume import apply_resume, check_ranks_agree, raise_if_finished, typed_flags
from swift_megatron_grpo.arguments.start_up_log import start_up_lines
from swift_megatron_grpo.data.answers import Answer, encode_answers
from swift_megatron_grpo.data.checks import (
    check_no_earlier_turns,
    check_rows,
    check_tags,
    checked_loading,
    without_row_numbers,
)
from swift_megatron_grpo.data.encoded_rows import check_images, check_prompts, check_teacher_prompts, read_images
from swift_megatron_grpo.data.evaluation_sets import rows_by_name
from swift_megatron_grpo.data.files import downloaded
from swift_megatron_grpo.data.streams import Stream
from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE, hide_in_process_list, read_api_key
from swift_megatron_grpo.generation.protocol.model_identity import read_model_config
from swift_megatron_grpo.generation.requests import infer_request
from swift_megatron_grpo.platforms.attention_packages import vision_tower_has_flash_attention
from swift_megatron_grpo.runtime.refusals import reported_by_torchrun
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.settings.algorithm import defaults_of
from swift_megatron_grpo.settings.flag import Faults, faults_of, raise_faults
from swift_megatron_grpo.settings.groups import GROUPS
from swift_megatron_grpo.settings.layout import DataShape
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.sampling import rounds_of
from swift_megatron_grpo.settings.teacher import Teacher

logger = get_logger()


@dataclass
class GRPOArguments(DerivedArguments):
    """Arguments of one run; checked on construction."""

    # ms-swift declares Optional[Union[str, List[str]]], of which transformers' parser accepts only the order list, str.
    # typing caches unions whatever their order is, so the order depends on who has written one before.
    cp_comm_type: str | None = None

    teacher_prompts: bool = field(default_factory=bool, init=False)  # no flag: rows have prompts for the teacher
    most_images = 0  # no flag: the most images that a row of the datasets has
    most_recordings = 0  # no flag: the most recordings
    most_videos = 0  # no flag: the most videos
    trained_media = tuple[str, ...]()  # no flag: image, video, audio: that rows of --dataset have
    most_evaluated = 0  # no flag: the most prompts of a dataset that are evaluated; 0: all

    def __post_init__(self) -> None:
        if self.rlhf_type != "grpo":
            raise ValueError(f"GRPOArguments are for --rlhf_type grpo, not {self.rlhf_type}")
        self.typed = typed_flags(self)
        if vars(self)["vllm_server_api_key"] is not None:  # keep it out of args.json and of the log
            os.environ[API_KEY_VARIABLE] = vars(self)["vllm_server_api_key"]
            self.vllm_server_api_key: str | None = None
            hide_in_process_list(os.environ[API_KEY_VARIABLE])
        if self.vllm_mode == "server":
            read_api_key(os.environ)  # before a model is loaded
        apply_resume(self)
        import_plugins(self)
        raise_faults([*self._faults(typed=True), *faults_of(check_environment, self)])
        for flag, value in defaults_of(self.advantage_estimator).items():
            if getattr(self, flag) is None:  # ms-swift sets these for its own estimators, and refuses others
                setattr(self, flag, value)
        if vars(self)["vit_attn_impl"] is None and not vision_tower_has_flash_attention():
            self.vit_attn_impl = "sdpa"
        existing = _existing_folders(Path(self.output_dir or "megatron_output").expanduser())
        try:
            download = partial(downloaded, "model", model_meta.safe_snapshot_download)
            with replaced(model_meta, "safe_snapshot_download", download):
                super().__post_init__()
        except Exception:
            _remove_empty(_existing_folders(Path(self.output_dir or "megatron_output")), keep=existing)
            raise
        self.check_model: bool = vars(self)["check_model"] and is_from_modelscope(self.model_info.model_dir)

    def _init_output_dir(self) -> None:
        """Run the last checks; ms-swift creates process groups and the folder next."""
        self.check_before_process_groups()
        check_ranks_agree(self)  # before ms-swift broadcasts a version folder
        super()._init_output_dir()

    def check_before_process_groups(self) -> None:
        """Run the checks that need the model's config, which ms-swift has read by now."""
        raise_faults(chain(self._faults(), faults_of_model(self), faults_of(check_reference_adapter_of, self)))

    def _faults(self, rows: DataShape | None = None, *, typed: bool = False) -> Faults:
        """Yield the faults of the flags of all stages, by what is known at this moment."""
        yield from refusals(vars(self))
        facts = self.facts(rows, typed=typed)
        for group in GROUPS:
            yield from self.of(group).faults(facts)

    def set_grading_of_servers(self, environments_grade: bool) -> None:
        """Set whether the servers' environments grade, and repeat the checks that depend on it."""
        if self.of(Rewards).by_servers:
            self.use_gym_env: bool | None = environments_grade
            checks = (faults_of(check, self) for check in (check_reward_registry, check_recording))
            raise_faults(chain(self._faults(), *checks))

    def log_start(self) -> None:
        """Log the layout, the batch sizes, and notes on flags: all are known before the model loads."""
        for line in start_up_lines(self):
            logger.info(line)

    # ---- overrides of ms-swift

    def _init_grpo(self) -> None:
        iterations: int = vars(self)["num_iterations"]
        asynchronous: bool = vars(self)["async_generate"]
        moves: bool = vars(self)["sync_ref_model"]
        strategy: str | None = vars(self)["truncation_strategy"]
        # the only values that ms-swift's own trainer accepts
        self.num_iterations, self.async_generate, self.sync_ref_model = 1, False, False
        self.truncation_strategy = "delete" if strategy == "raise" else strategy  # the same for its template
        try:
            super()._init_grpo()
        finally:
            self.num_iterations, self.async_generate, self.sync_ref_model = iterations, asynchronous, moves
            self.truncation_strategy = strategy or "left"

    def _init_teacher_model(self) -> None:
        """Give a teacher in a folder the type of --model if config.json has the same: ms-swift may know several."""
        folder = Path(self.teacher_model or "").expanduser()
        is_known = self.teacher_model_type is None and (folder / "config.json").is_file()
        if is_known and read_model_config(folder)["model_type"] == self.model_config["model_type"]:
            self.teacher_model_type: str | None = self.model_type
        super()._init_teacher_model()

    def _init_generation_batch_params(self) -> None:
        """Replace ms-swift's own arithmetic, which also refuses sizes that only its own trainer cannot handle."""
        plan = self.batch_sizes()
        self.micro_batch_size = plan.micro_batch_size  # ms-swift divides by it; with a token budget it is 1
        self.generation_batch_size = plan.generation_batch_size
        self.steps_per_generation = plan.steps_per_generation
        self.per_device_generation_batch_size = -(-plan.generation_batch_size // plan.layout.world_size)

    def load_dataset(self) -> tuple[Any, Any]:
        stream = self.read_of_streams
        try:
            with checked_loading(self.columns, stream):
                datasets: tuple[Any, Any] = super().load_dataset() if stream is None else self._read_streams(stream)
        except ValueError as problem:
            flags = [f"--{flag}" for flag in ("dataset", "val_dataset") if as_list(vars(self)[flag])]
            raise ValueError(f"{' or '.join(flags)}: {problem}") from problem
        return datasets

    def _read_streams(self, stream: Stream) -> tuple[Any, Any]:
        """Load the rows that the run trains of --dataset, and all rows of --val_dataset, as ms-swift loads them."""
        options = self.get_dataset_kwargs()
        rows, _ = load_dataset(self.dataset, shuffle=False, **options)  # the stream has shuffled them
        whole = options | {"streaming": False, "interleave_prob": None}
        evaluated = None
        if self.val_dataset:
            _, evaluated = load_dataset(
                self.val_dataset, split_dataset_ratio=1.0, shuffle=self.val_dataset_shuffle, **whole
            )
        rows = rows.select(range(min(len(rows), stream.rows)))
        repeats = ", fewer than the run trains, which repeats them" if len(rows) < stream.rows else ""
        logger.info(f"--streaming true: {len(rows)} rows are read{repeats}")
        return rows, evaluated

    def load_answers(self, template: Template) -> list[Answer]:
        """Return the encoded rows of --chord_sft_dataset. They may be as long as a prompt with its completion."""
        sources: list[str] = vars(self)["chord_sft_dataset"] or []
        if not sources:
            return []
        longest = None if self.max_length is None else self.max_length + self.max_completion_length
        try:
            with checked_loading():
                options = self.get_dataset_kwargs() | {"streaming": False}
                rows, _ = load_dataset(sources, split_dataset_ratio=0, shuffle=False, **options)
            answers, left_out = encode_answers(rows, template, longest, self.truncation_strategy == "delete")
        except ValueError as problem:
            raise ValueError(f"--chord_sft_dataset: {problem}") from problem
        if left_out:
            logger.info(f"--chord_sft_dataset: {left_out} rows of more than {longest} tokens are left out")
        return answers

    def checked_datasets(self, train_dataset: Any, val_dataset: Any, template: Template) -> tuple[Any, Any]:
        """Check all rows, count their images, and apply --truncation_strategy."""
        rows = {"dataset": train_dataset, "val_dataset": val_dataset}
        most, heard, shown, notes = [], [], [], []
        strategy = self.truncation_strategy or "left"
        is_never_cut = strategy == "left" and self.multi_turn_scheduler is not None  # but by --vllm_max_model_len
        for name, dataset in rows.items():
            if dataset is not None:
                faults = chain(
                    faults_of(check_rows, dataset, self.takes_images, self.takes_recordings, self.takes_videos),
                    faults_of_columns(self.reward_funcs, dataset),
                )
                if self.loss_scale.startswith("default"):
                    faults = chain(faults, faults_of(check_no_earlier_turns, dataset))
                raise_faults(f"--{name}: {fault}" for fault in faults)
                images = read_images(dataset, template, self.takes_images, sent=self.uses_servers)
                heard.append(max((row.recordings for row in images), default=0))
                shown.append(max((row.videos for row in images), default=0))
                most.append(check_images(dataset, images, self.vllm_max_model_len, self.max_completion_length))
                kept, note = check_prompts(
                    dataset,
                    images,
                    template,
                    request=infer_request,
                    max_length=None if is_never_cut else self.max_length,
                    strategy=strategy,
                    name=name,
                )
                notes += [note] if note else []
                if name == "dataset":
                    most_trained = {"image": most[0], "video": shown[0], "audio": heard[0]}
                    self.trained_media = tuple(kind for kind, number in most_trained.items() if number)
                    teacher = self.of(Teacher)
                    if teacher.tag_column is not None:
                        check_tags(kept, teacher.tag_column, [tag for each in teacher.addresses for tag in each.tags])
                    self.teacher_prompts = check_teacher_prompts(kept, template, infer_request, self.max_length)
                rows[name] = without_row_numbers(kept)
        self.most_images, self.most_recordings, self.most_videos = max(most), max(heard), max(shown)
        self.notes_on_rows = tuple(notes)
        check_agent_reads_text(self.multi_turn_scheduler, self._data_shape.media)
        raise_faults(self._faults(self._data_shape))
        return rows["dataset"], rows["val_dataset"]

    @property
    def _data_shape(self) -> DataShape:
        return DataShape(self.most_images, self.is_multimodal, self.most_recordings, self.most_videos)

    @reported_by_torchrun()
    def init_iters(self, train_dataset: Any, val_dataset: Any) -> None:
        """Set the number of iterations; the datasets are loaded and checked by now. The model loads later."""
        check_engine(self.model, self.model_config, self.vllm_mode)
        if self.rollout_replay is not None and val_dataset is not None:
            raise ValueError(
                "--rollout_replay does not start vLLM, which the prompts of --val_dataset or --split_dataset_ratio "
                "need; leave these two flags out"
            )
        rounds = self.eval_iters
        super().init_iters(train_dataset, val_dataset)
        if val_dataset is not None and rounds != 0:
            self._set_evaluation_rounds(val_dataset, rounds)
        if self.num_train_epochs is not None:
            self.train_iters *= self.num_iterations
        if self.save_strategy == "epoch":
            self.save_steps *= self.num_iterations
            self.eval_steps = self.save_steps
        if self.train_iters < 1:
            raise ValueError(
                f"the dataset's {len(train_dataset)} prompts are too few for one training step in --num_train_epochs "
                f"{self.num_train_epochs}; use --train_iters, which repeats the dataset as often as necessary"
            )
        raise_faults(self._faults(self._data_shape))  # with the iterations
        raise_if_finished(self)
        if not self.resumes:
            self.check_replay_reach(rollouts_done=0)

    def _set_evaluation_rounds(self, val_dataset: Any, typed: int) -> None:
        """Set the rounds of an evaluation: of all prompts, where ms-swift leaves the last out, or of --eval_iters."""
        sizes = [len(rows) for rows in rows_by_name(val_dataset, self.evaluation_names).values()]
        self.most_evaluated = max(0, typed) * self.batch_sizes().train_prompts
        self.eval_iters = rounds_of(sizes, self.most_evaluated, self.evaluated_at_once)


def _existing_folders(folder: Path) -> list[Path]:
    """Return the folder and its parents, innermost first, as far as they exist."""
    return [path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()]


def _remove_empty(folders: list[Path], keep: list[Path]) -> None:
    for folder in folders:
        if folder not in keep:
            with suppress(OSError):  # not empty, or already removed by another rank
                folder.rmdir()
