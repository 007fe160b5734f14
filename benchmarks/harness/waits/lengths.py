"""External plugin of runs with random weights: each completion or turn ends at the length that its row has for it.

Behind a server a model may end one earlier, once in as many tokens as its vocabulary has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swift.infer_engine import GRPOVllmEngine, RequestConfig
from swift.infer_engine.protocol import RolloutInferRequest
from swift.megatron.trainers.base import BaseMegatronTrainer

from benchmarks.harness.instrument.random_weights import draw_weights
from swift_megatron_grpo.generation.local import engine as local_engine
from swift_megatron_grpo.generation.local.conversations import MultiTurnVllm
from swift_megatron_grpo.generation.remote import generation as remote_generation
from swift_megatron_grpo.trainer.grpo_trainer import MegatronGRPOTrainer


def length_of(columns: Any, place: int, turn: int = 0) -> int:
    return int(columns["lengths"][place][turn])


def limit_completions() -> None:
    """Each is a request by itself: those of a prompt, as one request, would have one length."""
    params = local_engine._params

    def with_length(engine: Any, inputs: Any, batch: Any, sampling: Any) -> Any:
        [request] = batch
        made = params(engine, inputs, batch, sampling)
        made.max_tokens = length_of(request.prompt.row, request.place)
        return made

    vars(local_engine).update(
        _batches=lambda requests, is_greedy: [[request] for request in requests], _params=with_length
    )


def limit_completions_of_servers() -> None:
    payloads = remote_generation._Payloads
    payload = payloads.payload

    def with_length(self: Any, request: Any, *others: Any) -> dict[str, Any]:  # older checkouts have fewer
        made = payload(self, request, *others)
        made["sampling"]["max_tokens"] = length_of(request.prompt.row, request.place)
        return made

    replace_methods(payloads, payload=with_length)


def limit_turns() -> None:
    infer = MultiTurnVllm.infer_async

    async def with_length(self: Any, request: RolloutInferRequest, config: RequestConfig, **options: Any) -> Any:
        turn = sum(message["role"] == "assistant" for message in request.messages)
        # An older checkout counts all requests of a generation, which are whole groups.
        place = int(request.uuid.rpartition("-")[2]) % len(request.data_dict["lengths"])
        limited = replace(config, max_tokens=length_of(request.data_dict, place, turn))
        return await infer(self, request, limited, **options)

    replace_methods(MultiTurnVllm, infer_async=with_length)


def ignore_ends() -> None:
    prepare = GRPOVllmEngine._prepare_generation_config

    def without_end(self: Any, config: RequestConfig) -> Any:
        made = prepare(self, config)
        made.ignore_eos = True
        return made

    replace_methods(GRPOVllmEngine, _prepare_generation_config=without_end, _add_stop_words=do_nothing)


def replace_methods(owner: type, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def do_nothing(*_: Any) -> None: ...


draw_weights()
ignore_ends()
limit_completions()
limit_completions_of_servers()
limit_turns()
for trainer in (BaseMegatronTrainer, MegatronGRPOTrainer):
    replace_methods(trainer, save_checkpoint=do_nothing)
