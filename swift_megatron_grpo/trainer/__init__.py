"""The trainer that ms-swift builds in place of its own.

grpo_trainer.py      MegatronGRPOTrainer: load the models, hand every step to loop/
start.py             before the model loads: check checkpoints, reach servers, make settings

Tests: tests/unit/trainer, tests/e2e.
"""
