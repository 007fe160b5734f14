"""Grading: from completions to rewards, and from rewards to advantages.

rewards.py     calls the reward functions, with timeouts, and validates what they return
reward_servers.py  scores of classifiers and judges over HTTP
scores.py      their scores of all completions, as an array, and its weighted sums
columns.py     rewards as arrays, with means and spreads of groups, in fp64
graded.py      graded completions as arrays, and objects of those that are read
results.py     from scores to total rewards, KL in the reward, advantages
resampling.py  dynamic sampling: replaces groups of equal rewards
metrics.py     reward metrics
advantages.py  advantage estimators (GRPO, RLOO, REINFORCE++, GDPO)
tries.py       pass@k and maj@k of evaluations, and the answers that completions give
token_baselines.py  the optimal token baseline, on plain floats, in fp64

Every rank calls the reward functions on its share of the completions. Advantages need whole groups.
Tests: tests/unit/grading.
"""
