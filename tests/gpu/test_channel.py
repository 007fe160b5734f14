"""The channel of weights over NCCL, on one GPU: a group of one rank, formed and checked as a larger one is."""

from __future__ import annotations

import pytest
import torch

from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, new_secret

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")]


def test_a_group_forms_over_nccl_and_sends() -> None:
    hub = Hub("127.0.0.1", 0, 1, secret := new_secret())
    channel = Channel(Rendezvous("127.0.0.1", hub.port, 1, secret, timeout=60.0), 0, torch.device("cuda", 0))
    channel.send({"text": "hello"}, torch.arange(100, dtype=torch.uint8, device="cuda"))
    channel.close()
    with pytest.raises(ConnectionError, match="closed"):
        channel.send({"text": "hello"})
