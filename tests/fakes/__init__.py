"""Stand-ins for the parts of a run that need several processes, a model or vLLM. They compute and remember, no mocks.

ranks.py       the exchange of values between ranks, with one rank
generation.py  an engine that generates one group per call, and its weight sync
runs.py        the configuration and the stages of a run on one rank, with a policy of one parameter
"""
