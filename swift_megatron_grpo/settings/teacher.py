"""A teacher: another policy, to which the trained one is drawn on its own completions (on-policy distillation, OPD)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.settings.distillation import Rlsd, Sdar
from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, flag, rule
from swift_megatron_grpo.settings.layout import DataShape
from swift_megatron_grpo.settings.rewards import Rewards

WITHOUT_REWARDS = "needs rewards, and a run with --teacher_model alone has none; use --reward_funcs as well"
_FORM = 'use the form [{"url": "http://HOST:8000", "tags": ["math"]}, ...]'
_PER_TOKEN = "compares whole completions, and a teacher gives every token an advantage of its own"


@dataclass(frozen=True, slots=True)
class TeacherAddress:
    url: str  # without a trailing slash and without /v1
    tags: tuple[str, ...]  # of the rows that it teaches; a teacher alone teaches all rows


class Teacher(Flags):
    """The source of the teacher's log-probs, and what excludes a teacher, or needs rewards as well."""

    teacher_model: str | None
    teacher_model_server: str | None
    teacher_timeout: Annotated[float, Above(0, use=600)] = flag(
        600.0,
        "Time limit in seconds for the teacher's server (--teacher_model_server) to score one completion. A request "
        "that fails is repeated until then, so a server may be restarted. Default: 600.",
        example="1200",
    )
    teacher_tag_key: str
    teacher_kl_coef: Annotated[float, AtLeast(0, use=1.0, why="a negative one leads away from the teacher")]
    _teacher_use_disable_adapter: bool  # ms-swift's, in place of a --teacher_model that is the --model of a LoRA run
    teacher_prompts: bool  # no flag: rows have a prompt that only the teacher reads (OPSD)
    model: str | None
    trained: Adapter
    rewards: Rewards
    rlsd: Rlsd
    sdar: Sdar
    loss_type: str | None
    dynamic_sample: bool
    off_policy_sequence_mask_delta: float | None
    temperature: float
    val_dataset: list[str]
    split_dataset_ratio: float

    @property
    def is_base(self) -> bool:
        """True if the teacher is the trained model without its adapter."""
        same = self.teacher_model is not None and self.teacher_model == self.model
        return self._teacher_use_disable_adapter or (self.trained.exists and same)

    @property
    def exists(self) -> bool:
        return self._is_named or self.teacher_prompts

    @property
    def _is_named(self) -> bool:
        return self.teacher_model is not None or self.teacher_model_server is not None or self.is_base

    @property
    def is_policy(self) -> bool:
        """True if the policy teaches itself: it reads more in the prompts of the teacher."""
        return self.teacher_prompts and not self._is_named

    @property
    def is_copy(self) -> bool:
        """True if the teacher is a model of its own, which is loaded in addition to the trained one."""
        return self.teacher_model is not None and not self.is_base

    @property
    def name(self) -> str | None:
        """The model of the teacher, or the address of its server; None: there is no teacher."""
        if self.is_policy:
            return "the policy"
        return self.model if self.is_base else self.teacher_model or self.teacher_model_server

    @property
    def is_served(self) -> bool:
        return self.teacher_model_server is not None

    @property
    def addresses(self) -> tuple[TeacherAddress, ...]:
        """The servers of --teacher_model_server: one address, or several in JSON, as ms-swift has them."""
        typed = (self.teacher_model_server or "").strip()
        if not typed.startswith(("[", "{")):
            return (TeacherAddress(_root(typed), ()),) if typed else ()
        try:
            given = json.loads(typed)
            found = tuple(map(_address, given)) if isinstance(given, list) else ()
        except ValueError as error:
            raise ValueError(f"--teacher_model_server cannot be read as JSON ({error}); {_FORM}") from error
        if not found:
            raise ValueError(f"--teacher_model_server {typed:.200} is no list of servers; {_FORM}")
        return found

    @property
    def tag_column(self) -> str | None:
        """The column that picks the teacher of a row; None: there is one teacher at most."""
        return self.teacher_tag_key if len(self.addresses) > 1 else None

    @property
    def is_alone(self) -> bool:
        """True if a run has no rewards: the teacher alone says what is learned."""
        rewards = self.rewards
        graded = rewards.servers.reward_funcs or rewards.models.all or rewards.by_environment or rewards.by_servers
        return self.exists and not graded

    @rule
    def advantages_are_of_tokens(self) -> Faults:
        if not self.exists or self.sdar.is_on:
            return
        teacher = "the column teacher_prompt" if self.is_policy else "--teacher_model"
        if self.loss_type in ("real", "fipo"):
            yield f"{teacher} with --loss_type {self.loss_type}, which {_PER_TOKEN}; use --loss_type grpo"
        if self.off_policy_sequence_mask_delta is not None:
            yield (
                f"{teacher} with --off_policy_sequence_mask_delta {self.off_policy_sequence_mask_delta}, which "
                f"{_PER_TOKEN}; leave one of them out"
            )

    @rule
    def what_needs_a_teacher_has_one(self, rows: DataShape) -> Faults:
        if (self.rlsd.is_on or self.sdar.is_on) and not self.exists:
            asked = "--advantage_reweight rlsd" if self.rlsd.is_on else f"--sdar_loss_coef {self.sdar.sdar_loss_coef:g}"
            yield (
                f"{asked} needs a teacher, and there is none; add the column teacher_prompt to the dataset, or use "
                "--teacher_model"
            )
        if self.rlsd.is_on and self.is_alone:
            yield "--advantage_reweight rlsd weights the advantages of rewards, and there are none; use --reward_funcs"

    @rule
    def a_teacher_has_one_use(self) -> Faults:
        if self.rlsd.is_on and self.sdar.is_on:
            yield (
                f"--advantage_reweight rlsd and --sdar_loss_coef {self.sdar.sdar_loss_coef:g} are two uses of one "
                "teacher; leave one of them out"
            )

    @rule
    def a_server_scores_what_the_policy_samples(self) -> Faults:
        if not self.is_served:
            return
        for address in self.addresses:
            if urlsplit(address.url).scheme not in ("http", "https") or not urlsplit(address.url).hostname:
                yield (
                    f"--teacher_model_server {address.url} is not the address of a server; use the form "
                    "http://HOST:8000"
                )
            if self.tag_column is not None and not address.tags:
                yield f"--teacher_model_server {address.url} has no tags, so it would teach no row; {_FORM}"
        for tag, count in Counter(tag for address in self.addresses for tag in address.tags).items():
            if count > 1 and self.tag_column is not None:
                yield f"--teacher_model_server: the tag {tag} is given {count} times; give each tag to one server"
        if self.teacher_model is not None or self.is_base:
            yield "--teacher_model and --teacher_model_server are two teachers; leave one of them out"
        if self.temperature != 1:
            yield (
                f"--teacher_model_server with --temperature {self.temperature:g}: servers score at temperature 1, so a "
                "teacher equal to the policy would have a KL; use --temperature 1, or --teacher_model"
            )

    @rule
    def a_server_reads_text(self, rows: DataShape) -> Faults:
        if self.teacher_model_server is not None and rows.media is not None:
            yield f"--teacher_model_server scores token ids, and the rows have {rows.media}; use --teacher_model"

    @rule
    def a_second_prompt_is_text(self, rows: DataShape) -> Faults:
        if self.teacher_prompts and rows.media is not None:
            yield f"the dataset has the column teacher_prompt, and its rows have {rows.media}; remove the column"

    @rule
    def what_needs_rewards_has_them(self) -> Faults:
        if not self.is_alone:
            return
        if self.dynamic_sample:
            yield f"--dynamic_sample true {WITHOUT_REWARDS}, or --dynamic_sample false"
        if self.val_dataset or self.split_dataset_ratio > 0:
            flag = "val_dataset" if self.val_dataset else "split_dataset_ratio"
            yield f"--{flag}: an evaluation {WITHOUT_REWARDS}, or leave --{flag} out"
        if self.teacher_kl_coef == 0 and not self.sdar.is_on:
            yield (
                "--teacher_kl_coef 0 with --teacher_model and no rewards: every advantage would be 0, so nothing would "
                "be trained; use --teacher_kl_coef 1"
            )


def _address(given: Any) -> TeacherAddress:
    valid = isinstance(given, dict) and given.keys() <= {"url", "tags"} and isinstance(given.get("url"), str)
    tags = given.get("tags", []) if valid else None
    if not isinstance(tags, list) or not all(isinstance(tag, str | int) for tag in tags):
        raise ValueError(f"{given!r:.200} is not a server with its tags")
    return TeacherAddress(_root(given["url"]), tuple(map(str, tags)))


def _root(url: str) -> str:
    return url.strip().rstrip("/").removesuffix("/v1")
