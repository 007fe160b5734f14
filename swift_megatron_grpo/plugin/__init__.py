"""Activate this package inside ms-swift. Imports nothing: torch imports this folder in every process.

autoload.py      entry point that torch calls at the end of `import torch`
command_line.py  classify a process by its command line; move the API key from it to the environment
activation.py    hook later imports, or replace the process, also where a script would start another
rank.py          prepare a rank, or a process that ranks are forked from
torchrun.py      torchrun passes signals on, lets its ranks stop, and forks them where there is no GPU
meeting.py       torchrun names machines that do not begin
lost_machine.py  end the ranks of this machine, with a line, once another machine is lost
register.py      replace ms-swift's Megatron GRPO trainer and its arguments class

Tested by tests/unit/plugin.
"""
