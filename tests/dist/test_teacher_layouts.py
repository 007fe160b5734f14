"""Two steps with a teacher of another shape are equal in every layout, and with the teacher in a layout of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from tests.dist.conftest import Ranks
from tests.support.choice import rest_nightly
from tests.support.runs import make_model

pytestmark = pytest.mark.dist
LAYOUTS = ["mbs8", "tp2+sp", "pp2", "cp2", "dp2", "pp2+vpp2", "dp2, teacher tp2", "tp2+sp, teacher dp2"]
CASES = [(tuner, layout) for tuner in ("full", "lora") for layout in LAYOUTS]
CHOSEN = [("full", "pp2+vpp2"), ("full", "cp2"), ("full", "dp2, teacher tp2"), ("lora", "tp2+sp, teacher dp2")]
OF_TEACHER = {"teacher tp2": ["--ref_tensor_model_parallel_size", "2"],
              "teacher dp2": ["--ref_tensor_model_parallel_size", "1"]}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    return make_model(folder / "teacher", extra=["--seed", "5", "--layers", "8", "--hidden", "96"])


def steps(ranks: Ranks, teacher: Path | None, tuner: str, layout: str) -> list[dict[str, float]]:
    """Return the metrics of two steps. No `teacher`: the policy itself is the teacher, with second prompts."""
    trained, _, of_teacher = layout.partition(", ")
    variant = Variant.parse(trained)
    flags = [*ranks.layout_flags("dense", tuner), *variant.flags(), *OF_TEACHER.get(of_teacher, []),
             "--temperature", "0.7"]  # fmt: skip
    if teacher is not None:
        flags += ["--teacher_model", str(teacher), "--teacher_model_type", "qwen3"]
    name = f"teacher-{teacher is None}-{tuner}-{layout}"
    program = "steps_with_second_prompts" if teacher is None else "steps"
    ranks.call(name, f"teacher_runs:{program}", variant.ranks, flags)
    found: list[dict[str, float]] = ranks.report(name, 0)["steps"]
    return found


@pytest.mark.parametrize("layout", rest_nightly(["tp2+sp", "pp2", "cp2", "dp2"], ["tp2+sp", "dp2"]))
def test_second_prompts_do_not_make_steps_depend_on_the_layout(ranks: Ranks, layout: str) -> None:
    check_equal(steps(ranks, None, "full", layout), steps(ranks, None, "full", "one"))


@pytest.mark.parametrize(("tuner", "layout"), rest_nightly(CASES, CHOSEN))
def test_a_teachers_steps_do_not_depend_on_the_layout(ranks: Ranks, teacher: Path, tuner: str, layout: str) -> None:
    check_equal(steps(ranks, teacher, tuner, layout), steps(ranks, teacher, tuner, "one"))


def check_equal(other: list[dict[str, float]], one: list[dict[str, float]]) -> None:
    assert len(one) == len(other) == 2
    for step, expected in zip(other, one, strict=True):
        assert expected["teacher_kl"] > 0.01
        for name in ("loss", "teacher_kl", "grad_norm"):
            assert step[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
