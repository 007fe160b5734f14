"""`swift rollout` of ms-swift alone: `python -m benchmarks.harness.stock_server ARGUMENTS`.

Without this module, vLLM does not start where tilelang is installed. The processes that the server starts import it as
well, because it is their main module.
"""

from __future__ import annotations

from swift_megatron_grpo.generation.vllm.cuda_runtime import find_runtime_beside_tilelang

find_runtime_beside_tilelang()

if __name__ == "__main__":
    from swift.pipelines import rollout_main

    rollout_main()
