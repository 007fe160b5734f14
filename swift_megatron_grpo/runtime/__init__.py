"""The processes of a run: positions of ranks, failures, deadlines, signals, imports.

parallel.py      this rank's position in the layout, and the exchange of Python objects between ranks
failures.py      errors that every rank raises together, and the protocol of their exchange
refusals.py      a refused run ends with one message, which torchrun prints
machines.py      the torchruns of a run tell each other that they live
http.py          requests to servers: kinds of failures, limits, new tries
event_loops.py   a task of a user's code that calls sys.exit() fails, and its event loop continues
open_files.py    the limit on open files of a process
import_hooks.py  run a function before or after a later import
replaced.py      replace an attribute inside a context
gpus.py          memory and speed of known GPUs
deadlines/       end a run in which a phase or a reward function takes too long
stopping/        end a run on SIGTERM or SIGINT, after the current step and with a checkpoint
"""
