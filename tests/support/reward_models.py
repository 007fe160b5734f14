"""A tiny classifier of conversations, and the numbers that transformers computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def make_classifier(folder: Path, model: Path) -> Path:
    """Give a tiny model a head with one number, whose weights are large enough to tell texts apart."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
    )
    classifier.score.weight.data.normal_()
    classifier.save_pretrained(folder)
    return folder


@torch.no_grad()
def plain_scores(folder: Path, conversations: list[list[dict[str, Any]]]) -> list[float]:
    """Score conversations one by one, under the tokenizer's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for messages in conversations:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_tensors="pt", return_dict=False)
        scores.append(float(model(ids).logits[0, 0]))
    return scores
