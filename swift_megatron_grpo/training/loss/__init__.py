"""The losses by name.

A loss receives one micro batch and returns (loss, metrics). Both are the micro batch's share of a value of the whole
optimizer step: shares of all micro batches and ranks add up, so neither depends on how samples were packed or assigned
to ranks. MegatronEngine reduces metrics whose name ends in _max or _min by that function instead. Losses run no host
sync and no collective. m: trained tokens of the micro batch, s: its sequences.

    total.py       policy loss + beta * KL - entropy_coef * entropy + SDAR; LOSSES by --loss_type
    terms.py       inputs of every loss: log-probs, ratios, advantages, packed tokens as rows of sequences
    teaching.py    advantages of tokens with a teacher: OPD, RLSD
    policies.py    policy losses: clipped, CISPO, SAPO, VESPO, DPPO, FIPO, REAL
    kl.py          KL estimators, the KL of completions, and beta, fixed or adaptive
    chord.py       the loss of completions and of given answers in one step
    correction.py  rollout correction: importance weights, masks, metrics
    averages.py    token values to the micro batch's share of the step
    plugins.py     losses and metrics of --external_plugins
"""

from swift_megatron_grpo.training.loss.chord import with_answers
from swift_megatron_grpo.training.loss.correction import effective_sample_size
from swift_megatron_grpo.training.loss.terms import Metrics, TokenOutput
from swift_megatron_grpo.training.loss.total import LOSSES, LossFunction, make_loss, reads_entropy

__all__ = [
    "LOSSES",
    "LossFunction",
    "Metrics",
    "TokenOutput",
    "effective_sample_size",
    "make_loss",
    "reads_entropy",
    "with_answers",
]
