"""The cases of one node: layouts, GPUs and committed forecasts, and how near forecasts of measured runs were."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, eight
from benchmarks.harness.models import make_checkpoint, qwen3_omni_config, text_sizes
from benchmarks.harness.node import compare, page
from benchmarks.harness.node.cases import NODES, Case, cases, is_measured, toy
from benchmarks.harness.node.figures import Forecast
from benchmarks.harness.node.forecast import CARDS
from benchmarks.harness.planned import model_of
from benchmarks.harness.shapes import SHAPES
from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.tiny_omni import NAMED_TOKENS
from tests.forking.client import run_code
from tests.paths import REPOSITORY

AT_EIGHT = cases(8)
FAR_TIMES = 7  # of measured runs with experts or TP 4, most of them too low; no peak is far


def settings_of(case: Case, dry: bool = False) -> tuple[list[Any], int, Any]:
    arguments = [*case.arguments(dry, ["http://127.0.0.1:1", "http://127.0.0.1:2"]), "--json", "x.json"]
    args = bench.parse(arguments)
    return *bench.settings_of(args), args


@pytest.mark.parametrize("dry", [False, True], ids=["real", "dry"])
@pytest.mark.parametrize("gpus", NODES)
def test_every_case_uses_the_gpus_of_its_node_once(gpus: int, dry: bool) -> None:
    for case in cases(gpus):
        settings, ranks, args = settings_of(case, dry)
        trainers = set(range(ranks))
        servers = set() if case.servers is None else set(case.servers.gpus)
        assert trainers | servers == set(range(gpus)), case.name
        # NCCL admits no two processes of a GPU to a group, and rank 0 sends weights to every server.
        assert not trainers & servers or (
            case.servers is not None and case.servers.beside_trainers and 0 not in servers
        )
        assert args.completions % (ranks * args.generations) == 0, case.name
        assert args.shape == (toy(case.shape) if dry else case.shape)
        assert [setting.arm for setting in settings] == ["ours"] * len(case.ours) + ["stock"] * len(case.stock)
        for name in case.stock:  # which refuses a rank whose prompts are not whole micro batches
            sizes = Variant.parse(name).sizes
            prompts = args.completions // args.generations * sizes.get("tp", 1) // ranks
            assert prompts % sizes["mbs"] == 0, f"{case.name} {name}"


def test_all_weights_of_30b_have_the_settings_of_their_template() -> None:
    [case] = [case for case in cases(4) if case.name == "step-full-30b-template-ep4"]
    template = (REPOSITORY / "templates" / "moe_full.sh").read_text()
    of_template = dict(re.findall(r"^ +--(\w+) +(\S+)", template, re.MULTILINE))
    [setting, _], _, args = settings_of(case)
    given = [*shlex.split(args.flags), *setting.flags]
    flags = {name.removeprefix("--"): value for name, value in zip(given[::2], given[1::2], strict=True)}
    # The weights come with the first sync, and the template leaves to the run whether completions share a prompt.
    assert {name for name in flags if flags[name] != of_template.get(name)} == {"vllm_engine_kwargs", "share_prompts"}
    assert args.completions == int(of_template["global_batch_size"])
    assert args.generations == int(of_template["num_generations"])
    assert args.lengths.endswith(f":{of_template['max_completion_length']}")


def test_names_differ_between_cases_and_nodes() -> None:
    names = [case.name for gpus in NODES for case in cases(gpus)]
    assert len(names) == len(set(names))


def test_every_shape_has_a_small_one_of_the_same_type() -> None:
    for case in AT_EIGHT:
        assert SHAPES[toy(case.shape)].model_type == SHAPES[case.shape].model_type


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.audio is not None])
def test_vllm_embeds_as_many_positions_of_patches_as_the_trainer(name: str) -> None:
    """vLLM computes them from a side that transformers does not have."""
    shape = SHAPES[name]
    tokens = dict.fromkeys((*NAMED_TOKENS[shape.model_type], "im_end"), 0)
    config: Any = qwen3_omni_config(shape, text_sizes(None, shape), tokens)
    vision = config.thinker_config.vision_config
    assert (vision.image_size // vision.patch_size) ** 2 == vision.num_position_embeddings
    assert model_of(name).cached == 2 * shape.layers * shape.kv_heads * shape.head_dim


def test_nodes_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="no cases for 6 GPUs; use one of 8, 4, 2"):
        cases(6)


def test_an_unknown_case_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="unknown case other; use some of step-full-8b-8"):
        eight.chosen(8, ["other"])


def test_a_case_is_measured_when_all_of_its_settings_were_tried(tmp_path: Path) -> None:
    case = AT_EIGHT[0]
    assert not is_measured(case, tmp_path)

    def write(*processes: tuple[str, str, str]) -> None:
        rows = [{"arm": arm, "setting": setting, "status": status} for arm, setting, status in processes]
        (tmp_path / f"{case.name}.json").write_text(json.dumps({"processes": rows}))

    ours = [("ours", name, "ok") for name in case.ours]
    write(*ours)
    assert not is_measured(case, tmp_path)
    write(*ours, *(("stock", name, "out of memory") for name in case.stock))
    assert is_measured(case, tmp_path)
    write(("ours", case.ours[0], "failed: x"), *ours[1:], *(("stock", name, "ok") for name in case.stock))
    assert not is_measured(case, tmp_path)


# ---- forecasts


def committed() -> list[Forecast]:
    return compare.read_forecasts(REPOSITORY, "cases")


def test_every_case_has_a_forecast_for_each_card() -> None:
    wanted = [
        (case.name, setting, card) for gpus in NODES for case in cases(gpus) for setting in case.ours for card in CARDS
    ]
    assert [(one.name, one.setting, one.card) for one in committed()] == wanted


def test_every_case_of_eight_fits_into_the_cards_that_it_is_for() -> None:
    names = {case.name for case in AT_EIGHT}
    assert all(one.fits for one in committed() if one.name in names and one.card == CARDS[0])


FORECAST = """
import json
from dataclasses import asdict
from pathlib import Path
from benchmarks.harness.node.cases import cases
from benchmarks.harness.node.forecast import forecasts_of
case, = (case for case in cases(8) if case.name == {name!r})
print("FORECASTS", json.dumps([asdict(one) for one in forecasts_of(case, Path({work!r}))]))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eight")


def checked_at_eight() -> Iterator[Any]:
    """Yield every case; of those with one model and the same flags, all but the first are `nightly`."""
    seen = set()
    for case in AT_EIGHT:
        marks = [pytest.mark.nightly] if case.shape in seen else []
        seen.add(case.shape)
        yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(checked_at_eight()))
def test_the_flags_of_a_case_pass_the_check_at_eight_ranks(case: Case, work: Path) -> None:
    """The committed forecast is what the same flags and sizes give now, in a process that then counts as a rank."""
    folder = work / "models" / f"{case.shape}-random"
    if not folder.exists():
        make_checkpoint(folder, SHAPES[case.shape], with_weights=False)
    printed = run_code("trainer", FORECAST.format(name=case.name, work=str(work)))
    forecasts = json.loads(printed.rpartition("FORECASTS ")[2].splitlines()[0])
    assert forecasts == [asdict(one) for one in committed() if one.name == case.name]


def test_the_page_has_the_committed_forecasts() -> None:
    assert (REPOSITORY / page.PAGE).read_text() == page.text_of(REPOSITORY), "run scripts/fix"


def test_forecasts_of_measured_runs_are_near() -> None:
    """benchmarks/results/eight.md has each; what is far is counted here, so that no change makes more of it."""
    rows = compare.compared(compare.read_forecasts(REPOSITORY, "measured"), REPOSITORY / "benchmarks" / "h200")
    assert len(rows) > 20
    assert all(abs(row.peak_ratio - 1) <= compare.PEAK_BOUND for row in rows)
    assert sum(abs(row.time_ratio - 1) > compare.TIME_BOUND for row in rows) <= FAR_TIMES
