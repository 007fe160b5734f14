"""The answers of docs/how_do_i.md are short, and their flags, values, commands and files exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from swift.agent_template import agent_template_map
from swift.arguments import ExportArguments
from swift.cli.main import parse_yaml_args
from swift.rollout.multi_turn import multi_turns
from swift.template import TEMPLATE_MAPPING

from swift_megatron_grpo.arguments.command_line import known_flags
from swift_megatron_grpo.runtime.gpus import NAMES
from tests.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "how_do_i.md").read_text()
ANSWERS = dict(re.findall(r"^### ([^\n]*)\n\n(.*?)(?=\n##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
MAX_LINES = 3
# Commands of others, which the environment of a run need not have; their flags are theirs.
OTHER_PROGRAMS = ("vllm", "hf", "modelscope", "wandb", "tensorboard", "pip")
OF_SLURM = {"requeue", "signal"}


def codes(answer: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", answer)]


def flags_in(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a piece of code with its values."""
    words = shlex.split(code)
    for i, word in enumerate(words):
        if word.startswith("--"):
            end = next((j for j in range(i + 1, len(words)) if words[j].startswith("--")), len(words))
            yield word[2:].split("=")[0], words[i + 1 : end]


def is_of_a_run(code: str) -> bool:
    return code.split()[0] not in ("swift", *OTHER_PROGRAMS, "#SBATCH") and "CUDA_VISIBLE_DEVICES" not in code


def flags_of_runs() -> list[tuple[str, list[str]]]:
    spans = [code for answer in ANSWERS.values() for code in codes(answer)]
    return [flag for code in spans if is_of_a_run(code) for flag in flags_in(code) if flag[0] not in OF_SLURM]


def test_there_is_an_answer_to_every_question() -> None:
    assert len(ANSWERS) >= 28
    assert all(question.endswith("?") for question in ANSWERS)


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_is_short(question: str) -> None:
    assert len(ANSWERS[question].strip().splitlines()) <= MAX_LINES


def test_flags_of_runs_exist() -> None:
    flags = {name for name, _ in flags_of_runs()}
    assert len(flags) > 30
    assert flags <= known_flags()


def test_names_given_to_flags_are_registered() -> None:
    values = {name: given[0] for name, given in flags_of_runs() if given}
    assert values["multi_turn_scheduler"] in multi_turns
    assert values["agent_template"] in agent_template_map
    assert values["check_gpu"] in NAMES


def test_all_gpus_of_a_check_are_listed() -> None:
    [answer] = [answer for question, answer in ANSWERS.items() if "GPU for a check" in question]
    assert all(name in answer for name in NAMES)


def test_a_released_model_on_a_cpu_uses_a_registered_template() -> None:
    [answer] = [answer for question, answer in ANSWERS.items() if "on a CPU" in question]
    given = {name: value for code in codes(answer) for name, (value, *_) in flags_in(code)}
    assert given["template"] in TEMPLATE_MAPPING


def test_the_merge_of_an_adapter_is_a_command_of_ms_swift() -> None:
    [command] = [code for answer in ANSWERS.values() for code in codes(answer) if code.startswith("swift export")]
    assert {name for name, _ in flags_in(command)} <= {field.name for field in fields(ExportArguments)}


def test_flags_after_a_yaml_file_override_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_CONFIG_FILE", "")  # restored afterwards: ms-swift sets it
    file = tmp_path / "run.yaml"
    file.write_text("rlhf_type: grpo\nlr: 1e-6\n")
    argv = [str(file), "--lr", "2e-6"]
    parse_yaml_args(argv)
    assert argv[:2] == ["--rlhf_type", "grpo"] and argv[-2:] == ["--lr", "2e-6"]
