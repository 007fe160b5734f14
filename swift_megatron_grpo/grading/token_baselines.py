"""The optimal token baseline, https://arxiv.org/abs/2602.07078: pure functions in fp64."""

from collections.abc import Sequence

import numpy as np

_EPSILON = 1e-8  # the authors'


def energies(logprobs: Sequence[float], sharper: Sequence[float]) -> np.ndarray:
    """Return |onehot - pi|^2 = 1 - 2 pi(t) + sum_v pi(v)^2 of each token t: what its gradient by the logits measures.

    `sharper`: log-probs at half the temperature, where the policy is pi^2 / sum_v pi(v)^2. They give the sum without
    the probabilities of other tokens.
    """
    of_policy = np.asarray(logprobs, np.float64)
    energy: np.ndarray = 1 - 2 * np.exp(of_policy) + np.exp(2 * of_policy - np.asarray(sharper, np.float64))
    return energy


def token_advantages(rewards: Sequence[float], energies: Sequence[np.ndarray]) -> list[list[float]]:
    """Return the reward of each of a prompt's completions minus the baseline of every token:

        B_t = sum_i R_i W_it / sum_i W_it,    W_it = sum_{j <= t} energy_ij

    summed over the completions that have t tokens. Where only one has as many, B_t is 0, as in verl.
    """
    lengths = [len(of_completion) for of_completion in energies]
    shared = sorted(lengths)[-2] if len(lengths) > 1 else 0  # tokens that can be compared
    weighted, total = np.zeros(shared), np.full(shared, _EPSILON)
    for reward, of_completion in zip(rewards, energies, strict=True):
        weights = np.cumsum(of_completion)[:shared]
        weighted[: len(weights)] += reward * weights
        total[: len(weights)] += weights
    baseline = np.zeros(max(lengths, default=0))
    baseline[:shared] = weighted / total
    return [(reward - baseline[:length]).tolist() for reward, length in zip(rewards, lengths, strict=True)]
