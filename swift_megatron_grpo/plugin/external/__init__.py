"""The file to pass to ms-swift's `--external_plugins`.

plugin.py  registers this package with ms-swift

Tested by tests/contract/test_swift_seam.py.
"""

from pathlib import Path

PATH = str(Path(__file__).with_name("plugin.py"))
