"""A damaged dump is refused by file and line: 2,000 flipped bits, and a cut at every place."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.output.recording.folder import RolloutDump, Settings, check_replay, check_rollouts
from swift_megatron_grpo.output.recording.reading import RolloutReplay
from swift_megatron_grpo.output.recording.rows import BadRow, Limits
from swift_megatron_grpo.types import Graded, Prompt, Rollout

SETTINGS = Settings(num_generations=2, generation_batch_size=4, temperature=0.7, reward_funcs=("Letters", "Length"))
LIMITS = Limits(vocabulary=300, reward_functions=2)
PROMPTS = [Prompt(f"0-{i}", {"messages": [{"role": "user", "content": f"{i}é"}]}) for i in (0, 1)]
FILE = "rollout-000000.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "dump"
    rollouts = [
        Rollout(prompt, [1, 2], [3, 4, 5 + i], [-1.5, -0.25, -i - 0.125], "é\n\u2028x", "stop", 3)
        for prompt in PROMPTS
        for i in range(2)
    ]
    dump = RolloutDump(folder, SETTINGS, first=0, writes_here=True)
    dump.write(0, 0, [Graded(rollout, [0.5, None], 0.5, 0.1) for rollout in rollouts])
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    return (folder / FILE).read_bytes()


def flip(content: bytes, bit: int) -> bytes:
    place, shift = divmod(bit % (8 * len(content)), 8)
    return content[:place] + bytes([content[place] ^ 1 << shift]) + content[place + 1 :]


def refusal_of_line(folder: Path, content: bytes) -> int:
    """Return the line that a replay of this file refuses."""
    (folder / FILE).write_bytes(content)
    with pytest.raises(BadRow, match=r"rollout-000000\.jsonl, line \d: the line is ") as refused:
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)
    with pytest.raises(ValueError, match=r"rollout-000000\.jsonl, line \d: the line is "):  # and at the start
        check_rollouts(folder, 0, 1, steps_per_rollout=1)
    return int(str(refused.value).split("line ")[1][0])


def test_every_flipped_bit_is_refused_by_file_and_line(folder: Path, whole: bytes) -> None:
    for bit in random.Random(0).sample(range(8 * len(whole)), 2000):
        line = 1 + whole[: bit // 8].count(b"\n")
        assert refusal_of_line(folder, flip(whole, bit)) == line


@settings(max_examples=300)
@given(data=st.data())
def test_every_truncation_is_refused(folder: Path, whole: bytes, data: st.DataObject) -> None:
    rest = whole[: data.draw(st.integers(0, len(whole) - 1))]
    (folder / FILE).write_bytes(rest)
    complaint = "line [1-4]: the line is cut off" if rest[-1:] not in (b"", b"\n") else "has [0-3] completions"
    with pytest.raises(BadRow, match=rf"rollout-000000\.jsonl,? {complaint}"):
        RolloutReplay(folder, LIMITS).take(0, 0, PROMPTS, 2)


def test_every_flipped_bit_of_the_settings_is_harmless_or_refused(folder: Path) -> None:
    path = folder / "settings.json"
    whole = path.read_bytes()
    harmless = 0
    for bit in range(8 * len(whole)):
        path.write_bytes(flip(whole, bit))
        try:
            check_replay(folder, SETTINGS)
        except ValueError as refused:
            assert "settings.json" in str(refused) or "is in format" in str(refused)
        else:
            harmless += 1
            assert json.loads(path.read_bytes()) == json.loads(whole)
    path.write_bytes(whole)
    assert harmless < len(whole) // 4  # white space between values
