"""A tiny classifier of conversations, and the numbers that transformers computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
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


def make_adapter(folder: Path, classifier: Path) -> Path:
    """Make a LoRA adapter of a classifier, with weights that change its numbers."""
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    adapted.save_pretrained(folder)
    return folder


def encoded(folder: Path, conversations: list[list[dict[str, Any]]]) -> list[list[int]]:
    """Return the tokens of conversations under the tokenizer's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.apply_chat_template(one, tokenize=True, return_dict=False) for one in conversations]


@torch.no_grad()
def plain_scores(folder: Path, texts: list[list[int]], adapter: Path | None = None) -> list[float]:
    """Score texts one by one."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model = (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()
    return [float(model(torch.tensor([tokens])).logits[0, 0]) for tokens in texts]
