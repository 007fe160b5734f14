"""Flags of a cluster become those of a small machine, and keep how they relate."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo.arguments.refused import REFUSED_COMPOSITE
from swift_megatron_grpo.cli.check_script.stand_ins import (
    NoStandIn,
    architecture_of,
    differences,
    reduce,
    replace_inputs,
)
from swift_megatron_grpo.launch.roles import read_flags, words_of
from tests.paths import REPOSITORY
from tests.scripts import NOT_RUN, counts, published_scripts, table


def flags(text: str) -> dict[str, list[str]]:
    return read_flags(text.split())


def test_flags_are_read_as_ms_swifts_parser_reads_them() -> None:
    read = read_flags(["--lr=1", "--reward-funcs", "a", "b", "--finetune", "--lr", "2", "--system", "-- a b"])
    assert read == {"lr": ["2"], "reward_funcs": ["a", "b"], "finetune": [], "system": ["-- a b"]}
    assert words_of(read) == ["--lr", "2", "--reward_funcs", "a", "b", "--finetune", "--system", "-- a b"]


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ("--tensor_model_parallel_size 4 --expert_model_parallel_size 4 --pipeline_model_parallel_size 2", 2,
         {"tensor_model": 2, "pipeline_model": 1, "context": 1, "expert_model": 2}),
        ("--tensor_model_parallel_size 4 --expert_model_parallel_size 4 --pipeline_model_parallel_size 2", 4,
         {"tensor_model": 2, "pipeline_model": 2, "context": 1, "expert_model": 2}),
        ("--context_parallel_size 8", 2, {"tensor_model": 1, "pipeline_model": 1, "context": 2, "expert_model": 1}),
        ("--lr 1", 2, {"tensor_model": 1, "pipeline_model": 1, "context": 1, "expert_model": 1}),
    ],
)  # fmt: skip
def test_what_is_parallel_stays_parallel_while_there_are_ranks(
    given: str, ranks: int, expected: dict[str, int]
) -> None:
    reduced = reduce(flags(given), ranks, 2)
    assert {name: int(reduced[f"{name}_parallel_size"][0]) for name in expected} == expected


def test_batches_and_lengths_keep_how_they_relate() -> None:
    given = "--num_generations 8 --micro_batch_size 8 --global_batch_size 128 --steps_per_generation 4 "
    given += "--max_length 8192 --max_completion_length 2048 --vllm_max_model_len 10000 --num_train_epochs 1"
    reduced = reduce(flags(given), 2, 2)
    assert [reduced[name] for name in ("num_generations", "micro_batch_size", "global_batch_size")] == [
        ["4"],
        ["4"],
        ["8"],
    ]
    assert reduced["steps_per_generation"] == ["2"] and reduced["train_iters"] == ["2"]
    length, completion, room = (
        int(reduced[name][0]) for name in ("max_length", "max_completion_length", "vllm_max_model_len")
    )
    assert room < length + completion and "num_train_epochs" not in reduced
    assert "--num_train_epochs: 1 -> (left out)" in differences(flags(given), reduced)


def test_inputs_that_are_not_here_are_replaced_and_named(tmp_path: Path) -> None:
    given = flags("--dataset org/data#100 --reward_funcs nothing format --report_to wandb --external_plugins no.py "
                  "--gym_env maze --ref_model org/other --system no.txt")  # fmt: skip
    replaced, notes = replace_inputs(given, tmp_path, [])
    assert len(Path(replaced["dataset"][0]).read_text().splitlines()) == 32
    assert replaced["report_to"] == ["none"] and "ref_model" not in replaced
    assert [note.split(":")[0] for note in notes] == [
        "--dataset org/data#100", "--system no.txt", "--external_plugins no.py", "--reward_funcs nothing",
        "--gym_env maze", "--report_to wandb", "--ref_model org/other",
    ]  # fmt: skip
    [plugin] = replaced["external_plugins"]
    compile(Path(plugin).read_text(), plugin, "exec")
    assert sys.modules.get("stand_ins") is None  # only the run imports it


def test_plugins_under_their_older_name_are_replaced_as_well(tmp_path: Path) -> None:
    given = flags("--custom_register_path no/such.py --multi_turn_scheduler walk --template mine --dataset a/b")
    replaced, notes = replace_inputs(given, tmp_path, [{"multi_turn_scheduler": ["swim"], "gym_env": ["lake"]}])
    assert not replaced.keys() & {"custom_register_path", "template"}
    [plugin] = map(Path, replaced["external_plugins"])
    assert "for name in ['walk', 'swim']:" in plugin.read_text() and "['lake']" in plugin.read_text()
    assert [note.split(":")[0] for note in notes[1:]] == [
        "--custom_register_path no/such.py", "--gym_env lake", "--multi_turn_scheduler walk",
        "--multi_turn_scheduler swim", "--template mine",
    ]  # fmt: skip
    here = tmp_path / "here.py"
    here.write_text("")
    replaced, _ = replace_inputs({"custom_register_path": [str(here)], "dataset": ["a/b"]}, tmp_path, [])
    assert replaced["external_plugins"] == [str(here)] and "custom_register_path" not in replaced


def test_a_wrong_name_of_a_scheduler_is_not_replaced(tmp_path: Path) -> None:
    replaced, _ = replace_inputs(flags("--multi_turn_scheduler gim_scheduler --template mine"), tmp_path, [])
    assert replaced["template"] == ["mine"] and "external_plugins" not in replaced


def test_a_function_is_made_up_for_every_reward_model(tmp_path: Path) -> None:
    typed = "--reward_funcs format --reward_model http://h/classify big --reward_model_timeout 9 --reward_weights 1 2 3"
    replaced, notes = replace_inputs(flags(typed), tmp_path, [])
    assert replaced["reward_funcs"] == ["format", "reward_model_1", "reward_model_2"]
    assert replaced["reward_weights"] == ["1", "2", "3"] and not {"reward_model", "reward_model_timeout"} & {*replaced}
    assert any(note.startswith("--reward_funcs reward_model_2: made-up rewards") for note in notes)


def test_inputs_that_are_here_are_kept(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": []}))
    replaced, notes = replace_inputs({"dataset": [f"{rows}#5"], "reward_funcs": ["format"]}, tmp_path, [])
    assert replaced["dataset"] == [f"{rows}#5"] and "external_plugins" not in replaced and notes == []


def test_an_agent_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    replaced, _ = replace_inputs({"agent": ["mine.py:act"], "dataset": ["a/b"]}, tmp_path, [])
    assert replaced["agent"] == [f"{tmp_path}/mine.py:act"]
    replaced, _ = replace_inputs({"agent": ["node mine.js"], "dataset": ["a/b"]}, tmp_path, [])
    assert replaced["agent"] == ["node mine.js"]


def test_the_architecture_is_found_by_name_or_by_config(tmp_path: Path) -> None:
    moe = architecture_of(read_flags(["--model", "Qwen/Qwen3-30B-A3B-Instruct-2507"]))
    assert (moe.hf_type, moe.class_name) == ("qwen3_moe", "Qwen3MoeForCausalLM")
    typed_too = architecture_of(read_flags(["--model", "Qwen/Qwen3-4B-Instruct-2507", "--model_type", "qwen3"]))
    assert (typed_too.model_type, typed_too.template) == ("qwen3", "qwen3_nothinking")  # one of six of that type
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    assert architecture_of(read_flags(["--model", str(tmp_path)])).hf_type == "qwen2"
    with pytest.raises(NoStandIn, match="--model org/unheard-of: ms-swift does not list it; add --model_type"):
        architecture_of(read_flags(["--model", "org/unheard-of"]))
    with pytest.raises(NoStandIn, match="--model_type mine: ms-swift does not list it"):
        architecture_of(read_flags(["--model", "org/unheard-of", "--model_type", "mine"]))
    registered_elsewhere = architecture_of(read_flags(["--model", "Qwen/Qwen3-4B", "--model_type", "mine"]))
    assert registered_elsewhere.model_type == "qwen3"


def test_every_published_script_of_ms_swift_is_read() -> None:
    scripts = published_scripts()
    assert len(scripts) == 24 and {*NOT_RUN} <= {*scripts}
    for script in scripts.values():
        assert read_flags(script.flags.split())["rlhf_type"] == ["grpo"] and script.source and script.commit


def test_types_of_scripts_that_are_not_run_are_refused_by_name() -> None:
    for refused in {refused for refused in NOT_RUN.values() if not refused.startswith("--")}:
        assert refused in REFUSED_COMPOSITE


def test_the_page_of_scripts_has_their_results() -> None:
    page = (REPOSITORY / "docs" / "scripts.md").read_text()
    assert "\n".join(counts()) in page and "\n".join(table()) in page
