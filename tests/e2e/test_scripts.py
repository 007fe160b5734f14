"""Published scripts run: all of their flags are accepted at their own sizes, and two reduced steps are trained."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.check_script.rehearsal import Rehearsal
from swift_megatron_grpo.launch.roles import words_of
from tests.forking.client import fork_server, run_code
from tests.scripts import NOT_RUN, Published, published_scripts
from tests.support.choice import rest_nightly
from tests.support.runs import ON_CPU
from tests.support.servers import RolloutServer

SCRIPTS = published_scripts()
NAMES = sorted(set(SCRIPTS) - set(NOT_RUN))
# Dense and experts, full and LoRA, text and images, a server, an environment, a YAML file; others at night.
CHOSEN = ["frozen_lake_server", "moe_colocate_lora", "ray_grpo_colocate"]
SECONDS_OF_CHECK = 30
REHEARSE = """
import dataclasses, json, os, shutil, time
from pathlib import Path
from swift_megatron_grpo.cli.check.check import check
from swift_megatron_grpo.cli.check_script.rehearsal import make_rehearsal
from swift_megatron_grpo.launch.roles import words_of
folder = Path({folder!r})
rehearsal = make_rehearsal({text!r}, folder, ranks=2, steps=2, environment={{}})
print("REHEARSAL" + json.dumps(dataclasses.asdict(rehearsal)))
for file in (folder / "model").iterdir():  # the large model has no tokenizer of its own
    if file.suffix != ".safetensors" and (folder / "large").is_dir() and not (folder / "large" / file.name).exists():
        shutil.copy(file, folder / "large" / file.name)
ranks = rehearsal.world_size
for name, value in dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, RANK=0, LOCAL_RANK=0).items():
    os.environ[name] = str(value)
began = time.monotonic()
report, _ = check(words_of(rehearsal.published | dict(check_gpu=["H200"])))
print(report)
print("CHECKED", time.monotonic() - began)
"""


def rehearsal_of(script: Published, folder: Path) -> Rehearsal:
    return rehearsal_of_text(script.text, folder)


def rehearsal_of_text(text: str, folder: Path) -> Rehearsal:
    """Make the rehearsal of a script and check it at its own size, as check-script and --check do, in a fork."""
    printed = run_code("trainer", REHEARSE.format(text=text, folder=str(folder)))
    [seconds] = re.findall(r"^CHECKED (.*)", printed, re.MULTILINE)
    assert float(seconds) < SECONDS_OF_CHECK and "memory of each GPU" in printed, printed[-4000:]
    [line] = [line for line in printed.splitlines() if line.startswith("REHEARSAL")]
    return Rehearsal(**json.loads(line.removeprefix("REHEARSAL")))


def run(rehearsal: Rehearsal, folder: Path) -> tuple[int, str]:
    """Run a rehearsal as check-script would, on forked ranks."""
    server, flags = None, dict(rehearsal.reduced)
    if rehearsal.server is not None:
        server = (
            RolloutServer(folder / "model", folder / "rollout.log", words_of(rehearsal.server), key=None).start().wait()
        )
        flags["vllm_server_base_url"] = [server.url]
    with (folder / "train.log").open("w") as log:
        ranks = fork_server("trainer").start("megatron rlhf", words_of(flags), rehearsal.ranks, folder, log, {})
        try:
            code = ranks.wait(timeout=600)
        finally:
            if server is not None:
                server.stop()
    return code, (folder / "train.log").read_text()


@pytest.mark.e2e
@pytest.mark.skipif(not ON_CPU, reason="the ranks are forked")
@pytest.mark.parametrize("name", rest_nightly(NAMES, CHOSEN))
def test_a_published_script_is_accepted_and_runs_two_steps(name: str, tmp_path: Path) -> None:
    rehearsal = rehearsal_of(SCRIPTS[name], tmp_path)
    assert rehearsal.world_size == SCRIPTS[name].ranks
    assert ('"images"' in (tmp_path / "rows.jsonl").read_text()) is SCRIPTS[name].has_images
    code, output = run(rehearsal, tmp_path)
    assert code == 0, output[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "output" / "logging.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2 and any((tmp_path / "output").glob("checkpoint-2"))


@pytest.mark.e2e
@pytest.mark.skipif(not ON_CPU, reason="forks a preloaded process")
def test_a_script_with_names_of_ms_swift_3_is_refused_with_all_new_names(tmp_path: Path) -> None:
    script = SCRIPTS["moe_colocate_lora"]
    old = replace(script, flags=script.flags.replace("--tuner_type", "--train_type") + " --save_interval 10 --lrr 1")
    with pytest.raises(RuntimeError) as refused:
        rehearsal_of(old, tmp_path)
    for line in (
        "--train_type is a flag of ms-swift 3; use --tuner_type",
        "--save_interval is a flag of ms-swift 3; use --save_steps",
        "--lrr is not a flag",
    ):
        assert line in str(refused.value)
