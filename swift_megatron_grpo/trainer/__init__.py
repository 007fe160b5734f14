"""The trainer that ms-swift builds in place of its own.

grpo_trainer.py      MegatronGRPOTrainer: load the models, hand every step to loop/
reward_models.py     load reward models of the ranks
start.py             before the model loads: check checkpoints, reach servers, make settings

Tests: tests/unit/trainer, tests/e2e.
"""
