"""The recipes of templates/recipe.sh, in the order of docs/recipes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SUMS = "sums and differences of two or three numbers with one or two digits"


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    task: str  # in words
    goal: str  # one or two sentences
    flags: str  # its own, in addition to those of every recipe
    gpus: int = 1
    merged: bool = False  # the adapter is also saved merged
    environment: bool = False  # several turns, with the calculator
    compared: str = ""  # another recipe with the same task
    reward: str = "reasoning_task"  # that is 1 or more for a right answer


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "full",
            "All weights",
            SUMS,
            "The model learns to end its answer with the right number.",
            "--tuner_type full --lr 1e-5",
        ),
        Recipe(
            "lora",
            "An adapter",
            SUMS,
            "The same task as that of `full`, with an adapter of rank 16 and a learning rate that is 20 times as high.",
            "--tuner_type lora --lora_rank 16 --lora_alpha 32 --lr 2e-4 --beta 0 --merge_lora true",
            merged=True,
            compared="full",
        ),
        Recipe(
            "servers",
            "A server that generates ahead of training",
            SUMS,
            "One GPU generates the next rollout while the other one trains on the last.",
            "--vllm_mode server --async_generate true --max_staleness 1",
            gpus=2,
            compared="full",
        ),
        Recipe(
            "tool",
            "Several turns with a tool",
            "sums and differences of two or three numbers with three or four digits",
            "The model learns to call a calculator, and to answer with its result.",
            "--gym_env calculator --max_turns 3 --train_iters 120 --eval_steps 40",
            environment=True,
        ),
        Recipe(
            "dynamic",
            "Dynamic sampling against collapse",
            SUMS,
            "A policy that gives all completions of a prompt the same reward learns nothing from it. Such groups are "
            "replaced, up to three times a step.",
            "--dynamic_sample true --max_resample_times 3",
            compared="full",
        ),
        Recipe(
            "boxed",
            "An answer in a format",
            "sums and differences of two or three digits, with the answer in `\\boxed{}`",
            "Four answered problems before each question show the format, so the first step has right answers to learn "
            "from. They give the result before the box. ms-swift's reward `accuracy` alone also accepts the question, "
            "`7 + 4 - 6`, in the box, because it evaluates it. "
            "[boxed_number.py](../../templates/plugins/boxed_number.py) shows it only a number.",
            "--reward_funcs boxed_number --external_plugins templates/plugins/boxed_number.py --max_length 512",
            reward="boxed_number",
        ),
        Recipe(
            "fp8",
            "Rollouts in FP8",
            SUMS,
            "vLLM generates with weights and activations in 8 bits, and a weight for each token corrects for it.",
            "--rollout_quantization fp8 --rollout_importance_sampling_mode token_truncate",
            compared="full",
        ),
        Recipe(
            "teacher",
            "A teacher in addition to rewards",
            SUMS,
            "A model that `full` has trained teaches the one before training. Time and cost are those of both runs.",
            "--teacher_model --teacher_kl_coef 1",
            compared="full",
        ),
    )
}


@dataclass(frozen=True)
class Wait:
    """A run of WAITING in which conversations wait for a tool or for each other."""

    says: str
    slow: bool = False  # the tool, by slow_calculator.py
    lockstep: bool = False  # by the package as it was before each conversation ran by itself


WAITING = "tool"
WAITS = {
    "lockstep": Wait("all conversations finish a turn before the next one (before)", lockstep=True),
    "slow": Wait("each conversation by itself, tool of 0.05 to 1 s", slow=True),
    "slow-lockstep": Wait("in lockstep (before), tool of 0.05 to 1 s", slow=True, lockstep=True),
}

NUMBER, WORD = "Answer with the number only.", "Answer with one word."
# Tasks to try with the recipe `lora`: name in reasoning_gym, settings, and what follows the question.
TRIES: dict[str, tuple[str, str, str]] = {
    "spelling": ("spell_backward", '{"min_word_len": 3, "max_word_len": 4}', WORD),
    "equations": ("simple_equations", '{"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20}', NUMBER),
    "products": ("products", '{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}', NUMBER),
    "letters": ("letter_counting", '{"min_words": 1, "max_words": 3}', NUMBER),
    "ransom": ("ransom_note", "{}", WORD),
    "isomorphic": ("isomorphic_strings", '{"min_string_length": 2, "max_string_length": 4}', WORD),
    "syllogism": ("syllogism", "{}", WORD),
}
TRIED_WITH = "lora"
