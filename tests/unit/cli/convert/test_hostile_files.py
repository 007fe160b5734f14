"""Files that may come from anywhere: nothing in them runs, none of them takes long, and none ends in a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from swift_megatron_grpo.cli.main import main

_DOUBLED = range(1, 40)
BOMBS = {
    "list.yaml": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in _DOUBLED),
    "map.yaml": "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{k: *a{i - 1}, l: *a{i - 1}}}\n" for i in _DOUBLED),
    "merge.yaml": "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in _DOUBLED),
    "self.yaml": "a: &a {b: *a}\n",
    "references.yaml": "a0: xy\n" + "".join(f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'\n" for i in _DOUBLED),
    "long_key.yaml": f"? {'x' * 9000}\n: {{{', '.join(f'{i}: 1' for i in range(100))}}}\n",
    "variables.sh": "A=xy\n" + "A=$A$A\n" * 40,
    "arrays.sh": "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "deep.yaml": "{a: " * 3000 + "}" * 3000,
    "deep.sh": "a=(" * 5000,
    "chain.yaml": "".join(f"a{i}: '${{a{i + 1}}}'\n" for i in range(5000)),
    "digits.yaml": f"a: {'9' * 5000}\n",
    "hexadecimal.yaml": f"a: 0x{'f' * 5000}\n",
    "date.yaml": "a: 2024-13-45\n",
    "empty_number.yaml": "a: !!int ''\n",
    "object.yaml": "a: !!python/object/apply:os.system ['exit 1']\n",
    "brackets.yaml": "a: [\n",
    "large.yaml": "a: b\n" * 100_000,
}
EVIL = "x\ntouch made #"
BINARY = bytes(range(256)) * 20


@pytest.mark.parametrize("name", [*BOMBS, "binary.sh", "binary.yaml"])
def test_a_file_that_is_too_large_or_wrong_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(BOMBS[name].encode() if name in BOMBS else BINARY)
    began = time.monotonic()
    assert main(["convert", str(path), "--trainer", "verl"]) == 1
    assert time.monotonic() - began < 60
    assert capsys.readouterr().err.startswith(f"convert: {path}: ")


def test_references_to_themselves_stay_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = "".join(f"a{i}: '${{a{i + 1}}}${{a{i + 1}}}'\n" for i in range(60)) + "a60: ''\n"
    script = converted(tmp_path / "a.yaml", empty + "b: '${c}'\nc: 'x${b}'\nd: '${d}'\n", capsys)
    assert "#   b: x${b}\n" in script and "#   d: ${d}\n" in script


def converted(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    path.write_text(text)
    assert main(["convert", str(path), "--trainer", "verl"]) == 0
    return capsys.readouterr().out


def run(script: str, folder: Path) -> list[str]:
    """Run a script with a `megatron` that prints its words, and return them."""
    program = folder / "bin" / "megatron"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    assert not (folder / "made").exists() and done.stderr == ""
    return done.stdout.splitlines()


def test_no_key_value_or_name_of_a_file_leaves_its_comment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {EVIL: 1, "data": {EVIL: EVIL, "custom_cls": {EVIL: EVIL}, "shuffle": EVIL}, "ray_kwargs": {EVIL: EVIL}}
    script = converted(tmp_path / f"{EVIL}.yaml", yaml.safe_dump(keys), capsys)
    shell = f"python3 -m verl.trainer.main_ppo {shlex.quote('data.unknown=' + EVIL)}"
    assert script.count("touch made") >= 5
    assert "--rlhf_type" in run(script + converted(tmp_path / "a.sh", shell, capsys), tmp_path)


def test_no_value_becomes_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "data: {train_files: [a, --external_plugins, evil.py]}\ntrainer: {default_local_dir: --external_plugins}\n"
    script = converted(tmp_path / "a.yaml", text + "actor_rollout_ref: {rollout: {top_k: -1}}\n", capsys)
    words = run(script, tmp_path)
    assert "--external_plugins" not in words and "-1" in words
    assert "#   data.train_files: a --external_plugins evil.py: it begins with a dash, as a flag does\n" in script
    assert "#   trainer.default_local_dir: --external_plugins: it begins with a dash" in script


def test_paths_with_spaces_stay_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "data: {train_files: [/a b/c.parquet, '/it''s.parquet']}\nactor_rollout_ref: {model: {path: /my models/x}}\n"
    words = run(converted(tmp_path / "a.yaml", text, capsys), tmp_path)
    assert words[words.index("--model") + 1] == "/my models/x"
    assert words[words.index("--dataset") + 1 :][:2] == ["/a b/c.parquet", "/it's.parquet"]


def test_a_word_that_is_not_yaml_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"python3 -m x actor_rollout_ref.model.path='*name' actor_rollout_ref.rollout.n={'9' * 5000}\n"
    script = converted(tmp_path / "a.sh", text, capsys)
    assert "--model '*name'" in script and "9: not a whole number\n" in script


def test_an_override_without_a_value_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("actor_rollout_ref: {x: 1}\n")
    assert main(["convert", str(tmp_path / "a.yaml"), "nothing"]) == 1
    assert "nothing is not KEY=VALUE" in capsys.readouterr().err
