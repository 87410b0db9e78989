# GPU image: Python 3.12, CUDA 13, vLLM, Megatron-Core, Transformer Engine, and NVIDIA Apex from source.
#
#   docker build -t megatron-grpo .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -it megatron-grpo plan --help
#
# Not for the CPU stack: there `bash tools/install.sh` is all that is needed.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv build-essential git ninja-build \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH

# The slow layers come first and do not depend on the code. vLLM decides which torch there is; all else is built against that one.
RUN pip install "vllm>=0.32,<0.34" "setuptools>=77" wheel pybind11
ARG MAX_JOBS=8
RUN MAX_JOBS=$MAX_JOBS NVTE_FRAMEWORK=pytorch pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]>=2.9"

# Apex is optional (fused Adam and norms). It is only to be had as source: the PyPI project of that name is another program.
ARG APEX_REF=master
RUN git clone --depth 1 --branch $APEX_REF https://github.com/NVIDIA/apex /tmp/apex \
    && MAX_JOBS=$MAX_JOBS APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex \
    && rm -rf /tmp/apex

WORKDIR /opt/megatron_grpo
COPY . .
RUN pip install -e ".[vllm,te,data,math,plot,tensorboard]"

ENTRYPOINT ["megatron-grpo"]
CMD ["--help"]
