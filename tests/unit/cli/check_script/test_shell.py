"""Launches are read from shell scripts as bash would start them, and nothing of the script runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.check_script.shell import launches
from tests.paths import REPOSITORY

SCRIPT = """#!/bin/bash
# a comment with megatron rlhf in it
source /opt/set_env.sh || exit 1
export CUDA_DEVICE_MAX_CONNECTIONS=1 NPROC_PER_NODE=4
MODEL=org/name   # not exported
SYSTEM=\"\"\"Put the answer in \\\\boxed{}.\"\"\"
CUDA_VISIBLE_DEVICES=0 swift rollout --model $MODEL --port 8001 > rollout.log 2>&1 &
until curl -s http://127.0.0.1:8001/health/ > /dev/null 2>&1; do
    sleep 10
done
args=(
    --lr 1e-6      # a comment within the array
    --dataset "a b.jsonl" 'c#10'
)
args+=(--beta 0)
MASTER_PORT=29600 \\
NPROC_PER_NODE=${RANKS:-8} \\
exec megatron rlhf --rlhf_type grpo \\
    --model "${MODEL}" --system "$SYSTEM" --template '{"a": "$b"}' \\
    --output_dir "out/$(date +%s)/${NAME:-run}" "${args[@]}" "$@" | tee train.log
"""


def test_launches_are_read_with_their_environment() -> None:
    rollout, rlhf = launches(SCRIPT)
    assert rollout.kind == "rollout"
    assert rollout.arguments == ("--model", "org/name", "--port", "8001")
    assert rollout.environment == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NPROC_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"
    }  # fmt: skip
    assert rlhf.kind == "rlhf"
    assert rlhf.environment == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NPROC_PER_NODE": "8", "MASTER_PORT": "29600"
    }  # fmt: skip
    assert rlhf.arguments == (
        "--rlhf_type", "grpo", "--model", "org/name", "--system", "Put the answer in \\boxed{}.",
        "--template", '{"a": "$b"}', "--output_dir", "out//run",
        "--lr", "1e-6", "--dataset", "a b.jsonl", "c#10", "--beta", "0",
    )  # fmt: skip


def test_variables_of_the_callers_environment_count() -> None:
    assert launches("megatron rlhf --lr ${LR:-1}", {"LR": "2"})[0].arguments == ("--lr", "2")
    assert launches("swift megatron rlhf --lr ${LR:-1}")[0].arguments == ("--lr", "1")
    assert launches("megatron sft --lr 1; swift sft") == []


def test_braces_may_be_nested_and_hold_a_message_or_arithmetic() -> None:
    script = 'export N=${N:-$((${#gpus} + 1))} M=${M:?set it}; megatron rlhf --a "${A:-{b}}" --c ${C:-d} "${@:2}"'
    computed, given = launches(script)[0], launches(script, {"N": "6", "M": "m"})[0]
    assert computed.environment["N"] == computed.environment["M"] == ""
    assert (given.environment["N"], given.environment["M"]) == ("6", "m")
    assert given.arguments == ("--a", "{b}", "--c", "d")


PROBE = """#!/bin/bash
printf '%s\\n' "$@" > "$OUT"
"""


@pytest.mark.parametrize("template", sorted((REPOSITORY / "templates").glob("*.sh")), ids=lambda path: path.name)
def test_the_templates_are_read_as_bash_runs_them(template: Path, tmp_path: Path) -> None:
    """The command is replaced by one that writes its arguments to a file."""
    for name in ("megatron", "swift"):
        (tmp_path / name).write_text(PROBE)
        (tmp_path / name).chmod(0o755)
    given = {"MODEL": "m", "DATASET": "d", "OUTPUT": "o", "REWARD": "r", "SERVERS": "http://a:1", "NPROC_PER_NODE": "2"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "arguments"), **given}
    read = [launch for launch in launches(template.read_text(), given) if launch.kind == "rlhf"]
    if not read or "swift rollout" in template.read_text():
        pytest.skip("starts another script, or a server first")
    assert len(read) == 1
    subprocess.run(["bash", str(template)], env=environment, check=True, timeout=60, capture_output=True)
    _, *typed = (tmp_path / "arguments").read_text().splitlines()
    assert [value for value in read[0].arguments if "plugins/" not in value] == [
        value for value in typed if "plugins/" not in value
    ]
