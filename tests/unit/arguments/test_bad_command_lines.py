"""Command lines with one mistake are refused before a model loads, each by its flag and with a value that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forking.client import run_code, run_script
from tests.paths import REPOSITORY
from tests.unit.arguments.bad_command_lines import ADVICE, BATCHED_MESSAGES, CASES, NOTED, Case
from tests.unit.arguments.bad_files import FILES

LEAST_ANSWERED = 0.98
READS_FILES = ("rows", "missing", "reward")
NOT_FOLLOWED = (*READS_FILES, "misspelt", "other name")  # where the advice is no value
LEAST_WORKING = 0.97  # of the values that messages suggest; others need a second flag
SECONDS = 10  # of one command line
Outcome = tuple[str, str, str]  # type and text of the error, and what following its advice ends in

# As cli/check/check.py, in one process for all of them. A case whose mistake is in files also reads the datasets.
PARSE = r"""
import contextlib, functools, importlib.metadata, io, json, os, re, signal, sys
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
from swift_megatron_grpo.cli.check.check import Inputs, parse_flags
from swift_megatron_grpo.arguments.start_up_log import start_up_lines
from swift_megatron_grpo.cli.check.check import gpu_of
from swift.utils import utils
from transformers import HfArgumentParser

# Built once for all command lines, because that takes longer than to check one.
parser_of = functools.cache(HfArgumentParser)
utils.HfArgumentParser = lambda classes: parser_of(*classes)
importlib.metadata.version = functools.cache(importlib.metadata.version)

def too_long(*_):
    raise TimeoutError

def outcome(command_line, reads_files):
    signal.alarm(int(sys.argv[2]))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            args = parse_flags(command_line)
            gpu_of(args.check_gpu)
            if reads_files:
                Inputs(args)
        return ["accepted", "\n".join(start_up_lines(args))]
    except BaseException as error:
        return [type(error).__name__, str(error)]
    finally:
        signal.alarm(0)

def corrected(command_line, error):  # by the first advice that is a flag and a value; None: there is no such advice
    advice = re.search(r"(?m)(?:use|add) (--\w+) ([^-\s;,][^\s;,]*)(?= or|;|,|$)", error)
    if advice is None:
        return None
    flag, value = advice.groups()
    first = command_line.index(flag) if flag in command_line else len(command_line)
    last = next((at for at in range(first + 1, len(command_line)) if command_line[at].startswith("--")), None)
    return [*command_line[:first], flag, value, *(command_line[last:] if last else [])]

followed = {}

def outcomes(command_line, reads_files, follows):
    first = outcome(command_line, reads_files)
    advised = corrected(command_line, first[1]) if follows else None
    if advised is None:
        return [*first, ""]
    if (line := json.dumps(advised)) not in followed:
        followed[line] = ": ".join(outcome(advised, False))
    return [*first, followed[line]]

signal.signal(signal.SIGALRM, too_long)
print("RESULT" + json.dumps([outcomes(*case) for case in json.load(open(sys.argv[1]))]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    run_script(REPOSITORY / "scripts" / "make_tiny_model.py", "--out", folder / "model")
    rows = [{"messages": [{"role": "user", "content": f"spell {n}"}], "letters": "a"} for n in range(64)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def quickstart(folder: Path) -> dict[str, list[str]]:
    """Return the flags of templates/cpu_quickstart.sh, with their values."""
    lines = (REPOSITORY / "templates" / "cpu_quickstart.sh").read_text().split("args=(")[1].split("\n)")[0].splitlines()
    words = [line.split("#")[0].split() for line in lines if line.strip().startswith("--")]
    values = {'"$MODEL"': str(folder / "model"), '"$DATASET"': str(folder / "data.jsonl"),
              '"$OUTPUT"': str(folder / "out"),
              '"$here/plugins/letters.py"': str(REPOSITORY / "templates/plugins/letters.py")}  # fmt: skip
    flags = {flag: [values.get(value, value) for value in typed] for flag, *typed in words}
    return flags | {"--check_model": ["false"]}


def command_line(case: Case, folder: Path) -> list[str]:
    named = {"MODEL": folder / "model", "DATA": folder / "data.jsonl", "EMPTY": folder / "empty",
             "BROKEN": folder / "broken.py", "PLAIN": folder / "plain.py",
             "NOT_CALLABLE": folder / "not_callable.py"}  # fmt: skip
    flags = quickstart(folder)
    for word in case.flags:
        if word.startswith("--"):
            values = flags[word] = []
        elif word.startswith("FILE:"):
            values.append(str(folder / word.removeprefix("FILE:")))
        elif word != "NONE":
            values.append(str(named.get(word, word)))
    if "--num_train_epochs" in case.flags:
        del flags["--train_iters"]
    return [word for flag, values in flags.items() for word in (flag, *values)]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    lines: list[Any] = [
        [[word for flag, values in quickstart(folder).items() for word in (flag, *values)], True, False]
    ]
    lines += [
        [command_line(case, folder), case.kind in READS_FILES, case.kind not in NOT_FOLLOWED]
        for case in [*CASES, *NOTED]
    ]
    (folder / "lines.json").write_text(json.dumps(lines))
    printed = run_code("trainer", PARSE, str(folder / "lines.json"), str(SECONDS), folder=folder)
    results = json.loads(printed.split("RESULT")[1])
    return dict(zip(["quickstart", *(case.name for case in [*CASES, *NOTED])], map(tuple, results), strict=True))


def is_answered(case: Case, outcome: Outcome) -> bool:
    kind, message, _ = outcome
    return (
        kind == "ValueError"
        and all(text in message for text in case.contains)
        and any(text in message for text in ADVICE)
    )


def test_the_quickstart_itself_is_accepted(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["quickstart"][0] == "accepted"


def test_98_of_100_mistakes_are_answered_by_flag_and_working_value(
    outcomes: dict[str, Outcome],
) -> None:
    unanswered = {case.name: outcomes[case.name] for case in CASES if not is_answered(case, outcomes[case.name])}
    share = 1 - len(unanswered) / len(CASES)
    assert len(CASES) >= 300 and len({case.name for case in CASES}) == len(CASES)
    assert share >= LEAST_ANSWERED, f"{share:.1%} are answered; not: {json.dumps(unanswered, indent=1)}"


def test_batched_messages_of_virtual_stages_are_refused(outcomes: dict[str, Outcome]) -> None:
    kind, message, followed = outcomes[BATCHED_MESSAGES.name]
    assert kind == "ValueError" and message.startswith("--overlap_p2p_comm false with two pipeline stages")
    assert followed.startswith("accepted: ")


def test_no_mistake_is_accepted(outcomes: dict[str, Outcome]) -> None:
    assert [case.name for case in CASES if outcomes[case.name][0] == "accepted"] == []


@pytest.mark.parametrize("case", NOTED, ids=lambda case: case.name)
def test_what_changes_nothing_is_accepted_with_a_line_in_the_log(case: Case, outcomes: dict[str, Outcome]) -> None:
    kind, lines, _ = outcomes[case.name]
    assert kind == "accepted" and all(text in lines for text in case.contains), (kind, lines)
    assert all(text not in outcomes["quickstart"][1] or text == "trains this run" for text in case.contains[:1])


def test_no_mistake_takes_long_or_ends_in_an_error_of_a_library(outcomes: dict[str, Outcome]) -> None:
    assert {kind for kind, *_ in outcomes.values()} <= {"ValueError", "accepted"}, {
        name: outcome for name, outcome in outcomes.items() if outcome[0] not in ("ValueError", "accepted")
    }


def test_the_suggested_values_work(outcomes: dict[str, Outcome]) -> None:
    followed = {name: (message, then) for name, (_, message, then) in outcomes.items() if then}
    refused = {name: case for name, case in followed.items() if not case[1].startswith("accepted: ")}
    assert len(followed) >= 200
    assert len(refused) <= (1 - LEAST_WORKING) * len(followed), json.dumps(refused, indent=1)
