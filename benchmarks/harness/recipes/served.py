"""Answer held-out problems with plain vLLM, started with the folder that a run has saved, and then with other weights.

    python -m benchmarks.harness.recipes.served SAVED BEFORE --rows held_out.jsonl --reward NAME --plugins FILE... \
        --max-tokens 64 --dtype bfloat16 --json FILE [--environment NAME]

Prompts are made by the chat template in SAVED, as `vllm serve SAVED` makes them, and completions are greedy. The JSON
has the accuracy of both and two problems with the completions of both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness.scoring_engine import scoring_engine

from .runs import read_rows

MOST_TURNS = 3
MODEL_TOKENS = 1024
Messages = list[dict[str, str]]
Answered = list[tuple[Messages, float]]  # a conversation and its reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("saved", type=Path)
    parser.add_argument("before", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--reward", required=True)
    parser.add_argument("--environment")
    parser.add_argument("--plugins", nargs="*", default=[])
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--problems", type=int, help="the first ones alone")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    from swift.utils import import_external_file

    for plugin in args.plugins:
        import_external_file(plugin)
    rows = read_rows(args.rows)[: args.problems]
    after, before = answers(args, rows)
    args.json.write_text(json.dumps(compared(before, after)) + "\n")


def answers(args: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[Answered, Answered]:
    """Return the conversations of the saved weights and of those before training."""
    from vllm import SamplingParams

    llm = scoring_engine(args.saved, args.dtype, MODEL_TOKENS)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)

    def answer(conversations: list[Messages]) -> list[str]:
        return [request.outputs[0].text for request in llm.chat(conversations, sampling, use_tqdm=False)]

    def all_of() -> Answered:
        if args.environment:
            return asyncio.run(in_turns(answer, rows, args.environment))
        return graded(answer([row["messages"] for row in rows]), rows, args.reward)

    after = all_of()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(args.before)})
    return after, all_of()


def graded(texts: list[str], rows: list[dict[str, Any]], reward: str) -> Answered:
    from swift.rewards import orms

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    rewards = orms[reward]()(texts, **columns)
    return [
        ([*row["messages"], {"role": "assistant", "content": text}], float(value))
        for row, text, value in zip(rows, texts, rewards, strict=True)
    ]


async def in_turns(answer: Any, rows: list[dict[str, Any]], environment: str) -> Answered:
    """Hold a conversation with an environment about each row; all of them take a turn at the same time."""
    from swift.rollout.gym_env import envs

    held: list[tuple[Messages, float]] = []
    environments = [envs[environment]({}) for _ in rows]
    for env, row in zip(environments, rows, strict=True):
        question, _, _ = await env.reset(SimpleNamespace(messages=row["messages"], data_dict=row))
        held.append(([{"role": "user", "content": question}], 0.0))
    running = list(range(len(rows)))
    for turn in range(MOST_TURNS):
        texts = answer([held[place][0] for place in running])
        for place, text in zip(list(running), texts, strict=True):
            messages, total = held[place]
            messages = [*messages, {"role": "assistant", "content": text}]
            said, reward, done, _ = await environments[place].step(messages)
            if done or turn == MOST_TURNS - 1:
                running.remove(place)
            else:
                messages.append({"role": "user", "content": said})
            held[place] = (messages, total + reward)
    return held


def compared(before: Answered, after: Answered) -> dict[str, Any]:
    """Return both accuracies, and two problems: the first one that was learned, and the first one that was not."""
    gained = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old[1] < 1 <= new[1]]
    wrong = [place for place, new in enumerate(after) if new[1] < 1]
    places = list(dict.fromkeys([*gained[:1], *wrong[:1], *gained[1:], *wrong[1:], *range(len(after))]))[:2]
    return {
        "problems": len(after),
        "before": accuracy(before),
        "after": accuracy(after),
        "completions": [{"before": before[place][0], "after": after[place][0]} for place in places],
    }


def accuracy(answered: Answered) -> float:
    return round(sum(reward >= 1 for _, reward in answered) / len(answered), 4)


if __name__ == "__main__":
    main()
