"""The start of a run, before its model loads: checkpoints are checked, servers reached, and the settings made."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from swift.template import Template
from swift.utils import get_dist_setting, get_logger

from swift_megatron_grpo.arguments import environment, grpo_arguments, resume, teachers, to_config
from swift_megatron_grpo.arguments.reward_models import create_servers
from swift_megatron_grpo.data.answers import Answer
from swift_megatron_grpo.generation.local.engine_settings import check_engine_settings
from swift_megatron_grpo.generation.protocol.model_identity import model_identity
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.gateways import find_gateways
from swift_megatron_grpo.generation.remote.teacher import TeacherServer
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.grading.reward_servers import RewardServer
from swift_megatron_grpo.grading.rewards import RewardFunctions, gym_reward
from swift_megatron_grpo.loop.checks.canary import CANARY_TEXT
from swift_megatron_grpo.loop.served_teacher import ServedTeacher
from swift_megatron_grpo.output.checkpoints.manifest import Identity, dataset_identity, tokenizer_identity
from swift_megatron_grpo.output.checkpoints.saving import CheckpointWriter
from swift_megatron_grpo.output.checkpoints.sources import check_order_of_experts, check_sources, compare_datasets
from swift_megatron_grpo.output.disk.files import threads_of_a_rank
from swift_megatron_grpo.output.disk.folder_lock import LockedFolders
from swift_megatron_grpo.runtime.parallel import Coordinator, connected_to_store
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import CANARY_TOKENS, GRPOConfig
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.teacher import Teacher
from swift_megatron_grpo.trainer.reward_models import create_reward_models
from swift_megatron_grpo.training.reference import MOVED

logger = get_logger()


@dataclass(frozen=True)
class Start:
    """Parts of a run that its model needs; ms-swift passes them to the trainer in place of its client of vLLM."""

    settings: GRPOConfig
    rewards: RewardFunctions
    coordinator: Coordinator
    stop: StopRequest
    servers: RemoteVllm | None  # None: vLLM runs in the training processes
    teacher: ServedTeacher | None  # None: there is no teacher, or it is a model of the ranks
    answers: Sequence[Answer]  # which SFT trains in the same steps
    locked: LockedFolders


def start(args: grpo_arguments.GRPOArguments, template: Template) -> Start:
    """Check what a run loads and reaches, then fix its settings. Every rank calls it."""
    functions = environment.create_reward_functions(args)  # may fail: first
    servers_of_models = create_servers(args)
    coordinator = Coordinator(timedelta(seconds=args.ddp_timeout))
    locked = LockedFolders(args.output_dir, args.of(Recording).dump, coordinator)
    _check_loaded(args, template, coordinator)
    answers = args.load_answers(template)
    teacher = _served_teacher(args, template, coordinator)
    stop = StopRequest(coordinator, args.stop_grace)
    server, servers = to_config.configure_server(args), None
    if server is not None:
        sender = WeightSender(torch.device(torch.cuda.current_device()), server.bucket_bytes)
        gateways = None
        if coordinator.world_size > _ranks_of_this_machine():
            is_first = get_dist_setting()[1] == 0
            gateways = find_gateways(coordinator, server.urls, sender, is_first, connected_to_store)
        servers = RemoteVllm(server, sender, coordinator.rank, stop.raise_if_out_of_time, template, gateways)
        environments_grade = coordinator.all_gather_or_raise(servers.check, "reaching the rollout servers")
        args.set_grading_of_servers(any(environments_grade))
    settings = to_config.configure(args)
    if settings.recording.replay is None:  # otherwise rewards are those of the recording
        _check_reward_servers(servers_of_models, coordinator)
        functions += create_reward_models(args, servers_of_models)
    if servers is None and settings.recording.replay is None:
        check_engine_settings(settings.engine)
    if args.of(Rewards).by_environment:
        functions = [*functions, gym_reward]
    rewards = RewardFunctions(settings.grading.reward_names, functions)
    return Start(settings, rewards, coordinator, stop, servers, teacher, answers, locked)


def _served_teacher(
    args: grpo_arguments.GRPOArguments, template: Template, coordinator: Coordinator
) -> ServedTeacher | None:
    """Return the teachers behind servers, which have scored a text twice; None: there is no such server."""
    settings, tokenizer = args.of(Teacher), template.tokenizer
    if not settings.is_served:
        return None
    key = os.environ.get("SWIFT_TEACHER_API_KEY")
    servers: dict[str | None, TeacherServer] = {}
    for address in settings.addresses:
        tags = (None,) if settings.tag_column is None else address.tags
        servers |= dict.fromkeys(tags, TeacherServer(address.url, settings.teacher_timeout, key))
    longest = (args.max_length or 1) + args.longest_completion + 1
    text = tokenizer.encode(CANARY_TEXT, add_special_tokens=False)[: min(CANARY_TOKENS, longest - 1)]

    def check() -> None:
        for server in dict.fromkeys(servers.values()) if coordinator.rank == 0 else ():
            server.check(text, lambda token: tokenizer.decode([token]), longest)

    coordinator.all_gather_or_raise(check, "reaching the teacher's server")
    return ServedTeacher(servers, coordinator)


def _check_reward_servers(servers: Sequence[RewardServer | None], coordinator: Coordinator) -> None:
    """Reach the servers of reward models, from every rank: each asks for the completions that it grades."""

    def check() -> None:
        for server in filter(None, servers):
            server.check()

    if any(servers):
        coordinator.all_gather_or_raise(check, "reaching the reward models' servers")


def _check_loaded(args: grpo_arguments.GRPOArguments, template: Template, coordinator: Coordinator) -> None:
    """Refuse checkpoints that are damaged or do not fit the run, before the model loads."""
    if args.mcore_model is None:
        environment.check_weights(args.model, args.model_dir)
    if args.ref_model is not None and Path(args.ref_model).is_dir():  # a hub's is downloaded when it is loaded
        environment.check_weights(args.ref_model, args.ref_model, "ref_model")
    teachers.check_teacher(args, template.tokenizer)
    check = partial(
        check_sources,
        model=model_identity(args.model_config),
        tokenizer=tokenizer_identity(template.tokenizer) if args.resumes else None,
        verify=args.verify_checkpoint,
        ranks=coordinator,
        threads=threads_of_a_rank(_ranks_of_this_machine()),
    )
    for warning in resume.check_or_fall_back(args, check):
        logger.warning(warning)
    if args.resumes and not args.no_load_optim:
        flags = ("resume", "mcore_adapter", "mcore_model")
        source = next((source for source in args.checkpoint_sources if source.flag in flags), None)
        check_order_of_experts(source, args.experts_in_order)


def checkpoint_writer(
    args: grpo_arguments.GRPOArguments, template: Template, train_rows: Any, coordinator: Coordinator, steps_done: int
) -> CheckpointWriter:
    """Return the writer of new checkpoints, after a comparison of the data with the loaded one's."""
    identity = Identity(
        model=model_identity(args.model_config),
        tokenizer=tokenizer_identity(template.tokenizer),
        dataset=dataset_identity(train_rows),
        experts_in_order=args.experts_in_order,
    )
    if args.resumes and steps_done > 0:
        warning = compare_datasets(args.checkpoint_sources, identity.dataset)
        if warning is not None:
            logger.warning(warning)
    return CheckpointWriter(Path(args.output_dir), coordinator, _ranks_of_this_machine(), identity, logger.info)


def next_save(args: grpo_arguments.GRPOArguments, steps_done: int) -> int:
    period = args.save_steps or args.train_iters
    return int(min((steps_done // period + 1) * period, args.train_iters))


def resumed_from(args: grpo_arguments.GRPOArguments) -> list[str]:
    """Return the checkpoints that a run which resumes has loaded."""
    sources = (args.mcore_model, args.mcore_adapter, *args.adapters) if args.resumes else ()
    return [path for path in sources if path is not None]


def moved_reference(args: grpo_arguments.GRPOArguments) -> str | None:
    """Return the folder of the reference that a run which resumes has moved; None: it begins with the first one."""
    folders = [Path(path).expanduser() / MOVED for path in resumed_from(args)]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None and folders:
        logger.warning("--sync_ref_model: the checkpoint has no moved reference, so it begins with the first one again")
    return None if found is None else str(found)


def _ranks_of_this_machine() -> int:
    return max(int(get_dist_setting()[3]), 1)
