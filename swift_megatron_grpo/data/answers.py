"""Rows with answers (--chord_sft_dataset), encoded once, before the model loads; each step takes its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from swift.template import Template

from swift_megatron_grpo.data.checks import check_rows, refuse_rows
from swift_megatron_grpo.data.encoded_rows import on_all_ranks
from swift_megatron_grpo.data.encoders import encoder_of
from swift_megatron_grpo.data.prompts import shuffled
from swift_megatron_grpo.types import Sample

_MEDIA = ("images", "videos", "audios")
_NOT_TRAINED = -100  # ms-swift's label


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """A row as the template encodes it for training, with the weights that --loss_scale gives its tokens."""

    tokens: np.ndarray  # [t]
    trained: np.ndarray  # [t] bool
    weights: np.ndarray  # [c] of the trained tokens


def encode_answers(dataset: Any, template: Template, longest: int | None, leave_out: bool) -> tuple[list[Answer], int]:
    """Return the rows, and how many were left out for their length. Every rank encodes its share.

    Raises ValueError for rows that cannot be trained, or unless `leave_out` that have more than `longest` tokens.
    """
    columns = [column for column in _MEDIA if column in dataset.column_names]
    shown = [(row, f"has {column}") for column in columns for row, of in enumerate(dataset[column]) if of]
    refuse_rows(dataset, shown, "have media, and answers are trained on text", "; remove these rows")
    check_rows(dataset, takes_images=False)
    encoder = encoder_of(template)
    encoder.set_mode("train")

    def encoded(row: int) -> Answer | str:
        try:
            return answer_of(encoder.encode(dataset[row]))
        except Exception as error:  # whatever ms-swift and the tokenizer raise
            return f"raises {type(error).__name__}: {str(error)[:300]}"

    found = on_all_ranks(encoded, len(dataset))
    wrong = [(row, each) for row, each in enumerate(found) if isinstance(each, str)]
    refuse_rows(dataset, wrong, "cannot be encoded", "; correct these rows, or remove them")
    answers = [each for each in found if isinstance(each, Answer)]
    empty = [(row, "has none") for row, each in enumerate(answers) if not each.trained.any()]
    refuse_rows(dataset, empty, "have no token to train", "; end them with a turn of the assistant, or remove them")
    lengths = [len(each.tokens) for each in answers]
    long = [(row, f"has {tokens}") for row, tokens in enumerate(lengths) if longest is not None and tokens > longest]
    if long and (len(long) == len(answers) or not leave_out):
        advice = (
            "; shorten or remove them, use a larger --max_length, or --truncation_strategy delete to leave them out"
        )
        refuse_rows(dataset, long, f"have more than {longest} tokens, the longest prompt and completion", advice)
    left = {row for row, _ in long}
    return [each for row, each in enumerate(answers) if row not in left], len(long)


def answer_of(encoded: dict[str, Any]) -> Answer:
    """Return a row that ms-swift's template has encoded."""
    trained = np.asarray(encoded["labels"]) != _NOT_TRAINED
    weights = encoded.get("loss_scale")  # None: ms-swift has 1 for every trained token
    of_tokens = np.ones(len(trained)) if weights is None else np.asarray(weights, np.float64)
    return Answer(np.asarray(encoded["input_ids"], np.int32), trained, of_tokens[trained])


class AnswerSource:
    """An endless sequence of answers, in an order that depends only on the seed. Every rank has the same one."""

    def __init__(self, answers: Sequence[Answer], seed: int, per_step: int) -> None:
        self._answers = answers
        self._seed = seed
        self._per_step = per_step

    def of_step(self, step: int) -> list[Sample]:
        """Return the samples of a step, counted from 0. Their groups are negative, those of completions are not."""
        rows = len(self._answers)
        places = [divmod(number, rows) for number in range(step * self._per_step, (step + 1) * self._per_step)]
        orders = {epoch: shuffled(rows, self._seed + epoch) for epoch in dict(places)}
        return [_sample(self._answers[orders[epoch][place]], -1 - i) for i, (epoch, place) in enumerate(places)]


def _sample(answer: Answer, group: int) -> Sample:
    mask, weights = answer.trained.tolist(), answer.weights.tolist()
    return Sample(answer.tokens.tolist(), mask, advantage=0.0, group=group, sft_weights=weights)
