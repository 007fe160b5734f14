"""A teacher: what it excludes, and what a run without rewards must leave out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.arguments.teachers import check_tokens
from swift_megatron_grpo.settings.algorithm import Algorithm
from swift_megatron_grpo.settings.distillation import Rlsd
from swift_megatron_grpo.settings.layout import DataShape
from swift_megatron_grpo.settings.teacher import Teacher
from tests.unit.settings.flags import faults, of

TAUGHT = {"teacher_model": "big", "model": "small", "reward_funcs": ["accuracy"]}
ALONE = TAUGHT | {"reward_funcs": []}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "real": (TAUGHT | {"loss_type": "real"}, "--loss_type real, which compares whole completions"),
    "fipo": (TAUGHT | {"loss_type": "fipo"}, "use --loss_type grpo"),
    "mask": (TAUGHT | {"off_policy_sequence_mask_delta": 0.5}, "--off_policy_sequence_mask_delta 0.5"),
    "negative": (TAUGHT | {"teacher_kl_coef": -1.0}, "--teacher_kl_coef -1 must be at least 0"),
    "dynamic": (ALONE | {"dynamic_sample": True}, "--dynamic_sample true needs rewards"),
    "evaluation": (ALONE | {"val_dataset": ["rows.jsonl"]}, "an evaluation needs rewards"),
    "split": (ALONE | {"split_dataset_ratio": 0.1}, "or leave --split_dataset_ratio out"),
    "rlsd without rewards": (ALONE | {"advantage_reweight": "rlsd"}, "rlsd weights the advantages of rewards"),
    "two uses": (
        TAUGHT | {"advantage_reweight": "rlsd", "sdar_loss_coef": 0.1},
        "--sdar_loss_coef 0.1 are two uses of one teacher",
    ),
    "sdar without a teacher": (
        TAUGHT | {"sdar_loss_coef": 0.1, "teacher_model": None},
        "--sdar_loss_coef 0.1 needs a teacher",
    ),
    "rlsd without a teacher": (
        TAUGHT | {"advantage_reweight": "rlsd", "teacher_model": None},
        "add the column teacher_prompt to the dataset, or use --teacher_model",
    ),
    "nothing": (ALONE | {"teacher_kl_coef": 0.0}, "nothing would be trained; use --teacher_kl_coef 1"),
}
REFUSED_BY_ALGORITHM: dict[str, tuple[dict[str, Any], str]] = {
    "gdpo": (ALONE | {"scale_rewards": "gdpo"}, "--scale_rewards gdpo needs rewards"),
    "one completion with rewards": (TAUGHT | {"num_generations": 1}, "num_generations (1) must be at least 2"),
    "kl in reward": (
        ALONE | {"num_generations": 1, "kl_in_reward": True, "beta": 0.1},
        "--kl_in_reward true compares the completions of a prompt",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_teacher_excludes_is_refused(case: str) -> None:
    typed, message = REFUSED[case]
    assert message in faults(Teacher, rows=DataShape(0, False), **typed)


@pytest.mark.parametrize("case", REFUSED_BY_ALGORITHM)
def test_an_algorithm_that_compares_has_rewards_to_compare(case: str) -> None:
    typed, message = REFUSED_BY_ALGORITHM[case]
    assert message in faults(Algorithm, **typed)


def test_sdar_excludes_no_loss_and_needs_no_rewards() -> None:
    sdar = {"sdar_loss_coef": 0.1, "teacher_kl_coef": 0.0, "off_policy_sequence_mask_delta": 0.5, "loss_type": "fipo"}
    assert faults(Teacher, rows=DataShape(0, False), **ALONE | sdar) == ""


def test_a_teacher_with_and_without_rewards_is_accepted() -> None:
    assert faults(Teacher, **TAUGHT) == faults(Teacher, **ALONE) == ""
    assert faults(Algorithm, **ALONE, num_generations=1, micro_batch_size=1, global_batch_size=8) == ""


@pytest.mark.parametrize(("warmup", "decay"), [(0, 0), (3, 0), (0, 4), (3, 4)])
def test_the_weight_of_rlsd_follows_ms_swifts_schedule(warmup: int, decay: int) -> None:
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    rlsd = Rlsd(rlsd_lambda=0.8, rlsd_lambda_warmup_steps=warmup, rlsd_lambda_decay_steps=decay)
    for step in range(10):
        stock = SimpleNamespace(state=SimpleNamespace(global_step=step), **vars(rlsd))
        assert rlsd.share(step) == pytest.approx(GRPOTrainer._rlsd_effective_lambda(stock))
    assert rlsd.share(9) == (0 if decay else 0.8)


def test_the_base_of_an_adapter_is_a_teacher_without_a_copy() -> None:
    same = TAUGHT | {"teacher_model": "small"}
    full, lora = of(Teacher, **same), of(Teacher, **same, tuner_type="lora")
    assert full.is_copy and not full.is_base and lora.is_base and not lora.is_copy
    resolved = of(Teacher, model="small", tuner_type="lora", _teacher_use_disable_adapter=True)  # by ms-swift
    assert resolved.is_base and resolved.name == lora.name == "small"
    assert not of(Teacher, model="small", tuner_type="lora").exists


def test_a_teacher_may_have_more_tokens_but_none_under_another_id() -> None:
    own = {"a": 0, "b": 1, "c": 2}
    check_tokens("big", own, own | {"d": 3})
    with pytest.raises(ValueError, match=r"2 of 3 tokens .*\('b' is 1 and 2, 'c' is 2 and 1\)"):
        check_tokens("big", own, {"a": 0, "b": 2, "c": 1})
    with pytest.raises(ValueError, match=r"1 of 3 tokens .*'c' is 2 and unknown"):
        check_tokens("big", own, {"a": 0, "b": 1})


OWN = {"model": "small", "reward_funcs": ["accuracy"], "teacher_prompts": True}


def test_a_policy_with_a_second_prompt_is_its_own_teacher() -> None:
    policy, other = of(Teacher, **OWN), of(Teacher, **OWN, teacher_model="big")
    assert policy.exists and policy.is_policy and not policy.is_copy and not policy.is_base
    assert other.is_copy and not other.is_policy and other.name == "big" != policy.name
    assert faults(Teacher, rows=DataShape(0, False), **OWN) == ""


def test_a_second_prompt_excludes_what_a_teacher_excludes_and_media() -> None:
    assert "the column teacher_prompt with --loss_type real" in faults(Teacher, **OWN, loss_type="real")
    assert "and its rows have images" in faults(Teacher, rows=DataShape(1, True), **OWN)
    assert "and its rows have videos" in faults(Teacher, rows=DataShape(0, True, videos=1), **OWN)
    assert "and its rows have audio" in faults(Teacher, rows=DataShape(0, True, recordings=1), **OWN)


SERVED = {"teacher_model_server": "http://h:8000/v1/", "temperature": 1.0, "reward_funcs": ["accuracy"]}
REFUSED_OF_SERVERS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0.9}, "use --temperature 1, or --teacher_model"),
    "no JSON": ({"teacher_model_server": '[{"url"'}, "cannot be read as JSON (Expecting"),
    "no list": ({"teacher_model_server": '{"url": "http://h:1"}'}, "is no list of servers; use the form [{"),
    "no servers": ({"teacher_model_server": "[]"}, "is no list of servers"),
    "a misspelt key": ({"teacher_model_server": '[{"urls": "http://h:1"}]'}, "is not a server with its tags"),
    "tags as a text": ({"teacher_model_server": '[{"url": "http://h", "tags": "a"}]'}, "is not a server with its tags"),
    "not an address": ({"teacher_model_server": '[{"url": "h"}]'}, "h is not the address of a server"),
    "no tags": (
        {"teacher_model_server": '[{"url": "http://h", "tags": ["a"]}, {"url": "http://i"}]'},
        "http://i has no tags",
    ),
    "a tag twice": (
        {"teacher_model_server": '[{"url": "http://h", "tags": [1]}, {"url": "http://i", "tags": ["2", "1"]}]'},
        "the tag 1 is given 2 times; give each tag to one server",
    ),
    "no address": ({"teacher_model_server": "h:8000"}, "use the form http://HOST:8000"),
    "two": ({"teacher_model": "big"}, "are two teachers; leave one of them out"),
    "time": ({"teacher_timeout": 0.0}, "--teacher_timeout 0 must be above 0"),
}


@pytest.mark.parametrize("case", REFUSED_OF_SERVERS)
def test_what_a_teachers_server_excludes_is_refused(case: str) -> None:
    changes, message = REFUSED_OF_SERVERS[case]
    assert message in faults(Teacher, **SERVED | changes)


def test_a_teachers_server_is_accepted_on_rows_of_text() -> None:
    assert [address.url for address in of(Teacher, **SERVED).addresses] == ["http://h:8000"]
    assert not of(Teacher, **SERVED).is_copy and of(Teacher, **SERVED).tag_column is None
    assert faults(Teacher, **SERVED) == faults(Teacher, rows=DataShape(0, False), **SERVED) == ""
    assert "the rows have images" in faults(Teacher, rows=DataShape(1, True), **SERVED)
    assert "the rows have videos" in faults(Teacher, rows=DataShape(0, True, videos=1), **SERVED)
    assert "the rows have audio" in faults(Teacher, rows=DataShape(0, True, recordings=1), **SERVED)


SEVERAL = '[{"url": "http://h:1/v1", "tags": ["math", 7]}, {"url": "http://h:2", "tags": ["code"]}]'


def test_several_teachers_are_those_of_ms_swift() -> None:
    from swift.rl_core.data import OnPolicySample
    from swift.rlhf_trainers.gkd_helpers import parse_teacher_model_server, route_samples_to_teachers

    several = SERVED | {"teacher_model_server": SEVERAL, "teacher_tag_key": "kind"}
    assert faults(Teacher, **several) == ""
    teacher, stock = of(Teacher, **several), parse_teacher_model_server(SEVERAL)
    assert teacher.tag_column == "kind"
    assert [list(address.tags) for address in teacher.addresses] == [each.tags for each in stock]
    rows = [{"messages": [], "kind": kind} for kind in ("code", 7, "math")]
    routes = route_samples_to_teachers([OnPolicySample.from_row(row) for row in rows], stock, "kind")
    assert routes == {
        number: [place for place, row in enumerate(rows) if str(row["kind"]) in address.tags]
        for number, address in enumerate(teacher.addresses)
    }


def test_a_single_teacher_in_a_list_teaches_all_rows() -> None:
    alone = SERVED | {"teacher_model_server": '[{"url": "http://h:1"}]'}
    assert faults(Teacher, **alone) == "" and of(Teacher, **alone).tag_column is None
