"""Other trainers, run on the workload of benchmarks/bench.py.

settings.py      what both have in common: names of settings, flags of `megatron rlhf`, the step
trl_settings.py  flags of TRL for a setting such as `mbs16+liger`, and for the flags of `megatron rlhf` with it
trl_arm.py       entry point of a measured process: `python -m benchmarks.peers.trl_arm FLAG...`
trl_trainer.py   GRPOTrainer with a clock and given completion lengths
verl_settings.py overrides of verl's configuration for a setting such as `mbs16+awake`
verl_arm.py      entry point of a measured process: `python -m benchmarks.peers.verl_arm FLAG... OVERRIDE...`
verl_shims.py    what verl needs to run next to another run and without flash-attn, in each of its processes
verl_sampler.py  verl's wait for completions, in short steps
verl_reward.py   the reward, as verl loads one
verl_results.py  steps from the metrics that verl logs
"""
