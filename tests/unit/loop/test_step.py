"""A training step: what follows what, whose log-probs are the old ones, and what a checkpoint keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.loop.checks.sequences import SeveralSequences
from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.loop.training_batches import corrected_energies
from swift_megatron_grpo.output.recording.rows import Limits, no_images
from swift_megatron_grpo.output.recording.unfinished import UnfinishedRollout, read_unfinished, shared_settings
from swift_megatron_grpo.settings.chord import Chord
from swift_megatron_grpo.settings.distillation import Rlsd, Sdar
from swift_megatron_grpo.settings.losses import Correction, LossConfig
from swift_megatron_grpo.types import Prompt, Sample
from tests.fakes.generation import LOGPROB
from tests.fakes.runs import PROMPTS, ROWS, STEP, FakeRun, fake_run, kl_of, routing_of

BEFORE = -2.0  # log-prob of a token before the first update
LOSS = LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.2, beta=0.0)
SDAR = replace(LOSS, sdar=Sdar(sdar_loss_coef=0.1))


def loop_of(run: FakeRun, steps_done: int = 0, unfinished: UnfinishedRollout | None = None) -> GRPOLoop:
    return GRPOLoop(run.config, run.stages, None, steps_done, total_steps=100, unfinished=unfinished)


def train(run: FakeRun, steps: int) -> list[dict[str, float]]:
    loop = loop_of(run)
    return [loop.train_step() for _ in range(steps)]


def old_logprobs(samples: list[Sample]) -> list[list[float] | None]:
    return [sample.old_logprobs for sample in samples]


def test_the_stages_of_a_step_follow_each_other() -> None:
    run = fake_run()
    [metrics] = train(run, 1)
    arrive = ["grade", "grade", "engine sleeps", "policy reloads", "grade"]  # a group each; the last one frees the GPU
    assert run.events == ["sync 0", "generate", *arrive, "train"]
    phases = {"time/generation", "time/phase_switch", "time/grading", "time/train"}
    assert phases <= set(metrics) and metrics["reward"] > 0 and metrics["speed/train_tflop"] == 2
    assert [len(batch) for batch in run.policy.trained] == [6]


def test_every_rollout_is_generated_by_the_weights_of_the_step_before() -> None:
    run = fake_run(steps_per_generation=2)
    train(run, 6)
    assert run.engine.synced == [0, 2, 4]
    assert [len(batch) for batch in run.policy.trained] == [3] * 6


def test_the_only_step_of_a_rollout_needs_no_old_log_probs() -> None:
    run = fake_run()
    train(run, 2)
    assert "infer" not in run.events
    assert [old_logprobs(batch) for batch in run.policy.trained] == [[None] * 6] * 2


def test_later_steps_have_the_log_probs_of_before_the_first_update() -> None:
    run = fake_run(steps_per_generation=3)
    train(run, 3)
    assert run.events.count("infer") == 2 and run.events[-5:] == ["infer", "infer", "train", "train", "train"]
    first, *later = [old_logprobs(batch) for batch in run.policy.trained]
    assert first == [None] * 2 and later == [[[BEFORE]] * 2] * 2


def test_a_rollout_that_is_trained_twice_is_generated_once() -> None:
    run = fake_run(num_iterations=2)
    train(run, 3)
    assert run.engine.synced == [0, 2]
    first, again, new = run.policy.trained
    assert [sample.tokens for sample in again] == [sample.tokens for sample in first]
    assert (
        old_logprobs(first) == [None] * 6 and old_logprobs(again) == [[BEFORE]] * 6 and old_logprobs(new) == [None] * 6
    )


def test_old_log_probs_of_completions_by_older_weights_are_the_engines() -> None:
    run = fake_run(max_staleness=1)
    metrics = train(run, 3)
    assert [step["rollout/staleness"] for step in metrics] == [0, 1, 1]
    assert "infer" not in run.events
    assert [old_logprobs(batch) for batch in run.policy.trained] == [[None] * 6, [[LOGPROB]] * 6, [[LOGPROB]] * 6]


def test_old_log_probs_of_the_engine_take_the_place_of_every_pass() -> None:
    run = fake_run(steps_per_generation=3, loss=replace(LOSS, correction=Correction(old_logprobs="engine")))
    train(run, 6)
    assert "infer" not in run.events and all(run.engine.with_logprobs)
    assert [old_logprobs(batch) for batch in run.policy.trained] == [[[LOGPROB]] * 2] * 6


def test_with_a_rollout_correction_old_log_probs_are_the_trainers() -> None:
    corrected = replace(LOSS, correction=Correction(rollout_importance_sampling_mode="token_truncate"))
    run = fake_run(max_staleness=1, steps_per_generation=2, loss=corrected)
    train(run, 4)
    expected = [[None] * 3, [[BEFORE]] * 3, [None] * 3, [[BEFORE + 2 * STEP]] * 3]
    assert [old_logprobs(batch) for batch in run.policy.trained] == expected


def test_later_steps_replay_the_experts_of_the_pass_for_old_log_probs() -> None:
    run = fake_run(steps_per_generation=2, routing=routing_of("R2"))
    train(run, 2)
    assert run.events.count("infer and record") == 1 and "infer" not in run.events
    first, later = run.policy.trained
    assert all(sample.routed_experts is None for sample in first)
    assert all(np.array_equal(sample.routed_experts, np.ones((2, 1, 2))) for sample in later)  # type: ignore[arg-type]


def test_every_step_has_reference_log_probs() -> None:
    run = fake_run(steps_per_generation=2, loss=replace(LOSS, beta=0.1))
    train(run, 2)
    assert run.events.count("reference") == 2
    assert [[sample.ref_logprobs for sample in batch] for batch in run.policy.trained] == [[[-3.0]] * 3] * 2


def test_a_teacher_is_compared_with_the_policy_before_the_first_update() -> None:
    run = fake_run(steps_per_generation=2, teacher=-2.5)
    train(run, 2)
    assert run.events.count("infer") == run.events.count("teacher") == 2
    assert [[sample.teacher_ratios for sample in batch] for batch in run.policy.trained] == [[[-2.5 - BEFORE]] * 3] * 2
    assert [old_logprobs(batch) for batch in run.policy.trained] == [[None] * 3, [[BEFORE]] * 3]


def test_a_teacher_of_stale_completions_is_compared_with_the_trainer() -> None:
    run = fake_run(max_staleness=1, teacher=-2.5)
    train(run, 2)
    assert [old_logprobs(batch) for batch in run.policy.trained] == [[None] * 6, [[LOGPROB]] * 6]
    found = [[sample.teacher_ratios for sample in batch] for batch in run.policy.trained]
    assert found == [[[-2.5 - BEFORE]] * 6, [[-2.5 - BEFORE - STEP]] * 6]


def test_sdar_compares_the_teacher_without_a_pass_of_the_policy() -> None:
    run = fake_run(steps_per_generation=2, teacher=-2.5, loss=SDAR)
    train(run, 2)
    assert run.events.count("infer") == 1 and run.events.count("teacher") == 2
    found = [[(sample.teacher_ratios, sample.teacher_logprobs) for sample in batch] for batch in run.policy.trained]
    assert found == [[(None, [-2.5])] * 3] * 2


def test_the_weight_of_rlsd_changes_between_rollouts_alone() -> None:
    rlsd = Rlsd(advantage_reweight="rlsd", rlsd_lambda=0.8, rlsd_lambda_warmup_steps=4)
    run = fake_run(steps_per_generation=2, teacher=-2.5, loss=replace(LOSS, rlsd=rlsd))
    weights = [0.0, 0.0, 0.4, 0.4, 0.8, 0.8]
    assert [metrics["rlsd_lambda"] for metrics in train(run, 6)] == weights
    assert [loss.keywords["config"].rlsd.rlsd_lambda for loss in run.policy.losses] == weights


def test_tokens_have_baselines_of_the_policy_that_sampled_them() -> None:
    """Their passes precede the first update; completions of equal rewards have advantages of 0, up to 1e-8."""
    run = fake_run(steps_per_generation=3, estimator="optimal_token_baseline")
    train(run, 3)
    assert run.events[-9:] == ["infer"] * 3 + ["infer at 0.5"] * 3 + ["train"] * 3
    assert all(graded.advantage == graded.reward for graded in run.logged)
    found = [value for batch in run.policy.trained for s in batch for value in s.token_advantages or [1.0]]
    assert found == pytest.approx([0.0] * 6, abs=1e-6) and any(found)


def test_the_sequences_of_a_completion_are_one_path_of_tokens() -> None:
    """The second token of the first completion, in another sequence, has no other to be compared with."""
    run = fake_run(estimator="optimal_token_baseline")
    run.engine.earlier = 1
    train(run, 1)
    [batch] = run.policy.trained
    assert [sample.completion for sample in batch] == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    expected = [0.0, batch[1].advantage, 0.0] * PROMPTS
    assert batch[1].advantage > 0
    assert [value for s in batch for value in s.token_advantages or []] == pytest.approx(expected, abs=1e-6)


WEIGHTS = {  # of log rho 0.2, -0.4, 0.8 with a threshold of 1.5: of each token, or of their mean
    None: [1.0] * 3,
    "token_truncate": [math.exp(0.2), math.exp(-0.4), 1.5],
    "token_mask": [math.exp(0.2), math.exp(-0.4), 0.0],
    "sequence_truncate": [math.exp(0.2)] * 3,
    "sequence_mask": [math.exp(0.2), math.exp(-0.4), math.exp(0.8)],
}


@pytest.mark.parametrize("mode", WEIGHTS)
def test_a_rollout_correction_weights_the_energies_of_tokens(mode: Any) -> None:
    old = [-1.0, -2.0, -0.5]
    engine = [-1.2, -1.6, -1.3]
    sample = Sample([0] * 4, [False] + [True] * 3, 1.0, old_logprobs=old, rollout_logprobs=engine)
    correction = Correction(rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=1.5)
    sharper = [-1.5, -3.0, -0.7]
    plain = corrected_energies(replace(sample, rollout_logprobs=None), sharper, correction)
    expected = [energy * weight**2 for energy, weight in zip(plain, WEIGHTS[mode], strict=True)]
    assert corrected_energies(sample, sharper, correction).tolist() == pytest.approx(expected)
    dropped = replace(sample, old_logprobs=[], rollout_logprobs=[])
    assert corrected_energies(dropped, [], correction).tolist() == []


def test_a_kl_in_the_reward_is_not_part_of_the_loss() -> None:
    run = fake_run(loss=replace(LOSS, beta=0.1), kl=kl_of(in_reward=True))
    [metrics] = train(run, 1)
    assert metrics["kl"] == metrics["kl_per_token"] == pytest.approx(BEFORE + 3.0)
    assert [graded.reward for graded in run.logged] == pytest.approx(
        [graded.rewards[0] - 0.1 * (BEFORE + 3.0) for graded in run.logged]  # type: ignore[operator]
    )
    assert all(sample.ref_logprobs is None for sample in run.policy.trained[0])


def test_without_beta_there_is_no_kl_in_the_reward() -> None:
    """--advantage_estimator rloo has --kl_in_reward true by default, also with --beta 0."""
    run = fake_run(loss=LOSS, kl=kl_of(in_reward=True), estimator="rloo")
    [metrics] = train(run, 1)
    assert "kl" not in metrics and "infer" not in run.events and len(run.policy.trained) == 1


def test_completions_that_are_left_out_have_no_kl() -> None:
    """With --bad_reward drop."""
    run = fake_run(loss=replace(LOSS, beta=0.1), kl=kl_of(in_reward=True), dropped=1)
    [metrics] = train(run, 1)
    assert [graded.reward for graded in run.logged].count(None) == 1 and metrics["rewards/dropped"] == 1
    assert metrics["kl"] == metrics["kl_per_token"] == pytest.approx(BEFORE + 3.0)


def test_a_batch_has_all_sequences_of_its_completions() -> None:
    run = fake_run(steps_per_generation=3)  # a group of two completions in each step
    run.engine.earlier = 2
    metrics = train(run, 3)
    assert metrics[0]["num_sequences"] == 2 and metrics[0]["completions/mean_length"] == 2  # 3 and 1
    for number, batch in enumerate(run.policy.trained):
        assert [sample.completion - 2 * number for sample in batch] == [0, 0, 0, 1]
        assert len({sample.advantage for sample in batch[:3]}) == 1 and {sample.group for sample in batch} == {number}
        assert [sample.tokens[:2] for sample in batch[:3]] == [[1, 2], [1, 9], [1, 9]]  # in order


def test_the_kl_in_the_reward_is_that_of_all_sequences() -> None:
    run = fake_run(loss=replace(LOSS, beta=0.1), kl=kl_of(in_reward=True))
    run.engine.earlier = 2
    train(run, 1)
    gains = [graded.rewards[0] - graded.reward for graded in run.logged]  # type: ignore[operator]
    assert gains == pytest.approx([0.3 * (BEFORE + 3.0), 0.1 * (BEFORE + 3.0)] * 3)


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ({"loss": replace(LOSS, loss_type="vespo")}, "--loss_type vespo .* use another --loss_type"),
        ({"loss": replace(LOSS, loss_type="real")}, "--loss_type real .* use another --loss_type"),
        ({"routing": routing_of("R3")}, "--router_replay_mode R3 .* use R2 or disabled"),
        ({"chord": Chord(chord_sft_dataset=["answers.jsonl"])}, "--chord_sft_dataset .* remove it"),
    ],
)
def test_settings_for_one_sequence_refuse_several(setting: dict[str, Any], advice: str) -> None:
    run = fake_run(**setting)
    run.engine.earlier = 1
    with pytest.raises(SeveralSequences, match=f"6 completions have 9 training sequences, .* {advice}"):
        train(run, 1)


def test_an_adaptive_beta_follows_the_kl_of_each_step() -> None:
    run = fake_run(loss=replace(LOSS, beta=0.1), kl=kl_of(target=0.05, horizon=60))
    run.policy.kl, run.engine.earlier = 0.1, 1
    metrics = train(run, 3)  # the KL of 0.1 is above the target: the error is clipped to 0.2, for 6 of 60 completions
    assert [step["kl_beta"] for step in metrics] == pytest.approx([0.1, 0.1 * 1.02, 0.1 * 1.02**2])


def test_only_tokens_of_high_entropy_are_selected() -> None:
    run = fake_run(top_entropy_quantile=0.5)  # the entropy of a token is the number of its group: 0, 0, 1, 1, 2, 2
    [metrics] = train(run, 1)
    assert metrics["entropy/entropy_threshold"] == 1
    assert [sample.selected for sample in run.policy.trained[0]] == [[False]] * 2 + [[True]] * 4


def test_tokens_that_have_moved_too_far_are_masked_before_each_step() -> None:
    """Every token has the log-prob -1 in the engine, and -2 in the policy, to which a step adds 0.5."""
    masked = replace(LOSS, correction=Correction(m2_threshold=0.04))
    run = fake_run(steps_per_generation=3, loss=masked)
    metrics = train(run, 3)
    assert [step["m2/second_moment"] for step in metrics] == [1.0, 0.25, 0.0]
    assert [step["m2/masked_frac"] for step in metrics] == [1, 1, 0] and all(
        "time/log_ratios" in step for step in metrics
    )
    selected = [[sample.selected for sample in batch] for batch in run.policy.trained]
    assert selected == [[[False]] * 2, [[False]] * 2, [[True]] * 2]
    assert all(run.engine.with_logprobs)
    both = fake_run(loss=replace(LOSS, correction=Correction(m2_threshold=2.0)), top_entropy_quantile=0.5)
    assert train(both, 1)[0]["m2/masked_frac"] == 0 and both.events.count("infer") == 1  # one pass for both
    assert [sample.selected for sample in both.policy.trained[0]] == [[False]] * 2 + [[True]] * 4


def test_log_probs_are_compared_with_the_engines_once() -> None:
    run = fake_run(rounding=0.001)
    train(run, 3)
    assert run.events.count("compare log-probs") == 1
    drafted = fake_run(rounding=0.001, predicts_drafts=True, steps_per_generation=3)
    train(drafted, 9)
    assert drafted.events.count("compare log-probs") == 3  # in each rollout
    assert all(drafted.engine.with_logprobs)
    unchecked = fake_run(rounding=None)  # --sync_check off
    train(unchecked, 1)
    assert "compare log-probs" not in unchecked.events


def test_a_run_that_only_generates_trains_nothing() -> None:
    run = fake_run()
    loop = loop_of(run)
    metrics = [loop.generate_only() for _ in range(2)]
    assert "train" not in run.events and run.engine.synced[0] == 0 and len(run.logged) == 12
    ids = [graded.rollout.prompt.prompt_id for graded in run.logged]
    assert ids[:6] != ids[6:] and all(step["reward"] > 0 and "loss" not in step for step in metrics)


def test_an_evaluation_trains_and_logs_nothing() -> None:
    run = fake_run()
    graded, metrics = loop_of(run).evaluate([Prompt("validation", ROWS[0])])
    assert [completion.reward for completion in graded] == [10.0] * 4  # the length of the prompt's id
    assert "train" not in run.events and not run.logged and set(metrics) >= {"time/generation", "time/grading"}


# ---- checkpoints


def saved(loop: GRPOLoop, run: FakeRun, folder: Path, rollouts_done: int = 0) -> UnfinishedRollout | None:
    """Save as a checkpoint does, and read what a resumed run continues."""
    loop.save(str(folder))
    source = PromptSource(ROWS, seed=1, shuffle=True)
    prompts = {prompt.prompt_id: prompt for prompt in source.take(8 * PROMPTS)}
    settings = shared_settings(run.config)
    return read_unfinished(folder, rollouts_done, settings, prompts.__getitem__, Limits(99, 1), no_images)


@pytest.mark.parametrize(
    ("iterations", "options", "earlier"),
    [
        (1, {}, 0), (2, {}, 1), (1, {"teacher": -2.5}, 2), (2, {"teacher": -2.5}, 0),
        (2, {"teacher": -2.5, "loss": SDAR}, 1), (2, {"estimator": "optimal_token_baseline"}, 1),
    ],
)  # fmt: skip
def test_a_run_that_resumes_between_two_steps_of_a_rollout_trains_the_same(
    tmp_path: Path, iterations: int, options: dict[str, Any], earlier: int
) -> None:
    whole = fake_run(steps_per_generation=2, num_iterations=iterations, **options)
    whole.engine.earlier = earlier
    loop = loop_of(whole)
    loop.train_step()
    unfinished = saved(loop, whole, tmp_path)
    for _ in range(2 * iterations):
        loop.train_step()

    resumed = fake_run(steps_per_generation=2, num_iterations=iterations, **options)
    resumed.engine.earlier = earlier
    again = loop_of(resumed, steps_done=1, unfinished=unfinished)
    resumed.policy.parameter += STEP
    for _ in range(2 * iterations):
        again.train_step()
    assert resumed.policy.trained == whole.policy.trained[1:]
    assert resumed.engine.synced == [2 * iterations]  # only the next rollout is generated


def moving_run() -> FakeRun:
    """Return a run whose reference moves after every step (--sync_ref_model)."""
    run = fake_run(steps_per_generation=3, loss=replace(LOSS, beta=0.1))
    reference: Any = run.stages.reference

    def after_step(_: int) -> None:
        reference.logprob += 0.25

    moving = SimpleNamespace(after_step=after_step, save=lambda folder: None)
    run.stages = replace(run.stages, moving_reference=moving)  # type: ignore[arg-type]
    return run


def test_a_rollout_that_is_continued_has_the_reference_of_its_start(tmp_path: Path) -> None:
    whole = moving_run()
    loop = loop_of(whole)
    loop.train_step()
    unfinished = saved(loop, whole, tmp_path)
    for _ in range(3):
        loop.train_step()

    resumed = moving_run()
    again = loop_of(resumed, steps_done=1, unfinished=unfinished)
    resumed.policy.parameter += STEP
    resumed.stages.reference.logprob += 0.25  # type: ignore[union-attr]
    for _ in range(3):
        again.train_step()
    assert resumed.policy.trained == whole.policy.trained[1:]


def test_between_two_rollouts_a_checkpoint_keeps_none(tmp_path: Path) -> None:
    run = fake_run(steps_per_generation=2)
    loop = loop_of(run)
    loop.train_step()
    assert saved(loop, run, tmp_path) is not None
    loop.train_step()
    assert saved(loop, run, tmp_path, rollouts_done=1) is None


def test_recorded_experts_are_not_saved_so_the_rollout_is_generated_again(tmp_path: Path) -> None:
    run = fake_run(steps_per_generation=2, routing=routing_of("R2"))
    loop = loop_of(run)
    loop.train_step()
    assert saved(loop, run, tmp_path) is None


def test_a_step_that_fails_leaves_the_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    run = fake_run(steps_per_generation=2)
    loop = loop_of(run)
    loop.train_step()
    run.policy.train_step = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        loop.train_step()
    unfinished = saved(loop, run, tmp_path)
    assert unfinished is not None and old_logprobs_by_half(unfinished) == ([None] * 3, [[BEFORE]] * 3)


def old_logprobs_by_half(unfinished: UnfinishedRollout) -> tuple[list[object], list[object]]:
    return list(unfinished.old_logprobs[:3]), list(unfinished.old_logprobs[3:])


def test_an_adapted_beta_is_saved(tmp_path: Path) -> None:
    run = fake_run(loss=replace(LOSS, beta=0.1), kl=kl_of(target=0.05, horizon=60))
    run.policy.kl = 0.1
    loop = loop_of(run)
    loop.train_step()
    loop.save(str(tmp_path))
    again = loop_of(run)
    again.kl_controller.restore([str(tmp_path)])
    assert again.kl_controller.value == pytest.approx(0.1 * 1.02)
