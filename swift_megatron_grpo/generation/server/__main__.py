"""`swift rollout` with this package: `python -m swift_megatron_grpo.generation.server ARGUMENTS`.

No imports at module level, because the processes that vLLM starts import this file as well.
"""


def main() -> None:
    import torch

    if torch.accelerator.current_accelerator(check_available=True) is None:
        from swift_megatron_grpo.platforms.cpu import prepare_server_environment

        prepare_server_environment()  # before vLLM reads the environment, which its processes inherit

    from swift_megatron_grpo.generation.server.signals import end_at_signals
    from swift_megatron_grpo.generation.vllm.triton_cache import set_triton_cache

    set_triton_cache()  # for the processes of the engines as well

    with end_at_signals():
        from swift_megatron_grpo.generation.server.deploy import GRPORolloutDeploy

        GRPORolloutDeploy().main()


if __name__ == "__main__":
    main()
