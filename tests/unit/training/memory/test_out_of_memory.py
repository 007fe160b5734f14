"""The message of an out-of-memory error."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.training.memory.out_of_memory import RECOMPUTE, out_of_memory_advice, smaller_micro_batches


def test_an_out_of_memory_error_names_rank_phase_and_advice() -> None:
    """It keeps torch's message."""
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"rank 3 ran out of GPU memory in training: less\. Tried"),
        out_of_memory_advice("training", 3, lambda: "less"),
    ):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def test_other_processes_on_the_gpu_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = (
        "CUDA out of memory. Tried to allocate 2.54 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.15 GiB is "
        "free. Process 2992 has 29.07 GiB memory in use. Including non-PyTorch memory, this process has 48.43 GiB "
        "memory in use. Process 4200 has 518.00 MiB memory in use."
    )
    for text in (error, "CUDA out of memory."):
        with pytest.raises(torch.OutOfMemoryError), out_of_memory_advice("training", 3, lambda: "less"):
            raise torch.OutOfMemoryError(text)
    [logged] = caplog.messages
    assert logged.startswith("rank 3 ran out of the GPU's memory, and process 2992 holds 29.07 GiB of it; end what")


def test_other_errors_are_not_changed() -> None:
    with pytest.raises(ValueError, match=r"^no$"), out_of_memory_advice("the train phase", 0, lambda: "less"):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("tokens", "completions", "longest", "advice"),
    [
        (16384, 1, 4000, "lower --flag from 16384 to 8192"),
        (16384, 1, 9000, "lower --flag from 16384 to 9000"),
        (4096, 1, 4096, "--flag 4096 cannot be lower: the longest completion has 4096 tokens with its prompt; use "),
        (None, 4, 900, "lower --flag from 4 to 2"),
        (None, 1, 900, "--flag is already 1, and the longest completion has 900 tokens with its prompt; use "),
    ],
)
def test_advice_names_a_flag_and_a_value_that_works(
    tokens: int | None, completions: int, longest: int, advice: str
) -> None:
    message = smaller_micro_batches("--flag", tokens, completions, longest, train=True)
    assert message.startswith(advice), message
    assert RECOMPUTE in message
    assert RECOMPUTE not in smaller_micro_batches("--flag", tokens, completions, longest, train=False)
