"""Compute the loss of a Qwen3.5's layer of multi-token prediction, and its gradient, in fp64 with plain transformers.

python hf_draft_head.py MODEL OUT.pt
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.hf_gradients import TEMPERATURE, use_exact_delta_rule
from tests.support.plain_models import load_plain
from tests.support.prediction_heads import PlainHead


def main(folder: str, out: str) -> None:
    use_exact_delta_rule("qwen3_5")
    model = load_plain(folder, dtype=torch.float64, attn_implementation="eager")
    language = model.model.language_model
    head = PlainHead(language.config).double()
    head.load(load_file(f"{folder}/model.safetensors"))
    samples = fixed_samples(model.config.get_text_config().vocab_size, 8, 1, True)
    total, trained = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        with torch.no_grad():
            hidden = language(input_ids=tokens, use_cache=False).last_hidden_state
            embedded = language.embed_tokens(tokens)
        states = head(hidden[:, :-2], embedded[:, 1:-1], language.rotary_emb)
        logits = torch.nn.functional.linear(states[0], model.lm_head.weight.detach())
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        rows = [i for i, is_trained in enumerate(sample.completion_mask) if is_trained]
        trained += len(rows)
        total = total - torch.stack([log_p[i - 2, sample.tokens[i]] for i in rows]).sum()
    loss = total / trained
    loss.backward()
    grads = {f"mtp.{name}": parameter.grad for name, parameter in head.named_parameters()}
    torch.save({"loss": loss.item(), "grads": grads}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
