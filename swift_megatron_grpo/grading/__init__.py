"""Grading: from completions to rewards, and from rewards to advantages.

rewards.py     calls the reward functions, with timeouts, and validates what they return
results.py     computes total rewards, advantages and reward metrics, and subtracts KL from the reward
advantages.py  advantage estimators (GRPO, RLOO, REINFORCE++, GDPO) on plain floats, in fp64
tries.py       pass@k and maj@k of evaluations, and the answers that completions give
filters.py     dynamic sampling: replaces groups of equal rewards

Every rank calls the reward functions on its share of the completions. Advantages need whole groups.
Tests: tests/unit/grading.
"""
