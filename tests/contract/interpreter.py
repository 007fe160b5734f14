"""Runs code in a fresh interpreter, in which ms-swift, Megatron and vLLM can be imported.

On a machine without CUDA these packages import only under the CPU platform, which changes the whole process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

PREAMBLE = """
import inspect, json, sys
import torch
if not torch.cuda.is_available():
    from swift_megatron_grpo.platforms.cpu import activate
    activate()

def parameters(function):
    return list(inspect.signature(function).parameters)

def source(function):
    return inspect.getsource(function)
"""


def result_of(code: str) -> Any:
    """Run the code after PREAMBLE and return what it assigns to `result`, through JSON."""
    program = PREAMBLE + textwrap.dedent(code) + "\nprint('RESULT ' + json.dumps(result))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])
