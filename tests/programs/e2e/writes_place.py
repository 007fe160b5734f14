"""A file of --external_plugins that writes where its process runs, into the folder that PLACES names."""

import json
import os
from pathlib import Path

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

_name = f"rank{os.environ['RANK']}" if "RANK" in os.environ else "server"
_place = {"pid": os.getpid()} | {name: os.environ[name] for name in _OF_TORCHRUN if name in os.environ}
Path(os.environ["PLACES"], _name).write_text(json.dumps(_place))
