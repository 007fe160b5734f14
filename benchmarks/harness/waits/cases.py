"""The cases of benchmarks.bench_waits: what is compared, and with which model. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.harness.learning.settings import Settings

TURNS = 4  # of every conversation


@dataclass(frozen=True)
class Variant:
    """One way to run a case."""

    name: str
    says: str  # on the page
    flags: str = ""
    arm: str = "ours"
    over: str = ""  # the variant that its speed is compared with
    old: bool = False  # by the checkout of --old
    rollout: int = 1  # steps that are trained on it (--steps_per_generation)


@dataclass(frozen=True)
class Remedy:
    variants: tuple[Variant, ...]
    common: str = ""  # flags of all variants but TRL's
    goal: float | None = None
    served: bool = False  # one GPU trains, and a server on another one generates
    turns: int = 1


@dataclass(frozen=True)
class Model:
    says: str
    settings: Settings
    shape: str = ""  # of a model with random weights, in benchmarks/harness/shapes.py; empty: a released model
    lengths: str = ""  # of completions of random weights


@dataclass(frozen=True)
class Case:
    """A remedy with a model. Of `steps`, the first and the last are not counted: warm-up, and a server without work."""

    remedy: str
    model: str
    steps: int
    warm_up: int
    cool_down: int = 0
    tokens: int | None = None  # of a completion at most; None: those of the model
    lengths: str = ""  # of random weights; empty: those of the model


MS_SWIFT = Variant("ms-swift", "ms-swift's trainer", arm="stock")
REMEDIES = {
    "spare": Remedy(
        (
            Variant("draws", "`--dynamic_sample true`, a quarter of the groups uniform", "--spare_groups 0"),
            Variant("spare", "the same, with `--spare_groups auto`", "--spare_groups auto", over="draws"),
            replace(MS_SWIFT, says="the same without spare groups, ms-swift's trainer"),
        ),
        common="--dynamic_sample true --max_resample_times 3",
        goal=1.25,
    ),
    "steps": Remedy(
        (
            Variant("one", "`--steps_per_generation 1`", "--steps_per_generation 1"),
            *(
                Variant(
                    name,
                    f"`--steps_per_generation {steps}` `--old_logprobs engine`",
                    f"--steps_per_generation {steps} --old_logprobs engine",
                    over="one",
                    rollout=steps,
                )
                for name, steps in (("two", 2), ("four", 4))
            ),
            MS_SWIFT,
            Variant("trl", "TRL", arm="trl"),
        )
    ),
    "turns": Remedy(
        (
            Variant("lockstep", "4 turns, tool without waits, in lockstep (before)", "--gym_env answers", old=True),
            Variant("free", "the same, each conversation by itself", "--gym_env answers", over="lockstep"),
            Variant("lockstep-slow", "4 turns, tool of 0.05 to 1 s, in lockstep (before)",
                    "--gym_env answers_slowly", old=True),
            Variant("free-slow", "the same, each conversation by itself", "--gym_env answers_slowly",
                    over="lockstep-slow"),
        ),
        common=f"--multi_turn_scheduler gym_scheduler --max_turns {TURNS}",
        goal=1.4,
        turns=TURNS,
    ),
    "flight": Remedy(
        (
            Variant("ahead", "`--max_staleness 2`", "--max_staleness 2"),
            Variant("flight", "`--max_staleness 2` `--in_flight_weight_updates true`",
                    "--max_staleness 2 --in_flight_weight_updates true", over="ahead"),
            Variant("one-ahead", "`--max_staleness 1`", "--max_staleness 1"),
        ),
        common="--async_generate true",
        goal=1.1,
        served=True,
    ),
}  # fmt: skip
MODELS = {
    # What SmolLM2 answers before training, where nothing cuts it short: most end early, some fill the limit.
    "smollm2": Model("SmolLM2", Settings(completion_tokens=512, learning_rate=1e-6)),
    "8b": Model(
        "8B",
        Settings(completions=64, prompt_tokens=256, completion_tokens=4096, learning_rate=1e-6),
        shape="8b",
        lengths="lognormal:700:0.9:4096",
    ),
}
CASES = {
    f"{case.remedy}-{case.model}": case
    for case in (
        Case("spare", "smollm2", steps=40, warm_up=8),
        Case("steps", "smollm2", steps=40, warm_up=8),
        Case("turns", "smollm2", steps=20, warm_up=4, tokens=256),
        Case("flight", "smollm2", steps=48, warm_up=8, cool_down=4),
        Case("spare", "8b", steps=5, warm_up=2),
        Case("steps", "8b", steps=8, warm_up=4),
        Case("turns", "8b", steps=3, warm_up=1, tokens=1024, lengths="lognormal:200:0.9:1024"),
        Case("flight", "8b", steps=14, warm_up=5, cool_down=2),
    )
}
PEER_STEPS = 16  # of the other trainers, whose steps take several times as long
CURVES = ("spare", "flight")  # whose learning is compared with that of the synchronous run; by their variants' names


def settings_of(case: Case) -> Settings:
    """Return the sizes of a step; nothing is saved."""
    settings = MODELS[case.model].settings
    tokens = case.tokens or settings.completion_tokens
    return replace(settings, steps=case.steps, save_every=10 * case.steps, warm_up=1, completion_tokens=tokens)


def small(case: Case) -> Case:
    """Return the case of a dry run, which counts one rollout of four steps or as many as are needed for a mean."""
    warm_up, cool_down = 4 if case.remedy == "steps" else 1, min(case.cool_down, 1)
    steps = warm_up + cool_down + (4 if case.remedy == "steps" else 2)
    return replace(case, steps=steps, warm_up=warm_up, cool_down=cool_down, tokens=16, lengths="lognormal:8:0.9:16")


def variants_of(case: Case) -> tuple[Variant, ...]:
    """Return the variants that are measured; trainers of others cannot give random weights their lengths here."""
    variants = REMEDIES[case.remedy].variants
    return tuple(variant for variant in variants if variant.arm == "ours" or not MODELS[case.model].shape)


def steps_of(case: Case, variant: Variant) -> int:
    return case.steps if variant.arm == "ours" else min(case.steps, PEER_STEPS)
