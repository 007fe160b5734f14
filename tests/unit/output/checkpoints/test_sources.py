"""A damaged or incomplete checkpoint is refused by file, with the flag that loads a whole one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.output.checkpoints import sources
from swift_megatron_grpo.output.checkpoints.manifest import (
    MANIFEST,
    FileEntry,
    TokenizerIdentity,
    dataset_identity,
    read_manifest,
    write_manifest,
)
from swift_megatron_grpo.output.checkpoints.sources import (
    BadCheckpoint,
    Source,
    check_optimizer_state,
    check_order_of_experts,
    check_quickly,
    check_sources,
    compare_datasets,
    deal,
    verify_files,
)
from swift_megatron_grpo.output.disk.files import file_checksum
from tests.fakes.ranks import OneRank
from tests.unit.output.checkpoints.saved import FILES, IDENTITY, ROWS, save

READ = [name for name in FILES if not name.endswith(".safetensors")]  # by --mcore_model


def source(folder: Path) -> Source:
    return Source("mcore_model", folder, megatron=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the output folder of a run with three checkpoints."""
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two checkpoints for tests that repair the second one."""
    folder = tmp_path_factory.mktemp("run")
    save(folder, 1)
    save(folder, 2)
    return folder


def test_a_whole_checkpoint_is_accepted(run: Path) -> None:
    for step in (1, 2, 3):
        check_quickly([source(run / f"checkpoint-{step}")])
        verify_files([source(run / f"checkpoint-{step}")], OneRank(), 2)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, bit: int = 5) -> None:
    content = bytearray(path.read_bytes())
    place, shift = divmod(bit % (8 * len(content)), 8)
    content[place] ^= 1 << shift
    path.write_bytes(content)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(
    ("damage", "fault"),
    [(Path.unlink, "is missing"), (cut, "bytes instead of"), (flip, "is damaged: its checksum does not match")],
)
def test_a_damaged_file_is_refused_by_name_with_an_earlier_checkpoint(
    run: Path, name: str, damage: Callable[[Path], object], fault: str
) -> None:
    damage(run / "checkpoint-3" / name)
    expected = (
        rf"--mcore_model {run}/checkpoint-3: {re.escape(name)} .*{fault}.*; use --mcore_model {run}/checkpoint-2 "
        r"\(--verify_checkpoint false loads"
    )
    with pytest.raises(BadCheckpoint, match=expected):
        check_quickly([source(run / "checkpoint-3")])
    with pytest.raises(BadCheckpoint, match=expected):
        verify_files([source(run / "checkpoint-3")], OneRank(), 2)


@settings(max_examples=500)
@given(name=st.sampled_from(READ), bit=st.integers(0, 2**32))
def test_every_flipped_bit_of_a_file_is_refused(shared: Path, name: str, bit: int) -> None:
    path = shared / "checkpoint-2" / name
    flip(path, bit)
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(name)} is damaged.*use --mcore_model .*/checkpoint-1"):
        check_quickly([source(shared / "checkpoint-2")])
    flip(path, bit)


@settings(max_examples=300)
@given(bit=st.integers(0, 2**32))
def test_every_flipped_bit_of_the_manifest_is_refused_or_changes_nothing(shared: Path, bit: int) -> None:
    path = shared / "checkpoint-2" / MANIFEST
    whole, manifest = path.read_bytes(), read_manifest(path.parent)
    flip(path, bit)
    try:
        check_quickly([source(shared / "checkpoint-2")])
    except BadCheckpoint as refused:
        assert "manifest.json " in str(refused) and "checkpoint-1" in str(refused)
    else:
        assert read_manifest(path.parent) == manifest  # white space
    path.write_bytes(whole)


def test_whoever_can_write_the_files_can_write_the_checksums(run: Path) -> None:
    """docs/security.md: checksums detect accidents, not intent."""
    folder = run / "checkpoint-3"
    flip(folder / "iter_0000001/__0_0.distcp")
    manifest = read_manifest(folder)
    files = {name: FileEntry(entry.size, file_checksum(folder / name)) for name, entry in manifest.files.items()}
    write_manifest(folder, replace(manifest, files=files))
    check_quickly([source(folder)])
    verify_files([source(folder)], OneRank(), 1)


def test_large_files_are_left_to_the_parallel_check(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_SMALL", 1500)
    flip(run / "checkpoint-3" / "iter_0000001/__0_0.distcp")
    check_quickly([source(run / "checkpoint-3")])
    with pytest.raises(BadCheckpoint, match=r"__0_0\.distcp is damaged"):
        verify_files([source(run / "checkpoint-3")], OneRank(), 2)


def test_only_whole_checkpoints_are_offered(run: Path) -> None:
    (run / "checkpoint-3" / MANIFEST).unlink()
    flip(run / "checkpoint-2" / "args.json")
    with pytest.raises(BadCheckpoint, match=r"its save was interrupted; use --mcore_model \S+/checkpoint-1 "):
        check_quickly([source(run / "checkpoint-3")])
    with pytest.raises(BadCheckpoint, match=r"use --mcore_model \S+/checkpoint-1 "):
        verify_files([source(run / "checkpoint-2")], OneRank(), 1)
    cut(run / "checkpoint-1" / "args.json")
    with pytest.raises(BadCheckpoint, match=r"no other checkpoint in .* is whole, so the run must start again"):
        check_quickly([source(run / "checkpoint-2")])


def test_a_later_checkpoint_is_offered_if_no_earlier_one_is_whole(run: Path) -> None:
    (run / "checkpoint-2" / "args.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"use --mcore_model \S+/checkpoint-1 "):
        check_quickly([source(run / "checkpoint-2")])
    cut(run / "checkpoint-1" / "args.json")
    for damaged in ("checkpoint-1", "checkpoint-2"):
        with pytest.raises(BadCheckpoint, match=r"use --mcore_model \S+/checkpoint-3 "):
            check_quickly([source(run / damaged)])


def test_the_link_to_the_last_checkpoint_is_resolved(run: Path) -> None:
    (run / "last-checkpoint").symlink_to("checkpoint-3")
    check_quickly([source(run / "last-checkpoint")])
    (run / "checkpoint-3" / "args.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"args\.json is missing; use --mcore_model \S+/checkpoint-2 "):
        check_quickly([source(run / "last-checkpoint")])


def test_checkpoints_of_other_trainers_are_accepted_with_a_warning(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / MANIFEST).unlink()
    old = source(tmp_path / "checkpoint-2")
    check_quickly([old])
    [warning] = check_sources([old], IDENTITY.model, IDENTITY.tokenizer, True, OneRank(), 1)
    assert "checkpoint-2 has no manifest.json" in warning
    save(tmp_path, 3)  # by this trainer
    with pytest.raises(BadCheckpoint, match=r"it has no manifest\.json, which is written last"):
        check_quickly([old])


def test_models_that_are_no_checkpoints_need_no_manifest(tmp_path: Path) -> None:
    model = tmp_path / "Qwen3-0.6B"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert check_sources([Source("model", model, False)], {}, None, True, OneRank(), 1) == []


@pytest.mark.parametrize(("flag", "instead"), [("mcore_model", "--model"), ("mcore_adapter", "--adapters")])
def test_a_checkpoint_without_optimizer_state_cannot_be_resumed(tmp_path: Path, flag: str, instead: str) -> None:
    saved = Source(flag, tmp_path, megatron=True)
    check_optimizer_state([saved])  # without args.json: not by ms-swift
    (tmp_path / "args.json").write_text('{"no_save_optim": null}')
    check_optimizer_state([saved])
    (tmp_path / "args.json").write_text('{"no_save_optim": true}')
    check_optimizer_state([Source("model", tmp_path, megatron=False)])
    with pytest.raises(BadCheckpoint, match=f"--{flag} .* no optimizer state .* use {instead} {tmp_path}"):
        check_optimizer_state([saved])


def test_a_merged_copy_is_compared_with_other_merged_copies_only(run: Path) -> None:
    exported = run / "checkpoint-3-merged"  # by `swift export`, which writes no manifest
    shutil.copytree(run / "checkpoint-3", exported)
    (exported / MANIFEST).unlink()
    check_quickly([Source("model", exported, False)])


def test_only_the_files_that_are_read_are_verified(run: Path) -> None:
    folder = run / "checkpoint-3"
    flip(folder / "model.safetensors")
    check_quickly([source(folder)])  # --mcore_model does not read it
    with pytest.raises(BadCheckpoint, match=r"--model .* model\.safetensors is damaged"):
        check_quickly([Source("model", folder, megatron=False)])
    shutil.rmtree(folder / "iter_0000001")
    with pytest.raises(BadCheckpoint, match=r"iter_0000001/\.metadata is missing; .*; and 1 more files"):
        check_quickly([source(folder)])


def test_the_ranks_share_the_files_by_size() -> None:
    sizes = {"a": 50, "b": 30, "c": 25, "d": 1}
    shares = deal(sizes, 2)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert [sum(sizes[name] for name in share) for share in shares] == [51, 55]
    assert deal({}, 3) == [[], [], []]


# ---- other models, tokenizers and data


def test_another_model_is_refused(run: Path) -> None:
    expected = r"checkpoint-3: .* another model, with vocab_size 300 instead of 310; use the --model of that run"
    other = {"hidden_size": 64, "vocab_size": 310, "head_dim": 8}
    with pytest.raises(BadCheckpoint, match=expected):
        check_sources([source(run / "checkpoint-3")], other, IDENTITY.tokenizer, True, OneRank(), 1)
    [warning] = check_sources([source(run / "checkpoint-3")], other, None, False, OneRank(), 1)
    assert re.search(expected, warning)
    assert check_sources([Source("model", run / "checkpoint-3", False)], other, None, True, OneRank(), 1) == []


def test_another_tokenizer_is_refused_if_the_run_resumes(run: Path) -> None:
    for other, how in (
        (TokenizerIdentity(301, "bb"), "of 300 tokens instead of 301"),
        (TokenizerIdentity(300, "bb"), "of as many tokens, 300, that encodes text differently"),
    ):
        with pytest.raises(BadCheckpoint, match=f"another tokenizer, {how}"):
            check_sources([source(run / "checkpoint-3")], IDENTITY.model, other, True, OneRank(), 1)
    assert check_sources([source(run / "checkpoint-3")], IDENTITY.model, None, True, OneRank(), 1) == []


def test_an_optimizers_state_of_experts_in_the_other_order_is_refused(run: Path) -> None:
    folder = run / "checkpoint-3"
    check_order_of_experts(source(folder), in_order=False)
    check_order_of_experts(None, in_order=True)
    with pytest.raises(BadCheckpoint, match=r"--mcore_model .*checkpoint-3 .*; set --fast_kernels false, or"):
        check_order_of_experts(source(folder), in_order=True)
    write_manifest(folder, replace(read_manifest(folder), experts_in_order=True))
    check_order_of_experts(source(folder), in_order=True)
    with pytest.raises(BadCheckpoint, match="set --fast_kernels true"):
        check_order_of_experts(source(folder), in_order=False)


def test_other_data_are_reported_or_refused(tmp_path: Path) -> None:
    checkpoint = source(save(tmp_path, 1, prompts=180))  # place 80 of epoch 1
    assert compare_datasets([checkpoint], dataset_identity(ROWS)) is None
    more = compare_datasets([checkpoint], dataset_identity([*ROWS, *ROWS[:1]]))
    assert more is not None and "the dataset has 101 rows, and had 100" in more and "prompt 80 of epoch 1" in more
    edited = compare_datasets([checkpoint], dataset_identity([{"messages": []}, *ROWS[1:]]))
    assert edited is not None and "row 0 of the dataset is another one, and so are 0 of the other" in edited
    reversed_rows = compare_datasets([checkpoint], dataset_identity(ROWS[::-1]))
    assert reversed_rows is not None and "and so are 63 of the other 63 rows" in reversed_rows
    with pytest.raises(BadCheckpoint, match="continues at prompt 80 of epoch 1, which this dataset does not have"):
        compare_datasets([checkpoint], dataset_identity(ROWS[:80]))


def test_the_checkpoint_that_a_run_resumes_from_decides_about_the_data(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    assert compare_datasets([Source("model", tmp_path / "base", False)], dataset_identity(ROWS)) is None
