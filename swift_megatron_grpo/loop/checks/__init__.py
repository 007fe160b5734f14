"""Checks of the engine against the trainer, from log-probs and chosen experts.

canary.py         the fixed text whose log-probs the verification of a sync compares
logprob_check.py  compare the engine's log-probs of the first rollout, or of all, with the trainer's
sequences.py      refuse completions of several sequences where a setting needs one
experts.py        refuse experts that no router can have chosen; how often the trainer's routers and the engine's agree
"""
