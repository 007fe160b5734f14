"""Measurements of this package, most of them against ms-swift's own Megatron GRPO trainer.

bench.py                    train phase or whole step of both trainers; `report` writes docs/performance.md
bench_h200.sh               all runs of bench.py on H200
bench_lanes.sh              groups of bench_h200.sh side by side, so that no GPU waits for a start
eight.py                    one node of eight GPUs, or four or two: cases, forecasts and their comparison
bench_head.py               time and memory of the output layer with its log-probs
bench_experts.py            the experts of one layer: Transformer Engine's products, and one kernel for all experts
bench_dispatch.py           tokens on their way to the experts of other GPUs and back, without the experts
bench_server.py             generation behind a rollout server and in the training process, in turns on one device
bench_gateways.py           weights to servers from one machine and from two, over links of limited speed
bench_generation.py         generation with other settings of vLLM: quantized weights, prefix caching, cascade
bench_switches.py           time between training and generation: offload, wake-up, weight sync
bench_short_steps.py        steps of a small released model with several checkouts in turns, by phase
long_run.py                 thousands of steps of a small released model in one run: what drifts
learn.py                    the same task in four trainers: reward, held-out accuracy and seconds over steps
learn_chain.sh              all runs of learn.py in one rental of GPUs
recipes.py                  recipes of templates/recipe.sh: accuracy, completions and GPU hours, for docs/recipes
recipes_chain.sh            all runs of recipes.py in one rental of GPUs
bench_waits.py              rollouts with and without what keeps them from waiting, for docs/async.md
waits_chain.sh              all runs of bench_waits.py in one or two rentals of GPUs
two_stacks.py               whole steps with two stacks (torch, vLLM) on one machine, for docs/versions.md
two_stacks_chain.sh         all runs of two_stacks.py, in turns
drafts.py                   training and generation with drafts and without, for docs/speculation.md
drafts_chain.sh             all runs of drafts.py in one rental of GPUs
gpu_tests.py                tests of tests/gpu, with a record of what ran where
simulate_scaling.py         balance, messages and gradients of up to 4,096 ranks, for docs/scaling.md
simulate_split.py           the share of GPUs for servers, against colocation, for docs/async.md
simulate_tail.py            idle slots of a server at the end of rollouts, for docs/async.md
random_routers.py           loads of experts whose routers have random weights
train_every_algorithm.py    reward before and after training with every loss and advantage estimator
harness/                    implementation of bench.py
experts/                    implementation of bench_experts.py
cpu/, h200/                 results of bench.py, one JSON file for each run

tests/unit/benchmarks covers bench.py, tests/e2e/test_bench.py runs it.
"""
