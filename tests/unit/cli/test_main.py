"""The command: its subcommands, its exit codes, and suggestions for what is misspelt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.main import COMMANDS, PROGRAM, main, parser_of
from tests.paths import REPOSITORY


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit code of a command line that the parser ends, and what it printed."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    printed = capsys.readouterr()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, printed.out + printed.err


def test_help_lists_every_subcommand_and_needs_no_installed_package(tmp_path: Path) -> None:
    """An import of torch alone would take more than a second."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "swift_megatron_grpo.cli", "--help"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^  ([a-z][a-z-]+)  ", done.stdout, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_subcommand_loads_neither_torch_nor_ms_swift(name: str) -> None:
    code = f"import sys\nfrom swift_megatron_grpo.cli.main import parser_of\nparser_of({name!r}).format_help()\n"
    code += "assert not {'torch', 'swift', 'megatron', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_long_options_are_spelt_as_those_of_ms_swift(name: str) -> None:
    options = [option for option in parser_of(name)._option_string_actions if option not in ("-h", "--help")]
    assert not [option for option in options if not re.fullmatch(r"--[a-z]+(_[a-z]+)*", option)]


def test_a_misspelt_subcommand_or_option_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = ended(capsys, "check_script", "run.sh")
    assert code == 2 and f"{PROGRAM}: there is no check_script; did you mean check-script?" in printed
    code, printed = ended(capsys, "doctor", "--output-dir=x")
    assert code == 2 and f"{PROGRAM} doctor: there is no --output-dir; did you mean --output_dir?" in printed
    assert "did you mean" not in ended(capsys, "zzz")[1]


def test_an_abbreviated_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, "doctor", "--skip")[0] == 2


def test_without_a_subcommand_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = ended(capsys)
    assert code == 0 and "check-layouts" in printed


def test_what_a_subcommand_refuses_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-layouts", "--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"check-layouts: --model {tmp_path} has no config.json")
    assert main(["check-script", "none.sh"]) == 1
    assert capsys.readouterr().err == "check-script: none.sh is not a file\n"


def test_every_flag_of_check_is_left_to_its_own_parser() -> None:
    options = parser_of("check").parse_args(["--", "--model", "m", "--help"])
    assert options.flags == ["--model", "m", "--help"]


@pytest.mark.parametrize("size", ["nan", "inf"])
def test_a_report_refuses_a_size_that_is_no_number(tmp_path: Path, size: str) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--completions_mb", size])
