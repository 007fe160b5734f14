"""The trainer that ms-swift builds in place of its own.

grpo_trainer.py      MegatronGRPOTrainer: load the models, hand every step to loop/
run_checkpoints.py   the checkpoints of a run: check those that it loads, make the writer of new ones
frozen_reference.py  load the frozen copy that is the reference policy

Tests: tests/unit/trainer, tests/e2e.
"""
