# Everything for a run on GPUs, at the versions of requirements/gpu.lock.
#   docker build -f docker/gpu.Dockerfile -t swift-megatron-grpo:gpu .
#   docker run --rm --gpus all --shm-size 16g -v /data:/data swift-megatron-grpo:gpu megatron rlhf --rlhf_type grpo ...
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends python3.12-dev python3.12-venv git g++ ninja-build procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/swift-megatron-grpo
RUN python3.12 -m venv .venv
ENV PATH=/opt/swift-megatron-grpo/.venv/bin:$PATH
COPY requirements/gpu.lock requirements/gpu.lock
# torch first: the part of Transformer Engine that binds to it is compiled here, and its setup imports torch.
RUN pip install -c requirements/gpu.lock torch setuptools wheel ninja pybind11 \
        --extra-index-url https://download.pytorch.org/whl/cu130
RUN NVTE_FRAMEWORK=pytorch pip install -c requirements/gpu.lock --no-build-isolation "transformer-engine[pytorch,core_cu13]"
COPY . .
RUN pip install -c requirements/gpu.lock --no-build-isolation ".[gpu]"
# The build has no GPU: the doctor runs in the container, docker run --gpus all ... swift-megatron-grpo doctor
