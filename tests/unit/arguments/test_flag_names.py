"""Names of ms-swift 3 and misspelt flags are refused in one error, with the name that works."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.arguments.command_line import RENAMED, check_typed, known_flags


def refuse(*command_line: str) -> list[str]:
    with pytest.raises(ValueError) as caught:
        check_typed(command_line)
    return str(caught.value).splitlines()


def test_every_flag_of_ms_swift_3_gets_its_name_of_ms_swift_4_at_once() -> None:
    lines = refuse("--train_type", "lora", "--max-epochs=2", "--save", "out", "--lr", "1", "--num_layers", "2",
                   "--log_throughput", "true", "--distributed_timeout_minutes", "10")  # fmt: skip
    assert lines == [
        "--train_type is a flag of ms-swift 3; use --tuner_type",
        "--max_epochs is a flag of ms-swift 3; use --num_train_epochs",
        "--save is a flag of ms-swift 3; use --output_dir",
        "--num_layers is a flag of ms-swift 3; leave it out, because the model's config.json has the value",
        "--log_throughput is a flag of ms-swift 3; leave it out, because there is nothing to set any more",
        "--distributed_timeout_minutes is a flag of ms-swift 3; use --ddp_timeout, in seconds",
    ]


def test_new_names_are_flags_and_old_ones_are_not() -> None:
    known = known_flags()
    assert set(RENAMED.values()) <= known
    assert not set(RENAMED) & known


def test_misspelt_flags_get_the_nearest_names() -> None:
    assert refuse("--max_completion_lenght", "8", "--qwertz", "1") == [
        "--max_completion_lenght is not a flag; did you mean --max_completion_length?",
        "--qwertz is not a flag; leave it out",
    ]


def test_what_the_parser_accepts_is_accepted() -> None:
    """Abbreviations, dashes, negations, and values that look like flags but have a space."""
    check_typed(
        ["--help", "--temperat", "1", "--max-turns=3", "--no_use_vllm", "--system", "-- be brief", "x", "--top_k", "-1"]
    )


def test_numbers_must_be_finite() -> None:
    assert refuse("--delta", "nan", "--entropy_coef", "nan", "--moe_aux_loss_coeff", "0", "inf") == [
        "--delta nan is not a finite number; leave it out",
        "--entropy_coef nan is not a finite number; use --entropy_coef 0.0",
        "--moe_aux_loss_coeff inf is not a finite number; leave it out",
    ]


def test_one_dash_is_refused_with_two_and_negative_exponents_with_a_value() -> None:
    assert refuse("--train_iters", "5", "-lr", "5e-3") == ["-lr is not a flag; use --lr"]
    assert refuse("--lr", "-1e-3") == ["--lr -1e-3 must be above 0 and at most 10000; use --lr 1e-06"]
    assert refuse("--eval_correct_from", "-1e-3") == [
        "--eval_correct_from -1e-3: the parser reads -1e-3 as a flag; use --eval_correct_from=-1e-3"
    ]
    check_typed(["--eval_correct_from=-1e-3", "--top_k", "-1", "-h", "--eval_correct_from", "-.5"])


@pytest.mark.parametrize("ignoring", [["--ignore_args_error", "true"], ["--ignore-args-error=yes"]])
def test_old_and_ambiguous_names_are_refused_even_with_ignore_args_error(ignoring: list[str]) -> None:
    check_typed([*ignoring, "--qwertz", "1", "--learning_rate", "1"])
    assert refuse(*ignoring, "--qwertz", "1", "--save", "out", "--vllm_server", "x")[0] == (
        "--save is a flag of ms-swift 3; use --output_dir"
    )
    assert "--vllm_server is not a flag; did you mean" in refuse(*ignoring, "--vllm_server", "x")[0]
    assert refuse("--ignore_args_error", "false", "--qwertz", "1") == ["--qwertz is not a flag; leave it out"]
    assert refuse("--max_prompt_length", "1") == [
        "--max_prompt_length is not a flag of Megatron runs; use --max_length, in tokens"
    ]
