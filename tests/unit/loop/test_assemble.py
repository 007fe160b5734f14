"""Tests of assembly without a model: settings, prompts, the reference policy, a resumed rollout, the canary."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.loop import assemble
from swift_megatron_grpo.loop.assemble import (
    FrozenCopy,
    LoadedModels,
    engine_settings,
    frozen_engine_settings,
    reference_policy,
)
from swift_megatron_grpo.loop.checks import canary
from swift_megatron_grpo.loop.checks.canary import build_canary
from swift_megatron_grpo.output.recording.rows import no_images
from swift_megatron_grpo.output.recording.unfinished import UnfinishedRollout, save_unfinished, shared_settings
from swift_megatron_grpo.settings.batches import MicroBatches
from swift_megatron_grpo.settings.config import (
    CANARY_TOKENS,
)
from swift_megatron_grpo.types import Graded, Rollout
from tests.fakes.ranks import OneRank
from tests.fakes.runs import ROWS, SAMPLING, fake_run

MICRO_BATCHES = MicroBatches(
    micro_batch_size=4, share_prompts="false", context_parallel_size=1, attention_backend="flash"
)
NO_REFERENCE: Any = SimpleNamespace(beta=0.0, sizes={}, adapter=None)
REFERENCE: Any = SimpleNamespace(beta=0.1, sizes={}, adapter=None)
IN_OWN_LAYOUT: Any = SimpleNamespace(beta=0.1, sizes={"tensor_model_parallel_size": 2}, adapter=None)
NOT_CALLED: Any = None


def config_of(**changed: Any) -> Any:
    """Return the configuration of a small run."""
    settings = {
        **vars(fake_run().config),
        "micro_batches": MICRO_BATCHES,
        "vision_tower_share": 0.0,
        "reference": NO_REFERENCE,
        "data": SimpleNamespace(seed=7, train_dataloader_shuffle=True, shuffles=True),
        **changed,
    }
    settings["batch"].micro_batch_size = 4
    return SimpleNamespace(**settings)


def inputs_of(**changed: Any) -> Any:
    template = SimpleNamespace(template_meta=SimpleNamespace(default_system=None))
    return SimpleNamespace(
        **{
            "template": template, "train_rows": ROWS, "coordinator": OneRank(), "rollouts_done": 0, "checkpoints": (),
            "teacher": None, "rewards": SimpleNamespace(names=["length"]), "logger": logging.getLogger("assemble"),
            **changed,
        }
    )  # fmt: skip


# ---- settings of the engines


def test_a_reference_in_another_layout_has_the_budget_of_forward_passes() -> None:
    trained = replace(MICRO_BATCHES, max_tokens_per_micro_batch=100, share_prompts="true")
    settings = frozen_engine_settings(config_of(micro_batches=trained, reference=IN_OWN_LAYOUT))
    assert settings.max_tokens == 100 and settings.share_prompts_from == 0.05  # its layout may not allow more
    larger = replace(trained, infer_max_tokens_per_micro_batch=300)
    assert frozen_engine_settings(config_of(micro_batches=larger, reference=IN_OWN_LAYOUT)).max_tokens == 300


def test_a_reference_in_another_layout_has_micro_batches_of_completions() -> None:
    """A rank may get another number of samples than it trains, so the micro batches of a pass may be smaller."""
    settings = frozen_engine_settings(config_of(reference=IN_OWN_LAYOUT))
    assert (settings.micro_batch_size, settings.infer_micro_batch_size) == (1, 4)


def test_a_reference_in_the_layout_of_training_has_its_settings() -> None:
    config = config_of(reference=REFERENCE)
    assert frozen_engine_settings(config) == engine_settings(config)
    assert engine_settings(config).temperature == SAMPLING.temperature


# ---- the reference policy


def models(reference: FrozenCopy | None = None, peft: Sequence[Any] = ()) -> LoadedModels:
    return LoadedModels([], [], list(peft), None, None, None, reference)


def test_the_reference_is_the_copy_or_the_model_with_another_adapter() -> None:
    active: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        active.append(name)
        yield
        active.remove(name)

    def passes(name: str) -> Any:
        return SimpleNamespace(infer=lambda samples: {0: [name, *active]}, parallel=None)

    def infer(settings: Any, loaded: LoadedModels) -> Any:
        ranks: Any = OneRank()
        training: Any = SimpleNamespace(passes=passes("trained"))
        reference = reference_policy(config_of(reference=settings), loaded, training, ranks)
        assert reference is not None
        return reference.infer([])[0]

    layout: Any = SimpleNamespace(active=partial(noted, "layout"))
    adapter: Any = SimpleNamespace(disable_adapter=partial(noted, "disabled"), modules=list)
    nothing: Any = None
    assert reference_policy(config_of(), models(FrozenCopy(passes("copy"), None)), nothing, nothing) is None
    assert infer(REFERENCE, models(FrozenCopy(passes("copy"), None))) == ["copy"]
    assert infer(REFERENCE, models(FrozenCopy(passes("copy"), layout))) == ["copy", "layout"]
    assert infer(REFERENCE, models(peft=[adapter])) == ["trained", "disabled"]
    assert infer(SimpleNamespace(beta=0.1, sizes={}, adapter="folder"), models(peft=[adapter])) == ["trained"]


# ---- prompts


def test_spare_prompts_are_the_same_rows_in_another_order() -> None:
    config, run = config_of(), inputs_of()
    prompts = assemble.prompt_source(config, run).take(8)
    spare = assemble.prompt_source(config, run, spare=True).take(8)
    texts = [[prompt.row["messages"][0]["content"] for prompt in taken] for taken in (prompts, spare)]
    assert texts[0] != texts[1] and sorted(texts[0]) == sorted(texts[1])
    assert not {prompt.prompt_id for prompt in prompts} & {prompt.prompt_id for prompt in spare}


def test_each_validation_dataset_has_its_rows() -> None:
    rows = [{**row, "dataset": name} for row in ROWS[:2] for name in ("a", "b", "b")]
    config = config_of(evaluation=replace(fake_run().config.evaluation, names={"a": "math", "b": "code"}))
    loop: Any = SimpleNamespace(evaluate=NOT_CALLED)
    datasets = assemble.evaluation(config, inputs_of().template, Dataset.from_list(rows), loop).datasets
    assert {name: source.rows for name, source in datasets.items()} == {"math": 2, "code": 4}


# ---- a resumed rollout


def save(folder: Path, config: Any, number: int) -> None:
    source = PromptSource(ROWS, config.data.seed, True, None)
    graded = [Graded(Rollout(prompt, [1], [2], [-1.0], "a", "stop", 0), [1.0], 1.0, 0.0) for prompt in source.take(2)]
    save_unfinished(
        folder, UnfinishedRollout(number, shared_settings(config), graded, [None, [-1.0]], False), no_images
    )


def test_a_resumed_run_continues_the_rollout_of_the_checkpoint(tmp_path: Path) -> None:
    config = config_of()
    assert assemble._unfinished(config, inputs_of()) is None  # it does not resume
    assert assemble._unfinished(config, inputs_of(checkpoints=[str(tmp_path)])) is None  # between two rollouts
    save(tmp_path, config, number=3)
    found = assemble._unfinished(config, inputs_of(checkpoints=[str(tmp_path)], rollouts_done=3))
    assert found is not None and found.number == 3 and found.old_logprobs == [None, [-1.0]]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_iterations": 2}, "generated with --num_iterations 1, and this run has 2"),
        ({"train_rows": [{"messages": [{"role": "user", "content": "other"}]}] * 8}, "completes prompt"),
    ],
)
def test_a_run_with_other_settings_generates_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], reason: str
) -> None:
    saved = config_of()
    save(tmp_path, saved, number=0)
    other: Any = SimpleNamespace(**{**vars(saved), **changed})
    with caplog.at_level(logging.WARNING):
        assert assemble._unfinished(other, inputs_of(checkpoints=[str(tmp_path)], **changed)) is None
    assert "the rollout that the checkpoint interrupts is generated again" in caplog.text and reason in caplog.text


# ---- refusals, and the canary


def test_a_model_that_cannot_be_trained_is_refused_before_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("calculate_per_token_loss must be false")

    started: list[object] = []
    monkeypatch.setattr(assemble, "training_engine", refuse)
    monkeypatch.setattr(assemble, "_start_vllm", started.append)
    monkeypatch.setattr(assemble, "Residency", lambda *_, **options: None)  # reads the optimizer
    config = config_of(offloading=None)
    with pytest.raises(ValueError, match="calculate_per_token_loss"):
        assemble.assemble_stages(config, models(), inputs_of(servers=None), first_new_rollout=0)
    assert not started


@pytest.mark.parametrize(("longest", "tokens"), [(None, CANARY_TOKENS), (4096, CANARY_TOKENS), (65, 64), (2, 1)])
def test_the_canary_leaves_the_engine_room_for_one_token(
    monkeypatch: pytest.MonkeyPatch, longest: int | None, tokens: int
) -> None:
    monkeypatch.setattr(canary, "Passes", lambda models, settings: settings)  # reads the models
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: list(map(ord, text)))
    ranks: Any = OneRank()
    built = build_canary(tokenizer, None, frozenset(), longest, trained_models=[], coordinator=ranks)
    assert built.text.tokens == built.tokens == list(map(ord, canary.CANARY_TEXT[:tokens]))
    assert built.passes.temperature == 1.0  # type: ignore[attr-defined]


def test_log_probs_of_a_teacher_of_its_own_reach_all_ranks() -> None:
    """Ranks get equal work, which another model divides in another way."""
    passes = SimpleNamespace(parallel="place of this rank", infer=lambda samples: {1: "of this rank"})
    copy_of_teacher = FrozenCopy(passes, layout=None)  # type: ignore[arg-type]
    models: Any = SimpleNamespace(reference=None, teacher=copy_of_teacher)
    gathered: Any = SimpleNamespace(gather_samples=lambda values, parallel: {0: "of another", **values})
    config = config_of(teacher=SimpleNamespace(exists=True, is_base=False, teacher_prompts=False))
    teacher: Any = assemble.teacher_policy(config, models, NOT_CALLED, gathered)
    assert teacher.infer([]) == {0: "of another", 1: "of this rank"}
