"""The first lines that a run logs: the trainer, the layout, the batch plan, and notes on flags."""

from swift_megatron_grpo import SWITCH, __version__
from swift_megatron_grpo.arguments.derived import DerivedArguments
from swift_megatron_grpo.arguments.refused import notes_on_flags
from swift_megatron_grpo.settings import adapter, algorithm, asynchronous, parallel, routing
from swift_megatron_grpo.settings.sampling import Evaluation, Sampling
from swift_megatron_grpo.settings.servers import Engine, Servers
from swift_megatron_grpo.weights.load import quantization


def start_up_lines(args: DerivedArguments) -> list[str]:
    """Return the lines to log at start."""
    sizes = args.batch_sizes()
    return [
        f"swift_megatron_grpo {__version__} trains this run ({SWITCH}=off turns it off): {_layout(args)}",
        *sizes.table(args.max_tokens_per_micro_batch),
        *sizes.notes(),
        *notes_on_flags(vars(args), args.defaults()),
        *parallel.expert_size_notes(args.layout, args.model_shape),
        *args.of(Sampling).notes(args.longest_completion),
        *args.of(adapter.Adapter).notes(),
        *args.of(Engine).notes(),
        *args.of(Evaluation).notes(list(dict.fromkeys(args.evaluation_names.values()))),
        *args.of(asynchronous.Asynchronous).notes(),
        *_quantization_notes(args),
        *args.of(routing.Routing).notes(args.steps_per_rollout),
        *args.of(algorithm.Algorithm).notes(),
        *_template_notes(args),
        *args.notes_on_rows,
    ]


def _layout(args: DerivedArguments) -> str:
    layout = args.layout
    where = f"at {', '.join(args.of(Servers).urls)}" if args.uses_servers else f"TP {args.vllm_tensor_parallel_size}"
    line = f"{layout}, world {layout.world_size}; vLLM {where}"
    return line if args.reference_layout is None else f"{line}; reference {args.reference_layout}"


def _template_notes(args: DerivedArguments) -> list[str]:
    own = args.model_meta.candidate_templates
    if not own or args.template in own:
        return []
    return [
        f"--template {args.template}: ms-swift has {' or '.join(own)} for --model_type {args.model_type}, so the "
        "policy may read prompts in another format than it was trained on"
    ]


def _quantization_notes(args: DerivedArguments) -> list[str]:
    has_experts = args.model_shape.experts is not None
    splits_experts = has_experts and not args.uses_servers and args.vllm_tensor_parallel_size > 1
    return quantization.start_up_notes(args.rollout_quantization, args.rollout_importance_sampling_mode, splits_experts)
