"""Grading: from completions to rewards, and from rewards to advantages.

rewards.py     calls the reward functions, with timeouts, and validates what they return
reward_servers.py  scores of classifiers and judges over HTTP
results.py     total rewards, KL in the reward, dynamic sampling, advantages, reward metrics
advantages.py  advantage estimators (GRPO, RLOO, REINFORCE++, GDPO) on plain floats, in fp64
tries.py       pass@k and maj@k of evaluations, and the answers that completions give
token_baselines.py  the optimal token baseline, on plain floats, in fp64

Every rank calls the reward functions on its share of the completions. Advantages need whole groups.
Tests: tests/unit/grading.
"""
