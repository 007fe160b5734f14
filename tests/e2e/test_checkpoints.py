"""Checkpoints of real runs: complete, or refused by file with the flag of a whole one; a full disk is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from swift_megatron_grpo.output.checkpoints.manifest import has_manifest, list_files, read_manifest
from swift_megatron_grpo.output.checkpoints.sources import BadCheckpoint, Source, check_quickly, verify_files
from tests.fakes.ranks import OneRank
from tests.support.runs import CANNED, PLUGINS, Finished, make_model, megatron_rlhf

pytestmark = pytest.mark.e2e
DEFAULTS = "generation_config.json"
STATES = ["--save_steps", "1", "--no_save_optim", "false", "--no_save_rng", "false", *CANNED]


@pytest.fixture(scope="module")
def saved(folder: Path, dense: Path, dataset: Path) -> Path:
    """Return the output folder of a run that saved checkpoint-1 and checkpoint-2 on one rank."""
    run = megatron_rlhf(dense, dataset, folder / "saved", 1, STATES)
    assert run.code == 0, run.output[-4000:]
    check_announced_size(run)
    return run.folder


def check_announced_size(run: Finished) -> None:
    """The size that the run logs at its start is a lower bound, and close: formats add a part to so small a model."""
    announced = re.search(r"a checkpoint takes ([\d.]+) MB or a little more", run.output)
    assert announced is not None
    assert 0.8 < float(announced[1]) * 1e6 / read_manifest(run.last_checkpoint).size < 1


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run", symlinks=True))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resume(model: Path, dataset: Path, run: Path, checkpoint: str, ranks: int = 1, *flags: str) -> Finished:
    source = ["--finetune", "false", "--mcore_model", str(run / checkpoint), "--train_iters", "3"]
    return megatron_rlhf(model, dataset, run, ranks, [*STATES, *source, *flags])


def test_every_file_that_is_read_is_verified(copy: Path, dense: Path) -> None:
    folder = copy / "checkpoint-2"
    assert (folder / DEFAULTS).read_bytes() == (dense / DEFAULTS).read_bytes()
    manifest = read_manifest(folder)
    assert {name: entry.size for name, entry in manifest.files.items()} == list_files(folder)
    assert (manifest.step, manifest.dataset.rows, manifest.model["num_hidden_layers"]) == (2, 32, 4)
    damaged = 0
    for source in (Source("mcore_model", folder, True), Source("model", folder, False)):
        check_quickly([source])
        verify_files([source], OneRank(), 1)
        for name in source.entries(manifest):
            flip(folder / name)
            with pytest.raises(BadCheckpoint, match=rf"{name} is damaged.* use --{source.flag} {copy}/checkpoint-1 "):
                verify_files([source], OneRank(), 1)
            flip(folder / name)
            damaged += 1
    assert damaged >= 12


def test_a_damaged_checkpoint_is_refused_and_the_one_it_offers_resumes(
    copy: Path, dense: Path, dataset: Path, tmp_path: Path
) -> None:
    """The damage is in a large file, so all ranks verify it; the resumed run has another dataset, which is reported.

    An incomplete checkpoint is removed first, although it is the newest.
    """
    flip(copy / "checkpoint-2" / "iter_0000002" / "__0_0.distcp")
    refused = resume(dense, dataset, copy, "checkpoint-2", 2)
    offer = f"use --mcore_model {copy}/checkpoint-1 "
    assert refused.code != 0
    assert f"--mcore_model {copy}/checkpoint-2: iter_0000002/__0_0.distcp is damaged" in refused.output
    assert offer in refused.output and "RankFailure" not in refused.output

    rows = dataset.read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join([rows[1], rows[0], *rows[2:]]))
    (copy / "checkpoint-9").mkdir()
    os.utime(copy / "checkpoint-9", (2**32, 2**32))
    resumed = resume(dense, other, copy, "checkpoint-1", 1, "--save_total_limit", "2")
    assert resumed.code == 0, resumed.output[-4000:]
    assert "checkpoint-1 was saved by a run with other data: row" in resumed.output
    assert [step["iteration"] for step in resumed.log] == ["1/2", "2/3", "3/3"]
    check_quickly([Source("mcore_model", copy / "checkpoint-2", True)])  # the run has overwritten it
    assert sorted(path.name for path in copy.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (1, 2, 3)]


def test_adapters_merged_copies_and_asynchronous_saves_are_covered(folder: Path, dense: Path, dataset: Path) -> None:
    flags = [*STATES, "--tuner_type", "lora", "--merge_lora", "true", "--async_save", "true"]
    run = megatron_rlhf(dense, dataset, folder / "lora", 1, flags)
    assert run.code == 0, run.output[-4000:]
    for step in (1, 2):
        for name in (f"checkpoint-{step}", f"checkpoint-{step}-merged"):
            manifest = read_manifest(run.folder / name)
            assert {file: entry.size for file, entry in manifest.files.items()} == list_files(run.folder / name)
    last = run.folder / "checkpoint-2"
    assert not (last / DEFAULTS).exists() and (run.folder / "checkpoint-2-merged" / DEFAULTS).is_file()
    for source, name in (
        (Source("mcore_adapter", last, True), "iter_0000002/__0_0.distcp"),
        (Source("adapters", last, False), "adapter_model.safetensors"),
        (Source("model", run.folder / "checkpoint-2-merged", False), "model.safetensors"),
    ):
        check_quickly([source])
        flip(source.folder / name)
        with pytest.raises(BadCheckpoint, match=rf"{name} is damaged.* use --{source.flag} .*/checkpoint-1"):
            check_quickly([source])


def test_a_missing_file_is_refused_before_ms_swift_reads_any(copy: Path, dense: Path, dataset: Path) -> None:
    (copy / "checkpoint-2" / "args.json").unlink()
    refused = resume(dense, dataset, copy, "checkpoint-2")
    assert refused.code != 0 and "checkpoint-2: args.json is missing; use --mcore_model" in refused.output


def test_another_model_or_tokenizer_is_refused(copy: Path, dense: Path, dataset: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", extra=["--layers", "2"])
    refused = resume(other, dataset, copy, "checkpoint-2")
    assert refused.code != 0 and "another model, with num_hidden_layers 4 instead of 2" in refused.output

    retokenized = Path(shutil.copytree(dense, tmp_path / "retokenized"))
    tokenizer = json.loads((retokenized / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (retokenized / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused = resume(retokenized, dataset, copy, "checkpoint-2")
    assert refused.code != 0 and "another tokenizer, of as many tokens" in refused.output


def test_a_disk_that_fills_up_is_named_and_the_earlier_checkpoint_stays(
    folder: Path, dense: Path, dataset: Path
) -> None:
    flags = [*STATES, str(PLUGINS / "small_files.py"), "--callbacks", "small_files"]
    run = megatron_rlhf(dense, dataset, folder / "full", 2, flags)
    assert run.code != 0
    machine = socket.gethostname()
    assert f"{run.folder}/checkpoint-2 could not be written by rank 1 on {machine}: a file may not be" in run.output
    assert "unexpected pos" not in run.output.splitlines()[-1]
    assert not (run.folder / "checkpoint-2").exists() and has_manifest(run.folder / "checkpoint-1")
    assert f"the newest whole one is {run.folder}/checkpoint-1" in run.output
