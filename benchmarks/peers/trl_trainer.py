"""GRPOTrainer of TRL (0.29.1) with vLLM in its process, a clock, and completions of given lengths.

Nothing that TRL computes is changed. Three of its seams are used: methods of the trainer that a subclass may override,
callbacks, and `generate` of its vLLM, whose requests receive one length each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl.generation.vllm_generation as generation
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config
from vllm import LLM

from benchmarks.harness.chat import prompt_text
from benchmarks.harness.instrument.clock import REST, Clock
from benchmarks.harness.instrument.process import cap_memory, wait_for_turn, write_results
from benchmarks.harness.job import Job
from benchmarks.harness.workload import places, reward_of, row_of


@dataclass
class Arguments:
    """Flags of the arm that TRL does not have."""

    rows: str = field(metadata={"help": "dataset of bench.py, JSON lines"})
    template: str = field(metadata={"help": "ms-swift's name of the chat template, whose prompts all trainers get"})
    enforce_eager: bool = field(default=False, metadata={"help": "vLLM without CUDA graphs and compilation"})


def run(job: Job) -> None:
    config, model, arguments = TrlParser((GRPOConfig, ModelConfig, Arguments)).parse_args_and_config()
    wait_for_turn(job)
    cap_memory(job)
    if arguments.enforce_eager:
        vars(generation)["LLM"] = partial(LLM, enforce_eager=True)
    config.model_init_kwargs = {"dtype": model.dtype}
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
    contents = [json.loads(line)["messages"][-1]["content"] for line in Path(arguments.rows).read_text().splitlines()]
    prompts = [prompt_text(tokenizer, arguments.template, content) for content in contents]
    rows = {tuple(tokenizer(text=prompt)["input_ids"]): row_of(content)
            for prompt, content in zip(prompts, contents, strict=True)}  # fmt: skip
    trainer = MeasuredTrainer(
        model=model.model_name_or_path,
        reward_funcs=hash_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    trainer.measure(job, rows)
    trainer.train()


def hash_reward(completions: list[str], **columns: Any) -> list[float]:
    return [reward_of(completion) for completion in completions]


class MeasuredTrainer(GRPOTrainer):
    """GRPOTrainer with a clock. Phases: vLLM's `generate`, weight sync, grading, training and optimizer."""

    def measure(self, job: Job, rows: Mapping[tuple[int, ...], int]) -> None:
        """Attach the clock. `rows`: token ids of a prompt: its row of the dataset."""
        self.clock = Clock()
        self.tokens: list[tuple[int, int]] = []
        self.losses: list[torch.Tensor] = []  # of the micro batches of this step
        self.grad_norm = torch.tensor(0.0)
        force_lengths(self.vllm_generation.llm, job, rows, self.clock)
        self.clock.time_method(self.vllm_generation, "sync_weights", "weight_sync")
        self.clock.time_method(self.vllm_generation, "generate", "switch")  # wake-up and sleep, around llm.generate
        self.add_callback(StepClock(self, job))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("forward_backward"):
            loss = super().training_step(*args, **kwargs)
        self.losses.append(loss)
        return loss

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase(REST):  # inside training_step; generates before the first micro batch
            return super()._prepare_inputs(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        batch = super()._generate_and_score_completions(*args, **kwargs)
        if not self.clock.steps:
            prompts, completions = (batch[name].sum(1).tolist() for name in ("prompt_mask", "completion_mask"))
            self.tokens += [(p + c, c) for p, c in zip(prompts, completions, strict=True)]
        return batch

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("grading"):
            return super()._calculate_rewards(*args, **kwargs)

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("optimizer"):  # the Megatron trainers clip in their optimizer as well
            self.grad_norm = super()._clip_grad_norm(*args, **kwargs)
        return self.grad_norm


class StepClock(TrainerCallback):
    """Measures from the first micro batch, whose inputs are generated, to the end of the optimizer step."""

    def __init__(self, trainer: MeasuredTrainer, job: Job) -> None:
        self._trainer, self._job = trainer, job
        self._step = ExitStack()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.losses.clear()
        self._record = self._step.enter_context(self._trainer.clock.step())

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.clock.switch("optimizer")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.clock.switch(REST)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._step.close()
        trainer = self._trainer
        # TRL divides the loss of a micro batch by their number.
        self._record |= {"loss": float(sum(trainer.losses)), "grad_norm": float(trainer.grad_norm)}
        write_results(self._job, trainer.clock, trainer.tokens, rank=0)


def force_lengths(llm: LLM, job: Job, rows: Mapping[tuple[int, ...], int], clock: Clock) -> None:
    """Make vLLM end each completion exactly at the job's length; random weights would not end it."""
    generate = llm.generate

    def generate_lengths(prompts: list[dict[str, Any]], sampling_params: Any, **kwargs: Any) -> Any:
        requests = []
        for row, place in places(rows[tuple(prompt["prompt_token_ids"])] for prompt in prompts):
            request = sampling_params.clone()
            request.max_tokens, request.ignore_eos = job.completion_tokens[row][place], True
            requests.append(request)
        with clock.phase("generation"):
            return generate(prompts, sampling_params=requests, **kwargs)

    llm.generate = generate_lengths
