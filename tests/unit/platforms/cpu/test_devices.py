"""torch's API on the CPU platform, for code that was written for CUDA, and processes without the platform."""

from __future__ import annotations

import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swift_megatron_grpo.platforms import cpu
from swift_megatron_grpo.platforms.cpu import activate
from tests.forking.client import run_code

CPU = torch.device("cpu")
CUDA_DEVICES = ["cuda", "cuda:1", 0, torch.device("cpu")]


@pytest.fixture(autouse=True, scope="module")
def _platform() -> None:
    activate()


def test_activation_is_idempotent_and_cuda_stays_unavailable() -> None:
    start, mode_count = threading.Thread.start, len(sys.meta_path)
    activate()
    assert cpu._active
    assert threading.Thread.start is start and len(sys.meta_path) == mode_count
    assert not torch.cuda.is_available()


def test_activation_on_a_machine_with_cuda_is_refused() -> None:
    code = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "import swift_megatron_grpo.platforms.cpu as cpu\n"
        "try: cpu.activate()\n"
        "except RuntimeError as error: print(cpu._active, error)\n"
    )
    assert "False the CPU platform would hide a usable CUDA device" in run_code("torch", code)


def test_cuda_stays_unavailable_when_vllm_makes_torch_count_devices() -> None:
    """vLLM sets the variable when it is imported; torch's CUDA build then asks device_count, which is 1 here."""
    code = (
        "import os, torch; from swift_megatron_grpo.platforms.cpu import activate\n"
        "activate()\n"
        "import torch._dynamo  # which an optimizer imports, and a CPU build could not any more after the next lines\n"
        "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'\n"
        "torch.cuda._is_compiled = lambda: True\n"
        "weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)\n"
        "torch.optim.Adam([weight], lr=0.5).step()\n"
        "print(torch.cuda.is_available(), torch.cuda.device_count(), [round(w, 4) for w in weight.tolist()])\n"
    )
    assert run_code("torch", code).endswith("False 1 [0.5, 0.5]\n")


def test_a_process_that_does_not_activate_is_unchanged() -> None:
    code = (
        "import sys, threading, torch, swift_megatron_grpo.platforms.cpu as cpu\n"
        "assert not cpu._active\n"
        "assert torch.cuda.device_count() == 0 and torch.cuda.device_count.__module__.startswith('torch')\n"
        "assert threading.Thread.start.__module__ == 'threading'\n"
        "assert 'transformer_engine' not in sys.modules and 'megatron' not in sys.modules\n"
        "assert torch._C._len_torch_function_stack() == 0\n"
        "try: torch.empty(1, device='cuda')\n"
        "except (AssertionError, RuntimeError): print('unchanged')\n"  # of torch's CPU build; of its CUDA build
    )
    assert run_code("torch", code) == "unchanged\n"


def test_activation_after_the_import_of_megatron_is_refused() -> None:
    code = (
        "import sys, types, torch; from swift_megatron_grpo.platforms.cpu import activate\n"
        "sys.modules['megatron.core.extensions.transformer_engine'] = types.ModuleType('late')\n"
        "try: activate()\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert "megatron.core is already imported" in run_code("torch", code)


@pytest.mark.parametrize("device", CUDA_DEVICES, ids=str)
def test_factories_and_moves_use_the_cpu(device: torch.device | str | int) -> None:
    tensor = torch.ones(2)
    tensors = [
        torch.empty(2, device=device),
        torch.tensor([1, 2], device=device),
        torch.zeros_like(tensor, device=device),
        torch.arange(3, device=device, pin_memory=True),
        torch.as_tensor([1], device=device),
        tensor.new_empty(2, device=device),
        tensor.to(device),
        tensor.to(device, torch.float64, non_blocking=True),
        tensor.to(device=device, dtype=torch.float16),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2).to(device=device, dtype=torch.bfloat16).weight,
    ]
    assert all(result.device == CPU for result in tensors)
    assert (
        tensors[7].dtype == torch.float64 and tensors[8].dtype == torch.float16 and tensors[11].dtype == torch.bfloat16
    )
    assert torch.device(device) == CPU


def test_moves_between_host_and_device_return_the_tensor_itself() -> None:
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert tensor.pin_memory() is tensor
    assert module.cuda() is module and module.cuda(0).weight.device == CPU
    tensor.record_stream(torch.cuda.current_stream())


def test_arguments_that_are_not_cuda_devices_are_unchanged() -> None:
    assert torch.empty(2, device="meta").is_meta
    assert torch.ones(2).to(torch.float16).dtype == torch.float16
    assert torch.ones(2).to(torch.empty(0, dtype=torch.int64)).dtype == torch.int64
    with torch.device("meta"):
        assert torch.empty(2).is_meta
    assert torch.device("meta", 0).type == "meta"


def test_torch_jit_script_compiles() -> None:
    def add_mask(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], device=x.device, dtype=x.dtype)
        return x + mask.to(x.device)

    scripted = torch.jit.script(add_mask)
    assert torch.equal(scripted(torch.zeros(3)), torch.ones(3))


def test_new_threads_are_redirected() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.ones(2, device="cuda").to("cuda:0").device).result() == CPU
    devices = []

    class Worker(threading.Thread):
        def run(self) -> None:
            devices.append(torch.zeros(1, device=0).device)

    worker = Worker()
    worker.start()
    worker.join()
    assert devices == [CPU]
    assert "run" not in vars(worker)


def test_backward_functions_are_redirected() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((1,), 2.0, device="cuda")

    x = torch.ones(1, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.item() == 2.0


def test_checkpoints_from_a_gpu_can_be_loaded() -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(3), buffer)
    for location in ("cuda", "cuda:0"):
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, map_location=location), torch.arange(3))
    assert torch.serialization.default_restore_location(torch.UntypedStorage(4), "cuda:3").device == CPU


def test_the_cuda_generator_is_the_cpu_generator() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.cuda.get_rng_state_all()[0], torch.get_rng_state())


def test_streams_events_and_counters_have_no_effect() -> None:
    stream, event, later = (
        torch.cuda.Stream(),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    with torch.cuda.stream(stream), torch.cuda.device(0):
        event.record()
        later.record(stream)
        stream.wait_stream(torch.cuda.default_stream())
        stream.wait_event(stream.record_event())
    assert event.query() and stream.query() and event.elapsed_time(later) >= 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_device(0)
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


@pytest.mark.parametrize("name", ["get_device_properties", "get_device_capability", "get_device_name"])
def test_functions_that_describe_a_gpu_raise(name: str) -> None:
    with pytest.raises(AssertionError, match=f"torch.cuda.{name} needs a GPU"):
        getattr(torch.cuda, name)(0)
