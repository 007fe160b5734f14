"""Reward models: addresses with a route, plugins, weights, and what counts as a reward."""

from __future__ import annotations

from typing import Any

import pytest
from swift.rewards import rm_plugins

from swift_megatron_grpo.arguments.reward_models import check_plugins
from swift_megatron_grpo.settings.reward_models import RewardModels
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.servers import Servers
from swift_megatron_grpo.settings.teacher import Teacher
from tests.programs.e2e.judge import Characters
from tests.unit.settings.flags import faults, of

SERVED = "http://h:8000/classify"
JUDGED = "https://h/v1/chat/completions/"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no route": ({"reward_model": ["http://h:8000"]}, "append /classify or /pooling of a classifier, or /v1/chat"),
    "other route": ({"reward_model": ["http://h:8000/score"]}, "http://h:8000/score has no route"),
    "no host": ({"reward_model": ["http:///classify"]}, "use the form http://HOST:8000/classify"),
    "other scheme": ({"reward_model": ["tcp://h/classify"]}, "is not the address of a server"),
    "plugins": ({"reward_model": [SERVED], "reward_model_plugin": ["default", "a"]}, "has 2 values for the 1 of"),
    "templates": (
        {"reward_model": ["a/b", "c"], "reward_template": ["qwen3"]},
        "--reward_template has 1 values for the 2",
    ),
    "adapters of two": (
        {"reward_model": ["a/b", "a/c"], "reward_adapters": ["d"]},
        "and there are 2; merge each",
    ),
    "adapters of a server": (
        {"reward_model": [SERVED], "reward_adapters": ["d"]},
        "has its own adapters; leave them out",
    ),
    "adapters of none": ({"reward_adapters": ["d"]}, "and there are 0; merge"),
    "plugin alone": ({"reward_model_plugin": ["genrm"]}, "has 1 values for the 0 of --reward_model"),
    "no plugin": ({"reward_model": [JUDGED]}, "a judge needs a plugin"),
    "plugin of a classifier": ({"reward_model": [SERVED], "reward_model_plugin": ["a"]}, "returns the score itself"),
    "time": ({"reward_model_timeout": 0.0}, "--reward_model_timeout 0 must be above 0; use --reward_model_timeout 300"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_called_is_refused(case: str) -> None:
    typed, message = REFUSED[case]
    assert message in faults(RewardModels, **typed)


def test_weights_count_functions_then_models_then_environments() -> None:
    typed = {"reward_funcs": ["format"], "reward_model": [SERVED], "use_gym_env": True}
    assert faults(Rewards, **typed, reward_weights=[1.0, 2.0, 3.0]) == ""
    assert "2 values for 3 reward functions and models" in faults(Rewards, **typed, reward_weights=[1.0, 2.0])


def test_a_run_that_a_model_alone_grades_has_rewards() -> None:
    graded = {"reward_model": [SERVED], "teacher_model": "big", "model": "small"}
    assert not of(Teacher, **graded).is_alone and of(Teacher, **graded | {"reward_model": None}).is_alone
    assert of(Servers, reward_model=[SERVED], vllm_mode="server").turns is None


def test_models_are_named_by_their_path_or_plugin() -> None:
    typed, plugins = [SERVED, JUDGED, "org/big/"], ["default", "helpful", "genrm"]
    models = of(RewardModels, reward_model=typed, reward_model_plugin=plugins, reward_template=["a", "b", "c"]).all
    assert [model.name for model in models] == ["reward_model", "helpful", "big"]
    assert [model.address for model in models] == [SERVED, JUDGED.rstrip("/"), None] and models[2].template == "c"


def test_a_plugin_of_a_judge_asks_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rm_plugins, "characters", Characters)
    check_plugins(of(RewardModels, reward_model=[JUDGED], reward_model_plugin=["characters"]))
    with pytest.raises(ValueError, match="GenRMPlugin has no method request, which a judge behind a server needs"):
        check_plugins(of(RewardModels, reward_model=[JUDGED], reward_model_plugin=["genrm"]))
    check_plugins(of(RewardModels, reward_model=["org/big", "org/big"], reward_model_plugin=["genrm", "default"]))
    with pytest.raises(ValueError, match="Characters has no method __call__, which a model in the ranks needs; use a"):
        check_plugins(of(RewardModels, reward_model=["org/big"], reward_model_plugin=["characters"]))
    with pytest.raises(ValueError, match="unknown name 'charakters' in --reward_model_plugin; did you mean characters"):
        check_plugins(of(RewardModels, reward_model=[JUDGED], reward_model_plugin=["charakters"]))
