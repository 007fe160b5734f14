"""The text that a trainer makes of a dataset row, by ms-swift's chat templates."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

# What ms-swift's templates add in front of a completion.
NOT_THINKING, NOT_THINKING_BY_DEFAULT = "<think>\n\n</think>\n\n", ("qwen3", "qwen3_5")


def prompt_text(tokenizer: PreTrainedTokenizerFast, template: str, content: str, system: str | None = None) -> str:
    """Return the whole prompt of a user's turn, with everything in front of the completion."""
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return text + NOT_THINKING if template in NOT_THINKING_BY_DEFAULT else text
