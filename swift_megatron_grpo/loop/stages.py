"""The stages of one run. assemble.py creates them; the files of a step use them."""

from dataclasses import dataclass

from swift_megatron_grpo.data.answers import AnswerSource
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.data.teacher_prompts import TeacherPrompts
from swift_megatron_grpo.generation.interface import GenerationEngine
from swift_megatron_grpo.generation.vllm.second_runner import Drafts
from swift_megatron_grpo.grading.rewards import RewardFunctions
from swift_megatron_grpo.loop.bodies import Bodies
from swift_megatron_grpo.loop.checks.experts import RouterAgreement
from swift_megatron_grpo.loop.checks.logprob_check import LogprobCheck
from swift_megatron_grpo.loop.completion_log import CompletionLog
from swift_megatron_grpo.loop.served_teacher import ServedTeacher
from swift_megatron_grpo.loop.trace import Trace
from swift_megatron_grpo.loop.weight_sync import WeightSync
from swift_megatron_grpo.output.recording.folder import RolloutDump
from swift_megatron_grpo.output.recording.reading import EarlierRollouts, RolloutReplay
from swift_megatron_grpo.runtime.deadlines.watchdog import Watchdog
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.training.engine import MegatronEngine
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.training.reference import MovingReference, Reference


@dataclass(frozen=True)
class Stages:
    prompts: PromptSource
    answers: AnswerSource | None  # which SFT trains in the same steps; None: there are none
    spare_prompts: PromptSource  # for --dynamic_sample, in another order
    image_reader: ImageReader | None  # None: the prompts are text
    generation: GenerationEngine | None  # None: completions are replayed
    drafts: Drafts | None  # of an engine in these ranks; None: it verifies none, or is on servers, which remember
    rewards: RewardFunctions
    training: MegatronEngine
    reference: Reference | None
    moving_reference: MovingReference | None  # None: the reference stays as it is
    teacher: Reference | ServedTeacher | None  # another policy, or the same with more to read; None: there is none
    teacher_prompts: TeacherPrompts | None  # None: the teacher reads the prompts of the policy
    residency: Residency
    sync: WeightSync | None  # None: no engine
    logprob_check: LogprobCheck
    router_agreement: RouterAgreement | None  # None: nothing is compared
    coordinator: Coordinator
    bodies: Bodies | None  # None: every rank has the tokens of all completions
    log: CompletionLog
    dump: RolloutDump | None
    earlier: EarlierRollouts | None  # None: there are none, or another rank reads them
    replay: RolloutReplay | None  # replaces generation and rewards
    watchdog: Watchdog
    trace: Trace
    stop: StopRequest
