"""Compare what saved_families.py has saved with plain transformers and peft. No megatron, no ms-swift.

python hf_saved.py OUT.json FOLDER TYPE...

FOLDER has the source of each TYPE and what was saved of it: a whole model, an adapter and the model merged with it.
Writes for each type the largest differences of log-probs and of merged weights, and files that are not the source's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig

from tests.support.plain_models import load_plain, logits_of, takes_media

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "What is it? <think>"}]
CHAT_WITH_IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


def main(out: str, folder: str, *types: str) -> None:
    Path(out).write_text(json.dumps({model_type: report(Path(folder), model_type) for model_type in types}))


def report(folder: Path, model_type: str) -> dict[str, Any]:
    saved = (
        f"{model_type}{save}" for save in ("", "-full/checkpoint-0", "-lora/checkpoint-0-merged", "-lora/checkpoint-0")
    )
    source, whole, merged, adapter = (str(folder / name) for name in saved)
    with_adapter = load(merged)
    adapted = PeftModel.from_pretrained(load(source), adapter)
    differences = {
        "whole": difference(load(whole), whole),
        "merged": difference(with_adapter, merged),
        "adapter": difference(adapted, adapter),
    }
    weights, expected = adapted.merge_and_unload().state_dict(), with_adapter.state_dict()
    assert weights.keys() == expected.keys()
    differences["weights"] = max((weights[name] - expected[name]).abs().max().item() for name in expected)
    return {**differences, "other files": other_files(source, whole, merged)}


def load(folder: str) -> Any:
    model, info = load_plain(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], info
    return model.eval()


@torch.no_grad()
def difference(model: Any, folder: str) -> float:
    """Return the largest difference of the log-probs that Megatron has computed."""
    probe = json.loads(Path(folder, "probe.json").read_text())
    tokens = torch.tensor([probe["tokens"]])
    logits = logits_of(model, tokens)[:-1].float() / probe["temperature"]
    logprobs = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return float((logprobs - torch.tensor(probe["logprobs"])).abs().max())


def other_files(source: str, *folders: str) -> list[str]:
    """Return what a user of the folders would read otherwise than in the source."""
    others = [f"config: {config(one)}" for one in folders if not is_part_of(config(source), config(one))]
    for read in (generation, tokenizer, *([processor] if takes_media(source) else [])):
        expected = read(source)
        others += [f"{folder}: {read.__name__}, not {expected}" for folder in folders if read(folder) != expected]
    return others


def config(folder: str) -> Any:
    return AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""}


def is_part_of(source: Any, saved: Any) -> bool:
    """Return True if the saved config has all values of the source's, but for the type of the weights."""
    if not isinstance(source, dict) or not isinstance(saved, dict):
        return bool(source == saved)
    return all(name == "dtype" or (name in saved and is_part_of(value, saved[name])) for name, value in source.items())


def generation(folder: str) -> Any:
    return GenerationConfig.from_pretrained(folder).to_dict()


def tokenizer(folder: str) -> Any:
    loaded = AutoTokenizer.from_pretrained(folder)
    texts = [loaded.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=add) for add in (False, True)]
    settings = loaded.special_tokens_map, loaded.model_max_length, loaded.padding_side, loaded.get_vocab()
    return [*texts, loaded(texts).input_ids, loaded.decode(list(range(len(loaded)))), *settings]


def processor(folder: str) -> Any:
    from PIL import Image

    loaded = AutoProcessor.from_pretrained(folder)
    text = loaded.apply_chat_template(CHAT_WITH_IMAGE, tokenize=False, add_generation_prompt=True)
    image = Image.radial_gradient("L").resize((90, 70)).convert("RGB")
    inputs = loaded(images=[image], text=[text], return_tensors="pt")
    settings = loaded.image_processor.to_dict(), loaded.video_processor.to_dict()
    return [text, {name: value.tolist() for name, value in inputs.items()}, *settings]


if __name__ == "__main__":
    main(*sys.argv[1:])
