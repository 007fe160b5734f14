"""The file for ms-swift's `--external_plugins`: see plugin.py beside this one."""

from pathlib import Path

PATH = str(Path(__file__).with_name("plugin.py"))
