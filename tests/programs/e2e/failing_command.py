"""A command as an agent, without packages: it fails in the way of its row, which it reads from its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request

row = json.load(sys.stdin)
call = urllib.request.Request(
    f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages",
    json.dumps({"model": "policy", "max_tokens": 8, "messages": row["messages"][-1:]}).encode(),
    {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(call) as response:
    answer = json.load(response)
if row["way"] == "killed":
    os.kill(os.getpid(), 9)
if row["way"] == "hangs":
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
print("It answers:", answer["content"][0]["type"])
print("good" if row["way"] == "nonsense" else answer["usage"]["output_tokens"] + len(str(answer["content"])) % 7)
