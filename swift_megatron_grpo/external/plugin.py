"""For ms-swift's `--external_plugins`, where the entry point is not wanted or not active:

    --external_plugins "$(python -c 'import swift_megatron_grpo.external as e; print(e.PATH)')"

ms-swift puts the folder of an external plugin at the head of sys.path. That is why this file has a folder of its own:
in the package's folder lie files such as types.py, which would then stand in for the standard library's.
"""

from swift_megatron_grpo.plugin.register import register

register()
