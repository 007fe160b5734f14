"""Other trainers, run on the workload of benchmarks/bench.py.

trl_settings.py  flags of TRL for a setting such as `mbs16+liger`, and for the flags of `megatron rlhf` beside it
trl_arm.py       entry point of a measured process: `python -m benchmarks.peers.trl_arm FLAG...`
trl_trainer.py   GRPOTrainer with a clock and given completion lengths
"""
