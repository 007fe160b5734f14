"""benchmarks/drafts.py: what a run has dumped, texts with a wanted acceptance, and tables of made-up results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafts import job_of, parse
from benchmarks.harness.drafts import page
from benchmarks.harness.drafts.engine import Texts
from benchmarks.harness.drafts.runs import (
    DEPTH,
    MODES,
    TASKS,
    accepted_in,
    digest_of,
    first_difference,
    flags_of,
    late_acceptance,
    read_run,
)
from benchmarks.harness.drafts.texts import Sizes, accepted_a_step, draw, probability_of
from swift_megatron_grpo.cli.simulate_drafts.dump import Dumped
from swift_megatron_grpo.cli.simulate_drafts.replay import Completion
from swift_megatron_grpo.output.recording.rows import sealed
from tests.paths import REPOSITORY

SIZES = Sizes(requests=16, group=8, prompt_tokens=16, lengths="lognormal:100:0.9:400", vocabulary=20000)


# ---- what a run has logged and dumped


def write_run(folder: Path, rewards: list[float], tokens: list[list[int]], drafts: bool = True) -> tuple[Path, Path]:
    """Write a run with a completion in each rollout; return its output and its dump."""
    output, dump = folder / "output", folder / "dump"
    for each in (output, dump):
        each.mkdir(parents=True)
    counts = {"drafts/verified": 8, "drafts/accepted": 3, "drafts/steps_saved": 0.25} if drafts else {}
    log = [
        {"iteration": f"{step}/{len(rewards)}", "train_speed(s/it)": 2, "reward": reward, "learning_rate": 1e-5,
         "completions/mean_length": 3, "grad_norm": 0.1, "time/generation": 0.5, **counts}
        for step, reward in enumerate(rewards, 1)
    ]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in [*log, {"memory": "the summary at the end"}])
    (output / "logging.jsonl").write_text(lines)
    for number, completion in enumerate(tokens):
        row = {"prompt_ids": [1, 2], "completion_ids": completion, "sampled": None, "conversation": None,
               "logprobs": [-0.5] * len(completion)}  # fmt: skip
        (dump / f"rollout-{number:06}.jsonl").write_text(sealed(row))
    return output, dump


def test_a_run_has_a_value_and_a_digest_for_each_step(tmp_path: Path) -> None:
    same, other = [5, 6, 7], [5, 6, 8]
    run = read_run(*write_run(tmp_path / "history", [0.0, 0.5], [same, same]))
    plain = read_run(*write_run(tmp_path / "off", [0.0, 0.25], [same, other], drafts=False))
    assert run["reward"] == [0.0, 0.5] and run["seconds"] == [2.0, 4.0] and run["generation"] == [0.5, 0.5]
    assert run["verified"] == [8, 8] and run["steps_saved"] == [0.25, 0.25] and plain["accepted"] == []
    assert run["mean_logprob"] == [-0.5, -0.5]
    assert run["digests"][0] == run["digests"][1] == plain["digests"][0] != plain["digests"][1]
    assert first_difference(plain, run) == 2 and first_difference(run, run) is None


def test_a_run_that_has_not_begun_has_no_steps(tmp_path: Path) -> None:
    run = read_run(tmp_path / "output", tmp_path / "dump")
    assert run["reward"] == run["digests"] == [] and run["replayed"] == {}


def test_a_digest_depends_on_prompts_completions_and_their_order() -> None:
    def digest(*completions: Completion) -> str:
        return digest_of([Dumped(list(completions), [])])

    one, two = Completion((1,), [2, 3]), Completion((1,), [3, 2])
    digests = {digest(one, two), digest(two, one), digest(one), digest(Completion((1, 2), [3]))}
    assert len(digests) == 4 and digest(one, two) == digest(one, Completion((1,), (3, 2)))


def test_the_last_rollouts_draft_from_those_before() -> None:
    text = Completion((1, 2), list(range(10, 40)))
    dumped = {number: [Dumped([text], [])] for number in range(21)}
    found = accepted_in(dumped)
    assert found["first"] < found["last"]
    assert found["last"] == pytest.approx(23 / 7, abs=1e-4)  # 30 tokens: one with the prompt, 5 of each of 6 steps


def test_modes_differ_in_drafts_alone(tmp_path: Path) -> None:
    for on_gpu in (False, True):
        off, history, again = (flags_of(TASKS["sums"], mode, "float32", on_gpu, 8, 16, tmp_path) for mode in MODES)
        assert off == again and [pair for pair in zip(off, history, strict=True) if pair[0] != pair[1]] == [
            ("off", "history")
        ]


# ---- texts


@pytest.mark.parametrize("wanted", [0.3, 0.8, 1.6])
def test_texts_accept_as_many_drafts_as_wanted(wanted: float) -> None:
    work = draw(SIZES, probability_of(wanted, DEPTH, SIZES), seed=3)
    assert accepted_a_step(work, DEPTH) == pytest.approx(wanted, rel=0.12)
    assert len(work.completions) == 16 and len(work.earlier) == len({one.prompt for one in work.completions}) == 2


def test_rounds_differ_and_the_first_one_is_short() -> None:
    texts = Texts.from_json(Texts(SIZES, 0.5).as_json())
    first, second, third = (texts.of_round(number) for number in range(3))
    assert max(len(one.tokens) for one in first.completions) <= 32 < max(len(one.tokens) for one in second.completions)
    assert second == texts.of_round(1) and second.completions[0].prompt != third.completions[0].prompt


def test_an_engine_has_room_for_all_requests() -> None:
    args = parse(["generate", "--requests", "64", "--work", "w", "--out", "o"])
    job = job_of(args)
    assert (job.prompts * job.group_size, job.max_num_seqs) == (64, 64)
    assert job.max_model_len > args.prompt_tokens + 4096


# ---- the page


def result(dtype: str, mode: str, digests: list[str], late: float = 1.5) -> dict[str, Any]:
    drafts = {"steps_saved": [0.2] * 50, "replayed": {"first": 0.5, "last": late}}
    return {"task": "sums", "dtype": dtype, "mode": mode, "exit_code": 0, "digests": digests,
            "grad_norm": [1.5] * 50, "reward": [0.5] * 50, "length": [20.0] * 50, "mean_logprob": [-0.4] * 50,
            "generation": [0.3 if mode == "off" else 0.2] * 50,
            "seconds": [float(step) for step in range(50)], **drafts}  # fmt: skip


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / page.FOLDER
    folder.mkdir(parents=True)
    return folder


def test_the_page_has_the_tables_of_the_measured_runs() -> None:
    for (begin, end), text in page.tables(REPOSITORY):
        assert f"{begin}{text}{end}" in (REPOSITORY / page.PAGE).read_text(), "run `python -m benchmarks.drafts report`"


def test_a_pair_shows_where_tokens_differ_and_what_drafts_gain(parts: Path, tmp_path: Path) -> None:
    for mode, last in (("off", "b"), ("history", "c")):
        run = result("bfloat16", mode, ["a"] * 49 + [last])
        (parts / f"drafts-sums-bfloat16-{mode}.json").write_text(json.dumps(run))
    (_, trained), _, (_, timed) = page.tables(tmp_path)
    lines = trained.splitlines()
    assert lines[2] == (
        "| sums, the number alone | bf16 | in step 50 of 50 | in none of 50 steps | not run yet | 0.000 | not run yet "
        "| 0.50, 1.50 | 20% | 0.300 s, 0.200 s (**1.50**) | 1.000 s, 1.000 s (**1.00**) |"
    )
    assert lines[3].count("not run yet") == 9 and timed.count("not run yet") == 8
    assert lines[-1] == "| 50 | 0.500 | 0.500 | 20 | -0.40 | 20% | 0.300 s | 0.200 s |"
    again = result("bfloat16", "again", ["a"] * 49 + ["b"])
    (parts / "drafts-sums-bfloat16-again.json").write_text(json.dumps(again))
    assert "| in none of 50 steps | in none of 50 steps |" in page.tables(tmp_path)[0][1]


def test_a_run_that_was_ended_is_compared_over_the_steps_that_it_has(parts: Path, tmp_path: Path) -> None:
    for mode, steps in (("off", 50), ("history", 30)):
        whole = result("bfloat16", mode, ["a"] * 50)
        run = {name: value[:steps] if isinstance(value, list) else value for name, value in whole.items()}
        if mode == "history":
            run |= {"exit_code": None, "reward": [0.5] * 25 + [0.3] * 5, "generation": [0.2] * 29 + [9.0]}
        (parts / f"drafts-sums-bfloat16-{mode}.json").write_text(json.dumps(run))
    lines = page.tables(tmp_path)[0][1].splitlines()
    assert "| in none of 30 steps | in none of 30 steps | not run yet | 0.200 |" in lines[2]
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| 25", "| 30"]
    (parts / "drafts-sums-bfloat16-history.json").write_text(json.dumps(run | {"exit_code": 1}))
    assert "in none of" not in page.tables(tmp_path)[0][1]


def test_late_acceptance_is_the_mean_over_tasks(parts: Path) -> None:
    assert late_acceptance(parts) is None
    for task, late in (("sums", 1.0), ("letters", 2.0)):
        (parts / f"drafts-{task}-bfloat16-history.json").write_text(json.dumps(result("bfloat16", "history", [], late)))
    assert late_acceptance(parts) == 1.5


def test_generation_is_compared_in_whole_and_by_running_requests(parts: Path, tmp_path: Path) -> None:
    def round_(seconds: float, wide: float) -> dict[str, Any]:
        bands = {"64": {"steps": 10, "seconds": wide, "tokens": 640}, "8": {"steps": 5, "seconds": 1.0, "tokens": 20}}
        return {"seconds": seconds, "tokens": 660, "bands": bands, "steps_of_requests": 440, "accepted": 220}

    rounds = {"off": [round_(6.0, 5.0), round_(7.0, 5.0)], "history": [round_(4.0, 4.0), round_(5.0, 4.0)]}
    (parts / "drafts-8b-64.json").write_text(json.dumps({"rounds": rounds}))
    lines = page.tables(tmp_path)[2][1].splitlines()
    assert lines[2] == "| 8B | 64 | 0.50 | 6.50 s | 4.50 s | **1.44** | 1.25 | 1.00 |"


def test_the_chain_measures_every_run_and_timing() -> None:
    chain = (REPOSITORY / "benchmarks" / "drafts_chain.sh").read_text()
    assert set(re.findall(r"(\w+):(bfloat16|float32):(?:again:)?\d+", chain)) == set(page.PAIRS)
    assert set(re.findall(r"(\w+):(bfloat16|float32):again:\d+", chain)) == set(page.PAIRS)
    assert [(shape, int(count)) for shape, count in re.findall(r"(8b):(\d+):\d+", chain)] == page.GENERATED
