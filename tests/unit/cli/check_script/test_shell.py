"""Launches are read from shell scripts as bash would start them, and nothing of the script runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.check_script.shell import Shell, launches
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


@pytest.mark.parametrize(
    "command",
    [
        "$PYTHON -m torch.distributed.run --nproc_per_node 4 --nnodes=2 --master_port $PORT $DIR/cli/_megatron/rlhf.py",
        "python3.11 -m torch.distributed.launch --nnodes 2 --nproc-per-node=4 /src/swift/cli/_megatron/rlhf.py",
        "exec /opt/bin/torchrun --nproc_per_node=4 --nnodes=2 -m swift.cli._megatron.rlhf",
        "NNODES=2 NPROC_PER_NODE=4 python -m swift.cli._megatron.main rlhf",
        "NNODES=2 NPROC_PER_NODE=4 python /src/swift/cli/main.py megatron rlhf",
        "NNODES=2 NPROC_PER_NODE=4 swift megatron rlhf",
        "NNODES=2 NPROC_PER_NODE=4 /opt/venv/bin/megatron rlhf",
    ],
)
def test_every_way_to_start_the_command_is_a_launch(command: str) -> None:
    [launch] = launches(f"{command} --rlhf_type grpo")
    assert (launch.kind, launch.arguments) == ("rlhf", ("--rlhf_type", "grpo"))
    assert (launch.environment["NPROC_PER_NODE"], launch.environment["NNODES"]) == ("4", "2")


def test_a_size_that_the_script_computes_is_the_callers() -> None:
    script = "torchrun --nproc_per_node $(nvidia-smi -L | wc -l) swift/cli/_megatron/rlhf.py --lr 1"
    assert not launches(script)[0].environment["NPROC_PER_NODE"].isdigit()
    assert launches(script, {"NPROC_PER_NODE": "8"})[0].environment["NPROC_PER_NODE"] == "8"


def test_servers_are_found_and_files_that_are_not_started_are_not() -> None:
    [server] = launches(
        "python -m swift.cli.rollout --model a; python swift/cli/sft.py; cat swift/cli/_megatron/rlhf.py"
    )
    assert (server.kind, server.arguments) == ("rollout", ("--model", "a"))


@pytest.mark.parametrize("doubled", ["A=$A$A", 'A="${A}${A}"', 'A+="$A"', "A=(${A[@]} ${A[@]})", 'A+=("${A[@]}")'])
def test_variables_that_double_at_every_line_are_refused(doubled: str) -> None:
    first = "A=(xy)\n" if "(" in doubled else "A=xy\n"
    with pytest.raises(ValueError, match="the variables of the script expand to more than 10,000,000 characters"):
        launches(first + f"{doubled}\n" * 40)


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


@pytest.mark.parametrize("before", ["env NPROC_PER_NODE=8", "sudo -E NPROC_PER_NODE=8", "NPROC_PER_NODE=8 time -p"])
def test_a_launch_behind_env_is_found(before: str) -> None:
    [launch] = launches(f"{before} megatron rlhf --rlhf_type grpo", {})
    assert launch.arguments == ("--rlhf_type", "grpo")
    assert launch.environment["NPROC_PER_NODE"] == "8"


@pytest.mark.parametrize(
    "script",
    [
        "srun --nodes=2 --ntasks-per-node 1 env A=1 megatron rlhf --lr 1",
        "A=1 timeout --signal INT -k 30 3600 megatron rlhf --lr 1",
        "sudo -u trainer -E A=1 megatron rlhf --lr 1",
        "nohup timeout 5 srun -N2 env -u B A=1 numactl -N 0 /opt/bin/megatron rlhf --lr 1",
        "A=1 uv run --no-sync megatron rlhf --lr 1",
        "srun -N 2 bash -lc 'export A=1\nmegatron rlhf --lr 1'",
        'A=1 bash -eo pipefail -c "megatron rlhf --lr 1"',
        "if ! A=1 megatron rlhf --lr 1; then exit 1; fi",
        "srun -N 2 env A=1 python -m swift.cli._megatron.rlhf --lr 1",
    ],
)
def test_a_launch_by_another_command_is_found(script: str) -> None:
    [launch] = launches(script)
    assert (launch.kind, launch.arguments, launch.environment) == ("rlhf", ("--lr", "1"), {"A": "1"})


def test_another_command_loses_what_starts_it() -> None:
    """`convert` looks for the commands of other trainers."""
    script = "B=1 sudo -E env A=1 trl grpo --lr 1\nnohup ray job submit -- python3 train.py --lr 1"
    assert [words for words, _ in Shell({}).run(script)] == [
        ["trl", "grpo", "--lr", "1"],
        ["python3", "train.py", "--lr", "1"],
    ]


@pytest.mark.parametrize(
    "script",
    [
        "cat > note.txt <<EOF\nDon't run (\"megatron\nEOF\n",
        "cat <<-'EOF' > run.sh\n\tmegatron rlhf --lr 2\n\tEOF\n",
        'cat <<A <<"B" > both\n\'\nA\n"\nB\n',
        "((size = 1 << 2))\n",
        "cat <<< EOF\n",
    ],
)
def test_a_here_document_is_data_and_hides_no_launch(script: str) -> None:
    [launch] = launches(f"{script}A=1 megatron rlhf --lr 1")
    assert (launch.arguments, launch.environment) == (("--lr", "1"), {"A": "1"})


@pytest.mark.parametrize(
    "shell", ["srun -N 2 bash <<'EOF'", "sbatch --nodes 2 <<EOF", "sudo -u trainer bash -s <<-EOF"]
)
def test_a_here_document_of_a_shell_is_a_script(shell: str) -> None:
    escape = "" if "'" in shell else "\\"
    script = f"LR=3\n{shell}\n#SBATCH -N 2\nexport LR=1\nmegatron rlhf --lr {escape}$LR\nEOF\nmegatron rlhf --lr 2"
    assert [launch.arguments for launch in launches(script)] == [("--lr", "1"), ("--lr", "2")]


def test_a_shell_that_starts_itself_is_refused() -> None:
    with pytest.raises((ValueError, RecursionError)):
        launches('A=\'bash -c "$A; $A"\'\nbash -c "$A"')
