"""Make a checkpoint of a Qwen3 shape with random weights; speed and memory do not depend on their values.

    python -m benchmarks.harness.models SHAPE FOLDER

Runs as a separate process, so that its GPU memory is freed when it exits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scripts.make_tiny_model import make_tokenizer

from .workload import SHAPES, TEMPLATE_TOKENS_FILE, Shape

# ms-swift's template for Qwen3 puts this in front of every completion, as part of the prompt.
NOT_THINKING = "<think>\n\n</think>\n\n"


def make_checkpoint(folder: Path, shape: Shape) -> None:
    tokenizer = fill_vocabulary(make_tokenizer(), shape.vocabulary)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # billions of random numbers
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / TEMPLATE_TOKENS_FILE).write_text(str(count_template_tokens(tokenizer)))


def fill_vocabulary(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> PreTrainedTokenizerFast:
    """Add a text for every token id of the vocabulary: a random model samples all of them, and vLLM decodes them."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    texts = {number: f"<{number}>" for number in range(len(tokenizer), vocabulary)}
    texts |= {token["id"]: token["content"] for token in state["added_tokens"]}  # otherwise they move to the end
    state["model"]["vocab"] |= {text: number for number, text in texts.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
    )


def count_template_tokens(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of tokens that ms-swift's template adds to a user's turn."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text + NOT_THINKING).input_ids) - 1


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[2]), SHAPES[sys.argv[1]])
