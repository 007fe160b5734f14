"""The entry point that torch calls: classification of processes, values of the variable, and cost."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from swift_megatron_grpo import SWITCH
from swift_megatron_grpo.platforms import cpu
from swift_megatron_grpo.plugin import activation, autoload
from swift_megatron_grpo.plugin.activation import classify_started
from swift_megatron_grpo.plugin.command_line import (
    HELP,
    LAUNCHER,
    RANK,
    ROLLOUT,
    SWIFT_MEGATRON,
    TORCHRUN,
    classify,
    selects_grpo,
)

PYTHON = "/venv/bin/python"
RLHF = "/venv/lib/python3.11/site-packages/swift/cli/_megatron/rlhf.py"
ROLLOUT_SCRIPT = "/venv/lib/python3.11/site-packages/swift/cli/rollout.py"
SFT = "/venv/lib/python3.11/site-packages/swift/cli/_megatron/sft.py"
GRPO = ["--rlhf_type", "grpo", "--model", "m"]
SPAWN = [
    PYTHON,
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)",
    "--multiprocessing-fork",
]

# name: (sys.argv, sys.orig_argv, class of the process)
PROCESSES = {
    "rank under torchrun": ([RLHF, *GRPO], [PYTHON, "-u", RLHF, *GRPO], RANK),
    "only process": ([RLHF, *GRPO], [PYTHON, RLHF, *GRPO], RANK),
    "equals sign": ([RLHF, "--rlhf_type=grpo"], [PYTHON, RLHF, "--rlhf_type=grpo"], RANK),
    "-m, package still importing": (
        ["-m", *GRPO],
        [PYTHON, "-m", "swift.cli._megatron.rlhf", *GRPO],
        RANK,
    ),
    "-m, module running": ([RLHF, *GRPO], [PYTHON, "-um", "swift.cli._megatron.rlhf", *GRPO], RANK),
    "-m attached": (["-m", *GRPO], [PYTHON, "-X", "dev", "-mswift.cli._megatron.rlhf", *GRPO], RANK),
    "under a debugger": ([RLHF, *GRPO], [PYTHON, "-m", "debugpy", "--listen", "5678", RLHF, *GRPO], RANK),
    "ray turned off": ([RLHF, *GRPO, "--use_ray", "False"], [PYTHON, RLHF, *GRPO, "--use_ray", "False"], RANK),
    "dpo": ([RLHF, "--rlhf_type", "dpo"], [PYTHON, RLHF, "--rlhf_type", "dpo"], None),
    "no rlhf type": ([RLHF], [PYTHON, RLHF], None),
    "help": ([RLHF, "--help"], [PYTHON, RLHF, "--help"], HELP),
    "help, short": ([RLHF, "-h"], [PYTHON, "-u", RLHF, "-h"], HELP),
    "help, among flags": ([RLHF, "--model", "m", "--help"], [PYTHON, RLHF, "--model", "m", "--help"], HELP),
    "help, -m": (["-m", "--help"], [PYTHON, "-m", "swift.cli._megatron.rlhf", "--help"], HELP),
    "help of grpo": ([RLHF, *GRPO, "--help"], [PYTHON, RLHF, *GRPO, "--help"], RANK),
    "help of dpo": ([RLHF, "--rlhf_type", "dpo", "--help"], [PYTHON, RLHF, "--rlhf_type", "dpo", "--help"], None),
    "help of megatron sft": ([SFT, "--help"], [PYTHON, SFT, "--help"], None),
    "megatron sft": ([SFT, *GRPO], [PYTHON, "-u", SFT, *GRPO], None),
    "swift rlhf": (["/s/swift/cli/rlhf.py", *GRPO], [PYTHON, "/s/swift/cli/rlhf.py", *GRPO], None),
    "spawned data loader worker": ([RLHF, *GRPO], SPAWN, None),
    "fork server": (["-c"], [PYTHON, "-c", "from multiprocessing.forkserver import main; main(3)"], None),
    "torchrun module": (["-m", RLHF, *GRPO], [PYTHON, "-m", "torch.distributed.run", RLHF, *GRPO], TORCHRUN),
    "torchrun of dpo": (["-m", RLHF, "--rlhf_type", "dpo"], [PYTHON, "-m", "torch.distributed.run", RLHF], None),
    "torchrun of another script": (["-m", "x.py", *GRPO], [PYTHON, "-m", "torch.distributed.run", "x.py"], None),
    "torchrun script": (["/venv/bin/torchrun", RLHF, *GRPO], [PYTHON, "/venv/bin/torchrun", RLHF, *GRPO], TORCHRUN),
    "megatron script": (["/venv/bin/megatron", "rlhf", *GRPO], [PYTHON, "/venv/bin/megatron", "rlhf", *GRPO], LAUNCHER),
    "megatron script, sft": (["/venv/bin/megatron", "sft"], [PYTHON, "/venv/bin/megatron", "sft"], None),
    "swift megatron": (
        ["/venv/bin/swift", "megatron", "rlhf"],
        [PYTHON, "/venv/bin/swift", "megatron", "rlhf"],
        SWIFT_MEGATRON,
    ),
    "megatron module": (
        ["-m", "rlhf", *GRPO],
        [PYTHON, "-P", "-m", "swift.cli._megatron.main", "rlhf", *GRPO],
        LAUNCHER,
    ),
    "swift sft": (["/venv/bin/swift", "sft", "megatron"], [PYTHON, "/venv/bin/swift", "sft", "megatron"], None),
    "swift rollout": (["/venv/bin/swift", "rollout"], [PYTHON, "/venv/bin/swift", "rollout"], LAUNCHER),
    "rollout server": ([ROLLOUT_SCRIPT, "--model", "m"], [PYTHON, ROLLOUT_SCRIPT, "--model", "m"], ROLLOUT),
    "rollout server, -m": (["-m", "--model", "m"], [PYTHON, "-m", "swift.cli.rollout", "--model", "m"], ROLLOUT),
    "this package's server": (
        ["-m", "--x"],
        [PYTHON, "-P", "-m", "swift_megatron_grpo.generation.server", "--x"],
        None,
    ),
    "its engine": ([ROLLOUT_SCRIPT, "--model", "m"], SPAWN, None),
    "another script": (["train.py", *GRPO], [PYTHON, "train.py", *GRPO], None),
    "another folder": (["megatron/rlhf.py", *GRPO], [PYTHON, "megatron/rlhf.py", *GRPO], None),
    "interactive": ([""], [PYTHON], None),
    "-c": (["-c", *GRPO], [PYTHON, "-Wignore", "-c", "import torch", *GRPO], None),
    "embedded": ([], [], None),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_is_classified_by_its_command_line(name: str) -> None:
    argv, orig_argv, expected = PROCESSES[name]
    assert classify(argv, orig_argv) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--rlhf_type", "grpo"], True),
        (["--rlhf_type=grpo"], True),
        (["--rlhf-type", "grpo"], True),
        (["--rlhf_t", "grpo"], True),  # argparse accepts abbreviations
        (["--rlhf_type", "dpo", "--rlhf_type", "grpo"], True),  # and the last occurrence counts
        (["--rlhf_type", "grpo", "--rlhf_type=dpo"], False),
        (["--rlhf_type", "GRPO"], False),  # which ms-swift refuses
        (["--rlhf_type"], False),
        (["--rlhf_types", "grpo"], False),
        (["--loss_type", "grpo"], False),
        (["--", "grpo"], False),
        (["grpo"], False),
        ([], False),
    ],
)
def test_the_rlhf_type_is_read_as_ms_swifts_parser_reads_it(args: list[str], expected: bool) -> None:
    assert selects_grpo(args) is expected


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, timeout=120
    )


# A process whose command line is that of a rank; it prints the modules that were hooked.
RANK_PROCESS = f"""
import sys
sys.argv = [{RLHF!r}, *{GRPO!r}]
sys.orig_argv = [sys.executable, *sys.argv]
from swift_megatron_grpo.plugin.autoload import arm
arm()
hooks = sys.modules.get("swift_megatron_grpo.runtime.import_hooks")
print(sorted({{*hooks._before, *hooks._after}}) if hooks else "nothing")
"""
PLATFORM_HOOKS = ["mcore_bridge", "megatron.core"]
HELP_PROCESS = RANK_PROCESS.replace(repr(GRPO), repr(["--help"]))
TRAINER_HOOKS = ["swift.megatron.pipelines.train.rlhf", "swift.megatron.trainers"]
RUNTIME_HOOKS = ["datasets.download.download_manager", "flashinfer.comm.cuda_ipc", "vllm.utils.system_utils"]
ALL_HOOKS = sorted(PLATFORM_HOOKS + TRAINER_HOOKS + RUNTIME_HOOKS)


@pytest.mark.parametrize(
    ("value", "hooked"),
    [("on", ALL_HOOKS), ("platform", PLATFORM_HOOKS), ("off", "nothing")],
)
def test_each_value_of_the_variable_hooks_its_modules(value: str, hooked: list[str] | str) -> None:
    result = run(RANK_PROCESS, **{SWITCH: value})
    assert result.stdout.strip() == str(hooked), result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("value", "hooked"), [("on", PLATFORM_HOOKS), ("platform", PLATFORM_HOOKS), ("off", "nothing")]
)
def test_a_help_request_hooks_the_platform_only(value: str, hooked: list[str] | str) -> None:
    result = run(HELP_PROCESS, **{SWITCH: value})
    assert (result.stdout.strip(), result.stderr) == (str(hooked), "")


def test_on_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert run(RANK_PROCESS).stdout.strip() == str(ALL_HOOKS)


def test_an_invalid_value_stops_a_rank_with_the_choices() -> None:
    result = run(RANK_PROCESS, **{SWITCH: "yes"})
    assert result.returncode == 1
    assert "SWIFT_MEGATRON_GRPO='yes' is none of its values (on: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["--use_ray", "true", *GRPO], ""),
        (["--use_ray", *GRPO], ""),
        (["--use_ray=true", "--config", "FILE"], "model: m\nrlhf_type: 'grpo'\n"),
        (["--config", "FILE"], "rlhf_type: grpo\ntrain: {gpus: 4}\n"),
        (["FILE", "--lr", "1"], '"rlhf_type": "grpo"\n"rollout":\n  gpus: 4\n'),
        (["FILE"], "rlhf_type: grpo\nuse_ray: True\n"),
        (["--config", "FILE", *GRPO], "device_groups: {nproc_per_node: 4}\n"),
    ],
)
def test_grpo_with_roles_or_on_ray_becomes_the_launch(
    words: list[str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(file)
    words = [str(config) if word == "FILE" else word for word in words]
    started: list[list[str]] = []

    def execv(program: str, command: list[str]) -> NoReturn:
        started.append(command)
        raise SystemExit

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        activation.activate(["megatron", "rlhf", *words], [PYTHON, "megatron", "rlhf", *words], {})
    assert [command[-len(words) - 2 :] for command in started] == [["-m", "swift_megatron_grpo.launch", *words]]


def test_a_rank_starts_no_ranks_on_ray() -> None:
    """ms-swift's script has removed the flag from sys.argv."""
    with pytest.raises(SystemExit, match="use `megatron rlhf --use_ray true`, without torchrun"):
        activation.activate([RLHF, *GRPO], [PYTHON, RLHF, "--use_ray", *GRPO], {})


@pytest.mark.parametrize(
    "words", [["--use_ray", "false", *GRPO], ["--use_ray", "true", "--rlhf_type", "gkd"], [*GRPO, "--config", "none"]]
)
def test_runs_without_ray_and_other_types_of_rlhf_start(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", subprocess.run)  # which the launcher replaces
    activation.activate(["megatron", "rlhf", *words], [PYTHON, "megatron", "rlhf", *words], {})
    assert subprocess.run.__name__ == "run_or_become"


def test_an_invalid_value_is_ignored_in_other_processes() -> None:
    result = run("from swift_megatron_grpo.plugin.autoload import arm; arm(); print('fine')", **{SWITCH: "yes"})
    assert (result.stdout.strip(), result.stderr, result.returncode) == ("fine", "", 0)


def test_a_failure_prints_one_line_and_does_not_raise() -> None:
    result = run("import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n" + RANK_PROCESS)
    assert result.returncode == 0
    assert result.stderr == (
        "swift-megatron-grpo: not active in this process: RuntimeError: "
        "megatron.core is already imported, so no callback can run before it\n"
    )


def test_importing_torch_calls_arm() -> None:
    """The installed entry point, end to end: a process with a rank's command line has hooks after importing torch."""
    code = RANK_PROCESS.replace("from swift_megatron_grpo.plugin.autoload import arm\narm()", "import torch")
    assert run(code, **{SWITCH: "on"}).stdout.strip() == str(ALL_HOOKS)
    assert run(code, **{SWITCH: "on", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).stdout.strip() == "nothing"


@pytest.mark.parametrize(("folder", "module"), [("swift/cli/_megatron/", "activation"), ("", "subprocess")])
def test_the_module_of_the_megatron_script_becomes_torchrun(folder: str, module: str) -> None:
    """Python imports torch when it already runs the module, whose file is named like many others."""
    code = (
        "import subprocess, sys\n"
        f"sys.argv = ['/s/{folder}main.py', 'rlhf', '--rlhf_type', 'grpo']\n"
        "sys.orig_argv = ['python', '-P', '-m', 'swift.cli._megatron.main', *sys.argv[1:]]\n"
        "import torch\n"
        "print(subprocess.run.__module__.rpartition('.')[2])"
    )
    assert run(code, **{SWITCH: "on"}).stdout.strip() == module


def test_arming_imports_only_its_own_folders() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from swift_megatron_grpo.plugin.autoload import arm; arm()\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    modules = "swift_megatron_grpo swift_megatron_grpo.plugin swift_megatron_grpo.plugin.autoload"
    assert run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.strip() == modules


@pytest.mark.alone
def test_arming_costs_as_little_as_an_import_of_three_empty_files(tmp_path: Path) -> None:
    """Measured as torch calls it: after its own import, with its modules loaded, and from bytecode.

    Three empty files take 0.3 to 2 ms, as file system and processor are, so that a bound in milliseconds would
    measure the machine.
    """
    (tmp_path / "empty" / "plugin").mkdir(parents=True)
    for file in ("empty/__init__.py", "empty/plugin/__init__.py", "empty/plugin/autoload.py"):
        (tmp_path / file).touch()
    code = f"""
import json, sys, time
import torch
assert "swift_megatron_grpo" not in sys.modules
sys.path.append({str(tmp_path)!r})
times = [time.perf_counter()]
import empty.plugin.autoload
times.append(time.perf_counter())
from swift_megatron_grpo.plugin.autoload import arm
times.append(time.perf_counter())
arm()
times.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONDONTWRITEBYTECODE": ""}
    assert run(code, **environ).returncode == 0  # writes the bytecode
    least = [math.inf] * 3
    for _ in range(8):
        result = run(code, **environ)
        assert result.returncode == 0, result.stderr
        least = [min(pair) for pair in zip(least, json.loads(result.stdout), strict=True)]  # others only add to it
        empty, imported, armed = least
        if imported < 3 * empty and armed < empty:
            return
    raise AssertionError(dict(zip(("empty", "imported", "armed"), least, strict=True)))


def test_replacing_the_process_keeps_the_interpreters_options(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, args: executed.append((path, args)))
    activation._replace_process(
        "a.module",
        ["--x", "1"],
        [PYTHON, "-X", "dev", "-u", "/venv/bin/megatron", "rlhf", "--x", "1"],
    )
    arguments = [sys.executable, "-X", "dev", "-u", "-P", "-m", "a.module", "--x", "1"]
    assert executed == [(sys.executable, arguments)]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([sys.executable, RLHF, *GRPO], True),
        ([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", RLHF, *GRPO], True),
        ([sys.executable, ROLLOUT_SCRIPT, "--model", "m"], True),
        ([sys.executable, "-m", "torch.distributed.run", RLHF, "--rlhf_type", "dpo"], False),
        ([sys.executable, SFT], False),
        (["nvidia-smi"], False),
        ("nvidia-smi", False),
    ],
)
def test_the_launcher_becomes_only_the_commands_of_this_package(command: list[str] | str, expected: bool) -> None:
    assert (classify_started(command) is not None) is expected


def test_processes_of_a_server_read_the_variable_that_the_platform_sets() -> None:
    assert autoload._ENGINE_ON_CPU == cpu.ENGINE_ON_CPU
