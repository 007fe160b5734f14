"""Count how many decode steps drafts without a draft model would have saved in rollouts that a run has dumped.

swift-megatron-grpo simulate-drafts RUN
swift-megatron-grpo simulate-drafts RUN --depths 2 4 --running 64

RUN is the folder of --rollout_dump, or the --output_dir of a run that had one. Requests of a rollout are replayed side
by side, without an engine and without a GPU. A draft is what came before after the longest match with the last tokens,
in the prompt, in the group's completions so far, or in the prompt's completions of earlier rollouts. It is accepted
where it is the dumped token, so no completion changes. Steps are counted, not seconds: a step with drafts has more
rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swift_megatron_grpo.cli.command_line import FINE, Refused
from swift_megatron_grpo.cli.simulate_drafts.replay import Tally, replay
from swift_megatron_grpo.output.report.simulated_drafts import FILE

if TYPE_CHECKING:
    from swift_megatron_grpo.cli.simulate_drafts.dump import Dumped

LEAST_BAND = 8  # running requests up to which all share a row of the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of --rollout_dump, or the run's --output_dir")
    parser.add_argument(
        "--depths", nargs="+", type=_positive, default=[1, 2, 4, 8], help="drafts of a request; default: 1 2 4 8"
    )
    parser.add_argument("--rollouts", type=_positive, default=4, help="newest rollouts to replay; default: 4")
    parser.add_argument(
        "--running", type=_positive, help="most requests at one time; default: all of a rollout, as on one engine"
    )
    parser.add_argument(
        "--output_file",
        type=Path,
        help=f"also write the numbers to this file, as JSON; default for an --output_dir: its {FILE}, which its report "
        "shows",
    )


def run(options: argparse.Namespace) -> int:
    from swift_megatron_grpo.cli.simulate_drafts.dump import dump_of, read_dump

    folder = dump_of(options.run)
    dumped = read_dump(folder)
    newest = list(dumped)[-options.rollouts :]
    depths = sorted({0, *options.depths})
    tallies = {depth: replayed(dumped, newest, depth, options.running) for depth in depths}
    if not tallies[0]:
        raise Refused(f"nothing was sampled in {named(newest)} of {folder}; replay more --rollouts")
    print(f"{folder}: {named(newest)}, {described(dumped, newest)}\n")
    print("\n".join([*table(tallies), "", *table_by_running(tallies)]))
    target = options.output_file or (None if folder == options.run else options.run / FILE)
    if target is not None:
        target.write_text(json.dumps(numbers_of(tallies), indent=1) + "\n")
    return FINE


def replayed(
    dumped: Mapping[int, Sequence[Dumped]], newest: Sequence[int], depth: int, most_running: int | None
) -> dict[int, Tally]:
    """Return what the steps of the newest rollouts did, by the number of running requests."""
    sums: dict[int, Tally] = {}
    draws = [(number, draw.completions) for number, files in dumped.items() for draw in files]
    for place, (number, completions) in enumerate(draws):
        if number in newest:
            earlier = (completion for _, before in draws[:place] for completion in before)
            for running, tally in replay(completions, earlier, depth, most_running or len(completions)).items():
                sums[running] = sums.get(running, Tally()) + tally
    return sums


def named(rollouts: Sequence[int]) -> str:
    return f"rollout {rollouts[0]}" if len(rollouts) == 1 else f"rollouts {rollouts[0]} to {rollouts[-1]}"


def described(dumped: Mapping[int, Sequence[Dumped]], newest: Sequence[int]) -> str:
    """Return what is replayed, and how sure the policy was of its tokens: what drafts gain depends on it first."""
    draws = [draw for number in newest for draw in dumped[number]]
    prompts = {completion.prompt for draw in draws for completion in draw.completions}
    completions = [completion for files in dumped.values() for draw in files for completion in draw.completions]
    replayed = sum(len(draw.completions) for draw in draws)
    same = sum(completion.prompt in prompts for completion in completions) - replayed
    logprobs = [value for draw in draws for value in draw.logprobs]
    sure = f"{sum(logprobs) / len(logprobs):.2f}" if logprobs else "unknown"
    return (
        f"{replayed} completions of {len(prompts)} prompts, mean log-prob {sure}\n"
        f"drafts also come from {same} completions of these prompts in earlier rollouts"
    )


def table(tallies: Mapping[int, Mapping[int, Tally]]) -> Iterator[str]:
    """Yield the lines of the table by depth. `tallies`: by depth, then by the number of running requests."""
    yield "drafts  accepted a step  of the drafts  tokens a step   steps  saved"
    plain = total(tallies[0]).steps
    for depth, of_depth in tallies.items():
        sums = total(of_depth)
        share = f"{sums.accepted / sums.drafted:.0%}" if sums.drafted else "-"
        yield (
            f"{depth:6}  {sums.accepted / sums.requests:15.2f}  {share:>13}  {sums.tokens / sums.requests:13.2f}  "
            f"{sums.steps:6}  {1 - sums.steps / plain:5.0%}"
        )


def table_by_running(tallies: Mapping[int, Mapping[int, Tally]]) -> Iterator[str]:
    """Yield the lines of the table of tokens that a step adds to a request, by the number of running requests."""
    depths = [depth for depth in tallies if depth]
    yield "tokens that a step adds to a request, by the requests that are running"
    yield "running       steps without drafts" + "".join(f"{f'{depth} drafts':>12}" for depth in depths)
    bands = {depth: by_band(tallies[depth]) for depth in tallies}
    for band in sorted({band for of_depth in bands.values() for band in of_depth}):
        first = 1 if band == LEAST_BAND else band // 2 + 1
        cells = [bands[depth].get(band) for depth in depths]
        values = [f"{cell.tokens / cell.requests:.2f}" if cell else "-" for cell in cells]
        yield f"{f'{first} to {band}':14}{bands[0].get(band, Tally()).steps:20}" + "".join(f"{v:>12}" for v in values)


def by_band(tallies: Mapping[int, Tally]) -> dict[int, Tally]:
    """Sum over bands of running requests: up to 8, 9 to 16, 17 to 32 and so on. Keys are the upper ends."""
    bands: dict[int, Tally] = {}
    for running, tally in tallies.items():
        band = max(LEAST_BAND, 1 << (running - 1).bit_length())
        bands[band] = bands.get(band, Tally()) + tally
    return bands


def total(tallies: Mapping[int, Tally]) -> Tally:
    return sum(tallies.values(), start=Tally())


def numbers_of(tallies: Mapping[int, Mapping[int, Tally]]) -> list[dict[str, int]]:
    """Return what --output_file holds: an object for each depth and number of running requests."""
    return [
        {"depth": depth, "running": running, "steps": tally.steps, "requests": tally.requests,
         "tokens": tally.tokens, "drafted": tally.drafted, "accepted": tally.accepted}
        for depth, of_depth in tallies.items()
        for running, tally in sorted(of_depth.items(), reverse=True)
    ]  # fmt: skip


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
