"""The flags of every stage, each described once: its type, range, help and rules stand in the class of its stage.

flag.py          describe a flag, and the one function that checks all of them
groups.py        all of these classes
config.py        settings that the stages take
modules.py       names of the modules that Megatron builds, and whether flags name them
layout.py        facts that rules may know beyond the flags: the parallel sizes, the model, the images
parallel.py      the flags of the layout, and whether the model can be divided by it
batches.py       batch sizes, the nearest ones that fit together, and micro batches
trained.py       trained weights, precision, recomputation, kernels
adapter.py       the adapter, and what weight syncs send and verify
reference.py     the reference policy and its layout
positions.py     scaled rotary positions
images.py        trained parts of a model with images
routing.py       router replay
sampling.py      sampling in training and in evaluation, lengths
servers.py       vLLM here or behind servers
speculation.py   drafts that vLLM verifies
asynchronous.py  generation ahead of training
rewards.py       weights of rewards, and who grades
reward_models.py  models that grade
algorithm.py     advantages, KL in the reward, dynamic sampling
losses.py        the loss and its parts: SAPO, FIPO, rollout correction, KL
optimizer.py     learning rate, weight decay, optimizer
muon.py          the optimizer of matrices
recording.py     rollouts on disk
time_limits.py   time limits, traced steps
run.py           duration, checkpoints, data, a check without training
teacher.py       the teacher of on-policy distillation
distillation.py  other uses of its log-probs: RLSD, SDAR
chord.py         CHORD: answers that are trained in the same steps

To add a flag, add a field to the class of the stage that reads it. Nothing else lists it.
"""
