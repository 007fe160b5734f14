"""Drafts on real servers change no completion: with weight updates, two workers, and a server that is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swift_megatron_grpo.generation.interface import requests_for
from swift_megatron_grpo.generation.protocol.model_identity import model_identity, read_model_config
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.settings.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.types import DraftCounts, Prompt, Rollout
from tests.paths import REPOSITORY
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
DRAFTS = ["--speculative_rollouts", "history", "--speculative_tokens", "4"]
ACCEPTS_ALL = ["--external_plugins", str(REPOSITORY / "tests" / "programs" / "e2e" / "accepts_drafts.py")]
EXACT = 5e-5  # of log-probs in fp32 at a temperature of 0.04, which multiplies rounding by 25
QUESTIONS = ["aa bb aa bb aa", "1 2 3 1 2 3 1 2", "what is two and two?"]
GROUP = 6
_COLD = SamplingConfig(0.04, 1.0, -1, 1.0, 32, ())
CASES = {
    "low temperature": _COLD,
    "the same prompts again": _COLD,
    "top_k and top_p": replace(_COLD, temperature=0.3, top_k=8, top_p=0.9),
    "repetition penalty": replace(_COLD, temperature=0.05, repetition_penalty=1.2),
    "stop words": replace(_COLD, stop_words=("e", "7", "ab")),
    "temperature": replace(_COLD, temperature=1.0),
}
AGAIN = ("low temperature", "the same prompts again")
FIRST, SECOND = 7, 8  # versions of the weights
Texts = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Generated:
    texts: Texts
    drafts: DraftCounts


@pytest.fixture(scope="module")
def servers(folder: Path, dense: Path) -> Iterator[Mapping[str, RolloutServer]]:
    flags = {"plain": [], "one": DRAFTS, "other": DRAFTS, "two workers": [*DRAFTS, "--vllm_tensor_parallel_size", "2"],
             "planted": [*DRAFTS, *ACCEPTS_ALL]}  # fmt: skip
    running = {name: RolloutServer(dense, folder / f"{name}.txt", each).start() for name, each in flags.items()}
    for server in running.values():
        server.wait()
    yield running
    for server in running.values():
        server.stop()


@pytest.fixture(scope="module")
def plain(dense: Path, servers: Mapping[str, RolloutServer]) -> dict[tuple[int, str], Generated]:
    return generated(dense, [servers["plain"]], drafts=0)


def generated(
    model: Path,
    servers: Sequence[RolloutServer],
    drafts: int = 4,
    cases: Sequence[str] = tuple(CASES),
    on_group: Callable[[str], object] = len,
) -> dict[tuple[int, str], Generated]:
    """Return what these servers generate in some cases, with two versions of the weights, by version and case."""
    config = ServerConfig(
        urls=tuple(server.url for server in servers), group_ports=(0,) * len(servers), timeout=120, request_timeout=120,
        api_key=KEY, bucket_bytes=2**20, needed_length=256, model=model_identity(read_model_config(model)),
        drafts=drafts,
    )  # fmt: skip
    engine = RemoteVllm(config, WeightSender(torch.device("cpu"), 2**20), rank=0)
    prompts = [Prompt(text, {"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    found = {}
    try:
        engine.check()
        for version in (FIRST, SECOND):
            assert engine.needs_weights(version)
            engine.load_weights(weights(model, version).items(), version, None, collect_checksums=False)
            engine.mark_verified()
            for case in cases:
                requests = requests_for(prompts, GROUP, seed=list(CASES).index(case), version=version)
                generation = engine.generate(requests, GROUP, CASES[case])
                rollouts: dict[int, Rollout] = {}
                while len(rollouts) < len(requests):
                    rollouts |= generation.next(version).finished
                    on_group(f"{version} {case}")
                texts = [(rollouts[i].completion_ids, rollouts[i].logprobs or []) for i in range(len(requests))]
                found[version, case] = Generated(texts, engine.take_draft_counts())
    finally:
        engine.shutdown()
    return found


def weights(model: Path, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(model / "model.safetensors")
    if version == FIRST:
        return tensors
    return {
        name: each + 0.1 * each.std() * torch.randn(each.shape, generator=generator) if each.dim() == 2 else each
        for name, each in tensors.items()
    }


def assert_same(found: Mapping[tuple[int, str], Generated], plain: Mapping[tuple[int, str], Generated]) -> None:
    for key, each in found.items():
        for (tokens, logprobs), (others, their_logprobs) in zip(plain[key].texts, each.texts, strict=True):
            assert others == tokens, key
            assert max(abs(a - b) for a, b in zip(logprobs, their_logprobs, strict=True)) < EXACT, key


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "cases"), [("one", tuple(CASES)), ("two workers", AGAIN)])
def test_a_server_with_drafts_generates_what_one_without_does(
    dense: Path,
    servers: Mapping[str, RolloutServer],
    plain: dict[tuple[int, str], Generated],
    name: str,
    cases: Sequence[str],
) -> None:
    found = generated(dense, [servers[name]], cases=cases)
    assert_same(found, plain)
    assert {each.drafts for each in plain.values()} == {DraftCounts()}
    for (_, case), each in found.items():
        assert each.drafts.tokens == sum(len(tokens) for tokens, _ in each.texts), case
        assert 0 < each.drafts.accepted < each.drafts.drafted, case
    first, again = (found[FIRST, case].drafts for case in AGAIN)
    assert again.accepted / again.drafted > first.accepted / first.drafted  # it remembers the first ones


def test_tokens_stay_the_same_although_a_server_with_drafts_is_killed(
    dense: Path, servers: Mapping[str, RolloutServer], plain: dict[tuple[int, str], Generated]
) -> None:
    killed: list[str] = []

    def kill(case: str) -> None:
        if case.startswith(f"{FIRST} top_k") and not killed:
            killed.append(case)
            servers["one"].kill()

    found = generated(dense, [servers["one"], servers["other"]], on_group=kill)
    servers["one"].start().wait()
    assert killed
    assert_same(found, plain)
    assert found[SECOND, "low temperature"].drafts.accepted > 0


def test_a_wrong_rule_of_acceptance_on_a_server_is_noticed(
    dense: Path, servers: Mapping[str, RolloutServer], plain: dict[tuple[int, str], Generated]
) -> None:
    found = generated(dense, [servers["planted"]], cases=AGAIN[:1])
    with pytest.raises(AssertionError):
        assert_same(found, plain)


def test_servers_and_runs_with_other_drafts_are_refused(dense: Path, servers: Mapping[str, RolloutServer]) -> None:
    with pytest.raises(ValueError, match=r"it verifies up to 0 drafts .* start it with --speculative_rollouts history"):
        generated(dense, [servers["plain"]])
    with pytest.raises(ValueError, match=r"it verifies up to 4 drafts .* start it with --speculative_rollouts off"):
        generated(dense, [servers["other"]], drafts=0)
