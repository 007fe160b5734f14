"""Generate with vLLM from a saved folder, with its own defaults. No megatron, no ms-swift.

python vllm_saved.py OUT.json FOLDER

Writes the sampling defaults that vLLM reads in the folder, the largest difference of the log-probs in its probe.json,
and a completion.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM


def main(out: str, folder: str) -> None:
    Path(out).write_text(json.dumps(report(folder)))


def report(folder: str) -> dict[str, Any]:
    probe = json.loads(Path(folder, "probe.json").read_text())
    llm = LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=2, enforce_eager=True, seed=0,
              kv_cache_memory_bytes=2**26)  # fmt: skip
    params = llm.get_default_sampling_params()
    defaults = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
    params.max_tokens, params.seed, params.prompt_logprobs = 8, 1, 0
    [result] = llm.generate({"prompt_token_ids": probe["tokens"]}, params, use_tqdm=False)
    assert result.prompt_logprobs is not None
    given = zip(probe["tokens"][1:], result.prompt_logprobs[1:], probe["logprobs"], strict=True)
    difference = max(abs(values[token].logprob - expected) for token, values, expected in given if values is not None)
    [completion] = result.outputs
    return {"defaults": defaults, "difference": difference, "completion": list(completion.token_ids)}


if __name__ == "__main__":
    main(*sys.argv[1:])
