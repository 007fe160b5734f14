"""Make vLLM up to 0.25.1 and FlashInfer find the CUDA runtime in a process that has imported tilelang.

Both use the first file in /proc/self/maps with `libcudart` in its path. Tilelang, which flash-linear-attention
needs on Hopper with Triton 3.4 to 3.7.0, maps `libcudart_stub.so`, and they fail with "undefined symbol:
cudaDeviceReset", FlashInfer while it is imported. Both read the file with the builtin `open`, which is
replaced in their modules by one that leaves out the lines of the stub. Newer versions of vLLM compare the whole name.
"""

from io import StringIO
from typing import Any

from swift_megatron_grpo.runtime.import_hooks import give_name

MAPS = "/proc/self/maps"
STUB = "libcudart_stub.so"
SEARCHING = ("vllm.utils.system_utils", "flashinfer.comm.cuda_ipc")  # modules with a find_loaded_library


def find_runtime_beside_tilelang() -> None:
    for module in SEARCHING:
        give_name(module, "open", open_without_stub)


def open_without_stub(path: Any, *args: Any, **kwargs: Any) -> Any:
    """Open a file like the builtin, and /proc/self/maps without the lines of tilelang's stub."""
    if path != MAPS:
        return open(path, *args, **kwargs)  # the caller closes it
    with open(path, *args, **kwargs) as file:
        return StringIO("".join(line for line in file if not line.rstrip().endswith(STUB)))
