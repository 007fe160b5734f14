# The CPU set of requirements/cpu.lock, by the same script as in a clone: to try a script without a GPU.
#   docker build -f docker/cpu.Dockerfile -t swift-megatron-grpo:cpu .
#   docker run --rm swift-megatron-grpo:cpu                          (the quickstart)
#   docker run --rm swift-megatron-grpo:cpu scripts/test.sh --quick
FROM python:3.12-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends git g++ procps && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/swift-megatron-grpo
COPY . .
RUN PYTHON=python3.12 scripts/setup_venv.sh --test
ENV PATH=/opt/swift-megatron-grpo/.venv/bin:$PATH OMP_NUM_THREADS=1
RUN swift-megatron-grpo doctor
CMD ["scripts/quickstart.sh"]
