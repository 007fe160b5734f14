"""The roles of a run: which GPUs train and which generate, and the flags of each.

ms-swift's Ray pipeline reads them from a YAML file, whose flags stand at its top or in the sections `train` and
`rollout`. Both sections have `gpus`; `colocate_groups: [[train, rollout]]` gives both the same ones, `nnodes` divides
the ranks among machines. `device_groups`, which ms-swift's other commands have on Ray, says the same with ranks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Settings = Mapping[str, Any]

_TRAIN, _ROLLOUT, _TEACHER = "train", "rollout", "teacher"
_OF_LAUNCH = ("gpus", "colocate_groups", "nnodes", "use_ray", "ray_exp_name", "device_groups", "max_failures", "ENV")
# Flags at the top of the file that a server must have as the trainer has them.
_OF_BOTH = {
    "model", "model_type", "model_revision", "use_hf", "hub_token", "torch_dtype", "template", "system",
    "enable_thinking", "preserve_thinking", "add_non_thinking_prefix", "agent_template", "response_prefix",
    "max_pixels", "norm_bbox", "model_kwargs", "external_plugins", "custom_register_path", "multi_turn_scheduler",
    "max_turns", "use_gym_env", "gym_env", "rollout_quantization", "batch_invariant",
    "speculative_rollouts", "speculative_tokens",
}  # fmt: skip
# Flags that a server alone has; vLLM's are those that begin with vllm_, except the trainer's.
_OF_SERVER = {
    "agent", "context_manager", "health_timeout", "max_body_bytes", "max_prompt_characters", "max_messages",
    "max_nesting", "max_requests", "max_connections", "body_timeout", "idle_timeout", "max_media_bytes",
}  # fmt: skip
_OF_TRAINER = ("vllm_mode", "vllm_request_timeout")
_ADDRESSES = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
_OF_PLACES = ("host", "port")  # of a server, which the launch chooses
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TYPED = re.compile(r"--[A-Za-z][\w.-]*")
_RANGE = re.compile(r"(?:list\()?range\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)\)?")
_MOST_GPUS = 2**20


class Refused(SystemExit):
    """A run cannot start. Its text is for the user; Python's exit code for a text is 1."""

    def __init__(self, text: str) -> None:
        super().__init__(f"swift_megatron_grpo: this run was refused before anything was started:\n{text}")


@dataclass(frozen=True, slots=True)
class Roles:
    """The ranks and servers of a run, before they have machines."""

    ranks: int  # one per GPU
    machines: int  # of ranks
    servers: int  # 0: vLLM is in the ranks, or elsewhere
    gpus_of_server: int
    trainer_flags: tuple[str, ...]
    server_flags: tuple[str, ...]
    use_ray: bool
    name: str  # of the experiment, before the names of Ray's actors
    max_failures: int  # so often the ranks are started again

    @property
    def ranks_of_machine(self) -> int:
        return self.ranks // self.machines

    def resumed(self) -> Roles:
        """Return these roles for a start after a failure."""
        return replace(self, trainer_flags=(*self.trainer_flags, "--resume", "auto"))


def roles_of(file: Settings, typed: Settings, environ: Mapping[str, str]) -> Roles:
    """Return the roles of a file and of the flags that were typed, which count before those of the file."""
    _check_names(file)
    _check_names(typed)
    sections = {role: _section(file, role) for role in (_TRAIN, _ROLLOUT, _TEACHER)}
    common = {name: value for name, value in file.items() if name not in sections} | dict(typed)
    for role in (_TRAIN, _ROLLOUT):
        sections[role] = {name: value for name, value in sections[role].items() if name not in typed}
    if sections[_TEACHER]:
        raise Refused(
            "teacher: no teacher is started beside a run; start `vllm serve MODEL` on its GPUs and use "
            "teacher_model_server: http://HOST:8000, or teacher_model: MODEL, which the ranks load"
        )
    sizes = _Sizes.of_file(common, sections, environ)
    trainer, server = _split(common, sections[_TRAIN], sections[_ROLLOUT], sizes.shared)
    gpus_of_server = _number(server, "vllm_tensor_parallel_size", 1) * _number(server, "vllm_data_parallel_size", 1)
    if sizes.rollout % gpus_of_server:
        raise Refused(
            f"rollout: gpus {sizes.rollout} is not divisible by the {gpus_of_server} of a server "
            f"(vllm_tensor_parallel_size * vllm_data_parallel_size); use gpus: "
            f"{_next_multiple(sizes.rollout, gpus_of_server)}"
        )
    if sizes.rollout:
        trainer = _with_servers(trainer)
    _check_layout(trainer, sizes.train)
    failures = _number(common, "max_failures", 0, least=0)
    resume = trainer.get("resume")
    if failures and resume not in (None, "never", "auto"):
        raise Refused(
            f"max_failures {failures} continues from the newest checkpoint of output_dir, and resume: {resume} is "
            "another one: a failure before the first checkpoint would start with step 1; copy that folder into "
            "output_dir and use resume: auto, or leave max_failures out"
        )
    if failures:
        _check_checkpoints(trainer, failures)
    if failures and not trainer.get("output_dir"):
        raise Refused(f"max_failures {failures} continues from checkpoints; set output_dir, or leave max_failures out")
    return Roles(
        ranks=sizes.train,
        machines=sizes.machines,
        servers=sizes.rollout // gpus_of_server,
        gpus_of_server=gpus_of_server,
        trainer_flags=tuple(words_of(trainer)),
        server_flags=tuple(words_of(server)),
        use_ray=_is_true(common.get("use_ray", False)),
        name=_text(common, "ray_exp_name"),
        max_failures=failures,
    )


def _check_checkpoints(trainer: Settings, failures: int) -> None:
    """Refuse flags with which a start after a failure would be refused."""
    typed = {name: str(trainer.get(name)).lower() for name in ("finetune", "no_save_optim", "no_load_optim")}
    if typed["finetune"] == "false":
        raise Refused(
            f"max_failures {failures} continues with resume: auto, which sets finetune: false and the checkpoint "
            "itself; leave out finetune, and set resume: auto to continue from output_dir, or leave max_failures out"
        )
    if typed["no_save_optim"] == "true" and typed["no_load_optim"] != "true":
        raise Refused(
            f"max_failures {failures} continues from checkpoints, and no_save_optim: true saves none to continue from; "
            "use no_save_optim: false, or leave max_failures out"
        )


def environment_of(file: Settings) -> dict[str, str]:
    """Return the variables that the file sets where they are not set yet."""
    return {name: _word(value) for name, value in _section(file, "ENV").items() if value is not None}


def _split(common: Settings, train: Settings, rollout: Settings, shared: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of the trainer, and those of a server."""
    flags = {name: value for name, value in common.items() if name not in _OF_LAUNCH}
    train = {name: value for name, value in train.items() if name not in _OF_LAUNCH}
    rollout = {name: value for name, value in rollout.items() if name not in _OF_LAUNCH}
    if shared:
        return {"vllm_mode": "colocate"} | flags | rollout | train, {}
    for name in _OF_PLACES:
        if name in rollout:
            raise Refused(f"rollout: {name} {rollout[name]}: servers get addresses of their own; leave it out")
    of_server = {name: value for name, value in (flags | rollout).items() if name in _OF_BOTH or _is_of_server(name)}
    of_trainer = {name: value for name, value in flags.items() if not _is_of_server(name)}
    graded = {name: value for name, value in rollout.items() if name not in _OF_BOTH and not _is_of_server(name)}
    return of_trainer | graded | train, of_server


def _check_layout(trainer: Settings, ranks: int) -> None:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = [_number(trainer, name, 1) for name in names]
    if ranks % math.prod(sizes):
        raise Refused(
            f"train: gpus {ranks} is not divisible by the {math.prod(sizes)} of a copy of the model "
            f"({' * '.join(names)}); use gpus: {_next_multiple(ranks, math.prod(sizes))}"
        )


def _is_of_server(name: str) -> bool:
    is_of_engine = name.startswith("vllm_") and not name.startswith("vllm_server_") and name not in _OF_TRAINER
    return is_of_engine or name in _OF_SERVER


def _with_servers(trainer: Settings) -> dict[str, Any]:
    for name in _ADDRESSES:
        if trainer.get(name) is not None:
            raise Refused(
                f"{name}: this run starts servers itself, on the GPUs of the section rollout; leave {name} out, or "
                "leave the section out to use servers that run already"
            )
    return {"vllm_server_timeout": 900} | dict(trainer) | {"vllm_mode": "server"}


@dataclass(frozen=True, slots=True)
class _Sizes:
    train: int
    rollout: int  # GPUs of servers
    machines: int
    shared: bool  # True: no servers are started

    @classmethod
    def of_file(cls, common: Settings, sections: Mapping[str, Settings], environ: Mapping[str, str]) -> _Sizes:
        if common.get("device_groups") is not None:
            return cls._of_device_groups(common, sections)
        machines = _number(common, "nnodes", _number(environ, "NNODES", 1))
        of_environment = machines * _number(environ, "NPROC_PER_NODE", 0, least=0)
        train = _number(sections[_TRAIN], "gpus", of_environment, least=0, of="train: ")
        rollout = _number(sections[_ROLLOUT], "gpus", 0, least=0, of="rollout: ")
        shared = not rollout or _colocates(common.get("colocate_groups"))
        if shared and rollout and rollout != train:
            raise Refused(
                f"colocate_groups: train has {train} GPUs and rollout {rollout}; roles that share GPUs have the same "
                f"number: set gpus: {max(train, rollout)} in both"
            )
        return cls(train, 0 if shared else rollout, machines, shared)._checked()

    @classmethod
    def _of_device_groups(cls, common: Settings, sections: Mapping[str, Settings]) -> _Sizes:
        for role in (_TRAIN, _ROLLOUT):
            if "gpus" in sections[role]:
                raise Refused(f"{role}: gpus and device_groups both say where it runs; leave one of them out")
        groups = _parsed(common["device_groups"], "device_groups")
        form = 'device_groups: {nproc_per_node: 8, ranks: {device: GPU, ranks: "list(range(0, 8))", workers: [train]}}'
        if not isinstance(groups, dict) or "nproc_per_node" not in groups:
            raise Refused(f"device_groups has no nproc_per_node, the GPUs of a machine; write {form}")
        of_machine = _number(groups, "nproc_per_node", 0, of="device_groups: ")
        ranks: dict[str, tuple[int, ...]] = {}
        for name, group in groups.items():
            if name in ("nproc_per_node", "nnodes"):
                continue
            if not isinstance(group, dict) or "ranks" not in group:
                raise Refused(f"device_groups: {name} has no ranks; write {form}")
            workers = group.get("workers") or []
            for worker in workers if isinstance(workers, list) else [workers]:
                if worker not in (_TRAIN, _ROLLOUT) or worker in ranks:
                    why = "is in two groups" if worker in ranks else f"is none of {_TRAIN}, {_ROLLOUT}"
                    raise Refused(f"device_groups: {name}: the worker {worker} {why}; write {form}")
                start = 1 + max((rank for found in ranks.values() for rank in found), default=-1)
                ranks[worker] = _ranks(group["ranks"], f"device_groups: {name}", start)
        train, rollout = ranks.get(_TRAIN, ()), ranks.get(_ROLLOUT, ())
        shared = not rollout or train == rollout
        if not shared and (twice := sorted({*train} & {*rollout})):
            raise Refused(
                f"device_groups: rank {twice[0]} trains and generates; give both roles the same ranks, or no rank in "
                "common"
            )
        machines = max(1, -(-len(train) // of_machine))
        return cls(len(train), 0 if shared else len(rollout), machines, shared)._checked()

    def _checked(self) -> _Sizes:
        if self.train == 0:
            raise Refused("no GPUs for the ranks: set gpus: 8 in the section train, or NPROC_PER_NODE=8")
        if self.train % self.machines:
            raise Refused(
                f"train: gpus {self.train} is not divisible by the {self.machines} machines (nnodes); use gpus: "
                f"{_next_multiple(self.train, self.machines)}"
            )
        return self


def _colocates(groups: Any) -> bool:
    """Return True if train and rollout share their GPUs."""
    groups = _parsed(groups, "colocate_groups")
    form = "write colocate_groups: [[train, rollout]], or leave it out for GPUs of their own"
    if groups is None:
        return False
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise Refused(f"colocate_groups {groups!r} is not a list of lists of roles; {form}")
    for role in [role for group in groups for role in group]:
        if role not in (_TRAIN, _ROLLOUT):
            raise Refused(f"colocate_groups: {role!r} is none of the roles train and rollout; {form}")
    return any({_TRAIN, _ROLLOUT} <= set(group) for group in groups)


def _ranks(value: Any, of: str, start: int) -> tuple[int, ...]:
    """Return ranks that are written as a number of them, a list or a range, which ms-swift evaluates as Python."""
    if isinstance(value, str) and (written := _RANGE.fullmatch(value.strip())):
        low, high = (int(written[1]), int(written[2])) if written[2] else (0, int(written[1]))
        value = list(range(low, min(high, low + _MOST_GPUS)))
    elif isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()):
        value = list(range(start, start + _number({"ranks": value}, "ranks", 0, of=f"{of}: ")))
    if not isinstance(value, list) or not value or not all(type(rank) is int and rank >= 0 for rank in value):
        raise Refused(f'{of}: ranks {value!r} is no set of ranks; write 8, [0, 1], or "list(range(0, 8))"')
    return tuple(value)


def _section(file: Settings, name: str) -> Settings:
    section = file.get(name)
    if section is not None and not isinstance(section, dict):
        raise Refused(f"{name}: {section!r} is not a section; write its settings below it, as in {name}: {{gpus: 8}}")
    _check_names(section or {}, f"{name}: ")
    for of_file in _OF_LAUNCH:
        if of_file != "gpus" and of_file in (section or {}):
            raise Refused(f"{name}: {of_file} is a setting of the whole run; write it at the top of the file")
    return section or {}


def _check_names(settings: Settings, of: str = "") -> None:
    for name, value in settings.items():
        if not isinstance(name, str) or not _FLAG.fullmatch(name):
            raise Refused(f"{of}{name!r} is not the name of a flag; write it as in docs/flags.md, without --")
        roles = (_TRAIN, _ROLLOUT, _TEACHER)
        if not of and name not in roles and name != "device_groups" and isinstance(value, dict) and "gpus" in value:
            raise Refused(f"{name}: there is no such role; the roles are {_TRAIN} and {_ROLLOUT}")


def _number(settings: Mapping[str, Any], name: str, default: int, least: int = 1, of: str = "") -> int:
    value = settings.get(name, default)
    text = str(value).strip() if value is not None and not isinstance(value, bool | list | dict) else ""
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and least <= int(text) <= _MOST_GPUS):
        raise Refused(f"{of}{name} {value!r} is not a whole number of at least {least}; use {name}: {max(least, 1)}")
    return int(text)


def _text(settings: Settings, name: str) -> str:
    value = settings.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused(f"{name} {value!r} is not a name; use {name}: my-run")
    return (value or "").strip()


def _is_true(value: Any) -> bool:
    if str(value).lower() not in ("true", "false", ""):
        raise Refused(f"use_ray {value!r} is neither true nor false; use use_ray: true")
    return str(value).lower() != "false"


def _parsed(value: Any, name: str) -> Any:
    """Return a value that was typed as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise Refused(f"{name} {value!r} is not JSON: {error}") from None


def _next_multiple(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def words_of(flags: Settings) -> list[str]:
    """Return flags as the words of a command line; a flag without a value is left out."""
    words = []
    for name, value in flags.items():
        if value is None:
            continue
        words += [f"--{name}", *(map(_word, value) if isinstance(value, list) else [_word(value)])]
    return words


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def read_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of the flags of a command line, as ms-swift's parser reads it: the last occurrence counts."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if _TYPED.fullmatch(name):
            values = flags[name[2:].replace("-", "_")] = [value] if equals else []
        else:
            values.append(word)
    return flags


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of a command line with values as in a file."""
    return {name: given[0] if len(given) == 1 else given or "true" for name, given in read_flags(words).items()}
