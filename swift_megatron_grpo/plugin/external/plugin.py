"""Register this package through ms-swift's `--external_plugins`, where the entry point is unwanted or inactive.

    --external_plugins "$(python -c 'import swift_megatron_grpo.plugin.external as e; print(e.PATH)')"

ms-swift puts the folder of an external plugin at the head of sys.path. This file therefore has a separate folder: the
package's folder contains files such as types.py, which would shadow the standard library's.
"""

from swift_megatron_grpo.plugin.register import register

register()
