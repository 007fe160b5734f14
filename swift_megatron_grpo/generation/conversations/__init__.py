"""Multi-turn conversations: the parts shared by vLLM in the training processes and by the rollout server.

checks.py      validates the multi-turn flags and names in ms-swift's registries, with suggestions
blocking.py    runs tools that block in threads
running.py     runs conversations with a scheduler, records their turns, ends those that outgrow the engine
groups.py      schedulers that answer all completions of a prompt, and the turns of each
turns.py       joins the turns of a conversation into one token sequence
agents.py      conversations of agents, which call the policy at an address as they would call OpenAI's
agent_flag.py  the agent of --agent: a coroutine of a file, or a command
programs.py    runs a program in a process group of its own
first_program.py  prepares such a process, also as a sandbox, and becomes the program
sandbox.py     runs code that the policy writes, without network and with limits
chat.py        OpenAI's chat completions: what an agent may ask, and the answer in JSON
anthropic_chat.py  Anthropic's messages, as chat completions and back
proxy.py       the address: an HTTP server of this machine alone, in a thread of its own
"""
