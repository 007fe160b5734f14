"""`--batch_invariant` of a server sets the variable that vLLM reads, and is refused on devices without the kernels."""

from __future__ import annotations

import os

import pytest

from swift_megatron_grpo.generation.vllm.batch_invariance import VARIABLE, batch_invariance, is_requested


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_a_flag_or_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    assert batch_invariance(False, capability) is False and os.environ[VARIABLE] == "0"
    assert batch_invariance(True, capability) is True and os.environ[VARIABLE] == "1" and is_requested()
    monkeypatch.setenv(VARIABLE, "1")
    assert batch_invariance(False, capability) is True


@pytest.mark.parametrize(("capability", "found"), [(None, "there is none here"), ((8, 0), "this one has 8.0")])
@pytest.mark.parametrize("value", ["0", "1", "yes"])
def test_a_device_without_such_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, found: str, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=rf"--batch_invariant true: .* 9.0, and {found}; leave it out, and unset"):
        batch_invariance(value == "0", capability)
    assert os.environ[VARIABLE] == value


def test_vllm_reads_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    assert not envs.VLLM_BATCH_INVARIANT
    monkeypatch.setenv(VARIABLE, "1")
    assert envs.VLLM_BATCH_INVARIANT
