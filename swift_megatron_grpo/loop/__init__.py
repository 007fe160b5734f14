"""The training loop: one optimizer step, from prompts to the update. The only folder that imports all stages.

step.py             one step, top to bottom: start reading here
step_context.py     the step in progress: its metrics, and the time and memory of each phase
rollouts.py         its first half, from prompts to graded completions; all ranks call the reward functions
rollout_queue.py    generations: what has started, also ahead of training, and what has arrived
finished.py         completions by the index of their request, as they finish, and with their scores
run_ahead.py        which rollouts may start ahead of training, and how stale they would be
spare_groups.py     how many groups are generated with a rollout in case its own have equal rewards (--spare_groups)
weight_sync.py      sends weights to the engine and verifies that it runs them
training_batches.py its second half: the batches of a rollout, with old and reference log-probs, also from a checkpoint
bodies.py           the tokens of completions, on the rank that has them until another one grades or trains them
samples.py          graded completions as training samples, with the images of their prompts and the trained tokens
checks/             compare the engine with the trainer
evaluation.py       evaluates the validation datasets: rewards, pass@k, maj@k
stages.py           the stages of a run as one dataclass
assemble.py         builds the stages from the configuration and the loaded models
trace.py            phases of all ranks and requests of servers on one time line (--trace_steps)
completion_log.py   writes completions to completions.jsonl, wandb and swanlab
served_teacher.py   the log-probs of a teacher behind a server, on all ranks

Tests: tests/unit/loop; tests/e2e/test_sync_check.py for the weight sync.
"""
