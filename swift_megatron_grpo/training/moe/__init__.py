"""Experts: dispatch, grouped products, and routing that is given or recorded.

grouped_experts.py   one kernel per product for all experts of a layer
row_dispatch.py      send a token's row once to each rank that has some of its experts
weighted_swiglu.py   SwiGLU of experts, weighted by probabilities, as Triton kernels
router_replay.py     routers that weigh given experts instead of choosing, and record what they choose
"""
