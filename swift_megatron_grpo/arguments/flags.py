"""The flags that this package adds to ms-swift's, each with its help text. Their values are checked in *_checks.py.

argparse %-formats help texts: a percent sign is written `%%`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from swift.megatron.arguments import MegatronRLHFArguments

from swift_megatron_grpo.settings.config import SyncCheckMode, UnreadTensors
from swift_megatron_grpo.settings.flag import parser_class
from swift_megatron_grpo.settings.groups import GROUPS
from swift_megatron_grpo.types import Quantization

AddedFlags: Any = parser_class(MegatronRLHFArguments, GROUPS)


@dataclass
class GRPOFlags(AddedFlags):
    """Flags of `megatron rlhf --rlhf_type grpo` beyond ms-swift's."""

    lora_dropout: float = 0.0  # as in effect in ms-swift, whose default of 0.05 mcore-bridge ignores
    save_missing_weights: bool | None = field(
        default=None,
        metadata={
            "help": "Copy the tensors of the checkpoint that the model does not have into saved models, as they were. "
            "Default: copy layers of multi-token prediction and, with --language_model_only true, the image, video and "
            "audio parts; other tensors are left out."
        },
    )
    truncation_strategy: Literal["left", "delete", "raise", "right", "split"] | None = field(
        default=None,
        metadata={
            "help": "What to do with prompts longer than --max_length. left: cut their beginning. delete: leave them "
            "out of the dataset before training. raise: refuse the dataset, with the rows. Default: left."
        },
    )
    bad_reward: Literal["stop", "drop"] = field(
        default="stop",
        metadata={
            "help": "What to do when a completion has no valid reward: every reward function returned None, or one "
            "returned NaN or infinity, or raised an exception. stop: the run ends with an error that names the "
            "function and the completion. drop: the completion is excluded from its group's statistics and is not "
            "trained. Default: stop."
        },
    )

    unread_tensors: UnreadTensors = field(
        default="stop",
        metadata={
            "help": "What to do if a checkpoint has tensors that nothing loads, so that they would be neither trained "
            "nor sent to vLLM. stop: the run ends with an error that names them. warn: they are logged and left out. "
            "Layers of multi-token prediction and buffers that are computed are always left out. Default: stop."
        },
    )
    check_attention: bool = field(
        default=True,
        metadata={
            "help": "Compare output and gradients of the model's attention kernels with exact arithmetic before "
            "training, on random packed sequences, and end the run if one is wrong. It takes about a second. "
            "Default: true."
        },
    )
    fast_kernels: bool = field(
        default=True,
        metadata={
            "help": "Multiply all experts of a layer in one kernel, without expert parallelism do not sort tokens that "
            "are sorted by expert already, with it send a token's row once to a rank, and add adapters inside the "
            "products of their layers. On GPUs, also use Transformer Engine's kernels for rotary embedding, SwiGLU, "
            "norms and the accumulation of weight gradients, and this package's for SwiGLU of experts, where they "
            "compute the same as Megatron's. false: use Megatron's. Default: true."
        },
    )
    recompute_elementwise: bool = field(
        default=False,
        metadata={
            "help": "On GPUs, recompute the outputs of norms and SwiGLU in the backward pass instead of storing them, "
            "in micro batches of 4,096 tokens or more. This saves a quarter of activation memory and costs 5 to 7 %% "
            "of the time. It requires --fast_kernels. Default: false."
        },
    )
    sync_check: SyncCheckMode = field(
        default="canary",
        metadata={
            "help": "Verification, after every weight sync, that vLLM runs the trained weights. canary: the names and "
            "shapes of the tensors that were sent equal those of the previous sync, and trainer and vLLM agree on the "
            "log-probs of a fixed text up to rounding; the first sync of a run is verified as with full. full: a "
            "checksum of every tensor is also verified. A sync that fails is repeated once; if it fails again, the "
            "run stops and names the tensors that differ. off: no verification. With --vllm_enable_lora true no "
            "checksum is verified, not even in the first sync: vLLM must have a module for each of the adapter's, and "
            "the log-probs must agree. Default: canary."
        },
    )
    rollout_quantization: Quantization = field(
        default="none",
        metadata={
            "help": "fp8: vLLM generates with weights and activations in 8 bits, which it quantizes after every sync. "
            "It needs a GPU that multiplies in FP8 (Ada, Hopper or newer); start `swift rollout` with the same flag, "
            "and set --rollout_importance_sampling_mode token_truncate. docs/quantization.md has more. Default: none."
        },
    )

    resume: str = field(
        default="never",
        metadata={
            "help": "auto: continue from the newest whole checkpoint in --output_dir or in one of its version folders, "
            "in the folder of that run; incomplete and damaged checkpoints are skipped, with a line in the log. "
            "Without a checkpoint the run starts with step 1, and a run that has done all its steps ends at once. "
            "Rollouts that --rollout_dump has stored beyond the checkpoint are trained without being generated again. "
            "A folder checkpoint-N: continue from it. never: start with step 1, unless --finetune false and "
            "--mcore_model or --mcore_adapter name a checkpoint. docs/checkpoints.md describes it. Default: never."
        },
    )
    verify_checkpoint: bool = field(
        default=True,
        metadata={
            "help": "Verify checkpoints before they are loaded: every file against the size and the checksum in "
            "manifest.json, the model, and when a run resumes the tokenizer. A damaged or incomplete checkpoint is "
            "refused, and the error names a whole one. false: files are not verified, and differences are only logged. "
            "Default: true."
        },
    )
    vllm_server_api_key: str | None = field(
        default=None,
        metadata={
            "help": "The --api_key of the rollout servers. Servers and trainer also read it from the environment "
            "variable SWIFT_ROLLOUT_API_KEY, or from the file that SWIFT_ROLLOUT_API_KEY_FILE names. As a flag it is "
            "visible in process listings until the command has read it. It is never written to args.json. Default: "
            "none."
        },
    )
    check: bool = field(
        default=False,
        metadata={
            "help": "Do not train. In one process, without a GPU and without weights: check all flags, read the "
            "dataset, call the reward functions with made-up answers, and print the layout, the batches, the memory of "
            "each GPU by phase, a guess of the time, and settings that fit if these do not. docs/check.md has an "
            "example. Default: false."
        },
    )
    check_gpu: str | None = field(
        default=None,
        metadata={
            "help": "With --check true: the GPU of the run, such as A100-80G, H100-80G or H200-141G. Default: the GPU "
            "of this machine, or H100-80G without one."
        },
    )
