"""Teach a tiny Qwen3.5 to write the alphabet, mostly, and its layer of multi-token prediction to predict that.

python alphabet.py MODEL

Behind a letter comes the next one, with probability 0.7, or that after it, with 0.2, and so on. The first text is a few
random tokens, and from there on letters. The layer sees states that are detached, as in vLLM.
"""

from __future__ import annotations

import string
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from tests.support.plain_models import load_plain
from tests.support.prediction_heads import PlainHead

STEPS, SEQUENCES, PREFIX, LETTERS, RATE = 200, 24, 8, 40, 3e-3
SHARES = torch.tensor([0.7, 0.2, 0.06, 0.04])  # of the letter one, two, three and four places later


def main(folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase)))
    model = load_plain(folder, dtype=torch.float32, attn_implementation="eager")
    language, output = model.model.language_model, model.lm_head
    head = PlainHead(language.config)
    optimizer = torch.optim.Adam([*language.parameters(), *output.parameters(), *head.parameters()], RATE)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 50) * (1 - 0.9 * step / STEPS)
        places = torch.multinomial(SHARES, SEQUENCES * LETTERS, replacement=True).view(SEQUENCES, LETTERS) + 1
        places[:, 0] = torch.randint(0, 26, (SEQUENCES,))
        prefixes = torch.randint(0, len(tokenizer), (SEQUENCES, PREFIX))
        tokens = torch.cat([prefixes, letters[places.cumsum(1) % 26]], 1)
        hidden = language(input_ids=tokens, use_cache=False).last_hidden_state
        loss = cross_entropy(output(hidden[:, PREFIX - 1 : -1]).flatten(0, 1), tokens[:, PREFIX:].flatten())
        embedded = language.embed_tokens(tokens[:, 1:-1])
        states = head(hidden[:, :-2].detach(), embedded.detach(), language.rotary_emb)[:, PREFIX - 1 :]
        logits = torch.nn.functional.linear(states, output.weight.detach())
        loss = loss + cross_entropy(logits.flatten(0, 1), tokens[:, PREFIX + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learned = model.state_dict() | {f"mtp.{name}": tensor for name, tensor in head.state_dict().items()}
    file = f"{folder}/model.safetensors"
    save_file({name: learned[name].contiguous() for name in load_file(file)}, file, {"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
