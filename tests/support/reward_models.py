"""A tiny classifier of conversations, and the numbers that transformers computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def make_classifier(folder: Path, model: Path) -> Path:
    """Give a tiny model a head with one number."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
    )
    classifier.score.weight.data.normal_(std=0.02)
    classifier.save_pretrained(folder)
    return folder


def encoded(folder: Path, conversations: list[list[dict[str, Any]]]) -> list[list[int]]:
    """Return the tokens of conversations under the tokenizer's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.apply_chat_template(one, tokenize=True, return_dict=False) for one in conversations]


@torch.no_grad()
def plain_scores(folder: Path, texts: list[list[int]]) -> list[float]:
    """Score texts one by one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [float(model(torch.tensor([tokens])).logits[0, 0]) for tokens in texts]
