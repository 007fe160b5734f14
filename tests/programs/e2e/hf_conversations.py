"""Compute gradient norm of the first step and log-probs of dumped conversations with plain transformers, not Megatron.

python hf_conversations.py MODEL ROLLOUT.jsonl NUM_GENERATIONS        loss_type grpo, advantages as ms-swift's
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(folder: str, rollout: str, num_generations: int) -> None:
    with Path(rollout).open() as file:
        rows = [json.loads(line) for line in file]
    rewards = torch.tensor([sum(row["rewards"]) for row in rows], dtype=torch.float64).view(-1, num_generations)
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten().tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # else the padding token, which a tool may write, has no gradient
    difference = 0.0
    for row, advantage in zip(rows, advantages, strict=True):
        of_sequences = []
        for sequence in (*row.get("earlier", []), row):
            tokens = torch.tensor([sequence["prompt_ids"] + sequence["completion_ids"]])
            logits = model(tokens).logits[0, len(sequence["prompt_ids"]) - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(sequence["completion_ids"])[:, None])[:, 0]
            of_sequences.append(logprobs[torch.tensor(sequence["sampled"])])
            gaps = of_sequences[-1].detach() - torch.tensor(sequence["logprobs"])
            difference = max(difference, gaps.abs().max().item())
        sampled = torch.cat(of_sequences)
        loss = -(torch.exp(sampled - sampled.detach()) * advantage).mean() / len(rows)
        loss.backward()
    squares = sum(weight.grad.double().square().sum().item() for weight in model.parameters())
    print(json.dumps({"grad_norm": squares**0.5, "logprob_difference": difference}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
