"""Compare log-probs of the probe with plain transformers (and peft) on a saved checkpoint. No megatron, no ms-swift.

python hf_logprobs.py CHECKPOINT [BASE_MODEL]        BASE_MODEL: the checkpoint is a peft adapter
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.support.plain_models import load_plain, logits_of


def main(checkpoint: str, base: str | None) -> None:
    probe = json.loads(Path(checkpoint, "probe.json").read_text())
    model = load_plain(base or checkpoint, dtype=torch.float32)
    assert "fla" not in sys.modules  # the CPU platform's stand-in would be compared with itself
    if base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, checkpoint)
    tokens = torch.tensor([probe["tokens"]])
    with torch.no_grad():
        logits = logits_of(model.eval(), tokens)[:-1].float() / probe["temperature"]
    logprobs = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    difference = (logprobs - torch.tensor(probe["logprobs"])).abs()
    print(json.dumps({"max": difference.max().item(), "mean": difference.mean().item()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
